"""The mirror of a run's checkpoints in an object store: `checkpoint.mirror=s3://BUCKET/PREFIX`.

    PREFIX/mirror.json                      the checkpoints that are whole, and who writes here
    PREFIX/config.yaml, tokenizer.json      of the run's folder
    PREFIX/step-00001000-<save id>/         manifest.json and shards of a checkpoint

An upload writes a folder, compares the sizes of its objects, then replaces mirror.json: a checkpoint is there
if that lists it, with the digest of its manifest. One that is deleted leaves the list first.
"""

import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mlm.checkpoint.native import folders
from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.format import MANIFEST, Manifest, read_manifest, read_manifest_head
from mlm.checkpoint.native.run_state import TOKENIZER_FILE, Lineage, Save
from mlm.checkpoint.native.verify import check_whole
from mlm.launch.stop import StopRequest
from mlm.parallel.mesh import ParallelContext, host_group
from mlm.training.config import CheckpointConfig, PretrainConfig
from mlm.training.run_folder import check_space
from mlm.training.state import CHECKPOINTS
from mlm.util import object_store as store
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.files import DIGEST, dump_json, parse_json
from mlm.util.terminal import progress_bar

LISTING, MAX_LISTING = "mirror.json", 1 << 22  # bytes
FOLDER = re.compile(r"step-(\d{8,18})-[0-9A-Za-z-]{1,12}")
UPLOADS = 3  # of a file whose object has another size
LONG_S = 30 * 86400.0
"""Limit of a wait for rank 0 while it transfers, which an error ends at once."""

log = logging.getLogger(__name__)


@contextmanager
def mirroring(config: PretrainConfig, ctx: ParallelContext) -> Iterator[Callable[[Path], None]]:
    """Yield the function that uploads a checkpoint in the background; at the end, wait for uploads.

    Collective; rank 0 transfers. With checkpoint.from_mirror it first downloads what `out` lacks. Raises
    UserError if the mirror cannot be read or written, or is another run's.
    """
    if config.checkpoint.mirror is None:
        yield lambda path: None
        return
    ranks = Ranks(ctx.rank, ctx.world_size, host_group(ctx.world_size, LONG_S))
    uploads = ranks.together(
        lambda: Uploads(config) if ranks.is_main else None,
        lambda error: UserError(f"out={config.out}: {error}"),
    )
    yield uploads.add if uploads else lambda path: None
    if uploads:
        uploads.finish()
    ranks.broadcast(None)


class Uploads:
    """Uploads checkpoints one after another in a thread. A newer one takes the place of one that waits."""

    def __init__(self, config: PretrainConfig) -> None:
        self.out, self.settings = Path(config.out), config.checkpoint
        self.mirror = open_mirror(self.out, config.checkpoint)
        self._changed = threading.Condition()
        self._waiting: Path | None = None
        self._is_last = False
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()
        own = folders.latest_checkpoint(self.out / CHECKPOINTS)
        if own is not None and name_of(read_manifest_head(own)) != self.mirror.newest:
            self.add(own)  # its upload was cut off, or the run was rolled back

    def add(self, path: Path) -> None:
        """Upload a checkpoint when the one before is uploaded. Returns at once."""
        with self._changed:
            if self._waiting is not None:
                skipped = self._waiting.name
                log.warning("%s is not mirrored: %s is complete before its turn", skipped, path.name)
            self._waiting = path
            self._changed.notify()

    def finish(self) -> None:
        """Wait for all uploads, with their progress on stderr; a request to stop leaves them out."""
        with self._changed:
            self._is_last = True
            self._changed.notify()
        self._thread.join(0.5)
        if not self._thread.is_alive():
            return
        url, left = self.mirror.url, self.mirror.left
        later = f"resume={self.out} uploads it"
        print(f"mlm pretrain: uploading to {url}; Ctrl-C leaves it out, and {later}", file=sys.stderr)
        with StopRequest() as stop, progress_bar(f"uploading to {url}", left, in_bytes=True) as advance:
            while self._thread.is_alive() and not stop.exit_code:  # not by a requeue's signal, which repeats
                self._thread.join(0.5)
                advance(left - self.mirror.left)
                left = self.mirror.left
        if self._thread.is_alive():
            log.warning("%s: the upload is left out (%s); %s", url, stop.reason, later)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._is_last)
                path, self._waiting = self._waiting, None
            if path is None:
                return
            try:
                self.mirror.upload(path, self.settings)
            except (UserError, OSError) as error:
                reason = error if path.exists() else "it was deleted before its turn"  # by keep_last
                log.warning("%s is not mirrored: %s; the next one is tried again", path.name, reason)


def open_mirror(out: Path, settings: CheckpointConfig) -> "Mirror":
    """Claim the mirror of the run in `out`, which begins or continues it. Raises UserError, OSError."""
    mirror, root = Mirror(str(settings.mirror)), out / CHECKPOINTS
    own = folders.latest_checkpoint(root)
    known = {name_of(save) for save in (*folders.saves_in(root), *(folders.ancestors_of(own) if own else ()))}
    if mirror.newest is not None and mirror.newest not in known:
        if not settings.from_mirror:
            problem = f"holds {mirror.newest} of another run, or of this one on another machine"
            fix = f"continue it by resume={mirror.url}, or name another prefix"
            raise UserError(f"checkpoint.mirror={mirror.url}: {problem}; {fix}")
        mirror.download(root, own, known)
    mirror.write(mirror.checkpoints)
    return mirror


class Mirror:
    """The checkpoints of one run below a URL, for the one process that writes them. Raises UserError."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.left = 0
        """Bytes to upload of the checkpoint under way."""
        self._writer = os.urandom(8).hex()
        self.checkpoints = self._read()[1]
        """Digest of the manifest by folder, the oldest first."""

    @property
    def newest(self) -> str | None:
        """Folder of the checkpoint that was uploaded last."""
        return next(reversed(self.checkpoints), None)

    def upload(self, directory: Path, settings: CheckpointConfig) -> None:
        """Upload a checkpoint; delete those that neither its folder nor retention keeps. Raises OSError."""
        manifest = read_manifest_head(directory)
        name, ancestors = name_of(manifest), Lineage.of(manifest.state).ancestors
        with ExitStack() as stack:  # opened at once: the run may delete them before their turn
            opened = {n: stack.enter_context(open(directory / n, "rb")) for n in (*manifest.files, MANIFEST)}
            writer, self.checkpoints = self._read()
            if writer not in (None, self._writer):
                raise UserError(f"{self.url}: another run writes there now; name another prefix for this one")
            self._put(name, {file: content.fileno() for file, content in opened.items()})
        for path in (directory.parent.parent / file for file in ("config.yaml", TOKENIZER_FILE)):
            if path.is_file():
                store.write_object(f"{self.url}/{path.name}", path.read_bytes())
        parent = ancestors[-1].step if ancestors else -1  # the run went back from what is newer
        past = [each for each in self.checkpoints if step_in(each) <= parent]
        here, every = {name_of(save) for save in folders.saves_in(directory.parent)}, settings.keep_every
        kept = {*here, *[*past, name][-settings.keep_last :]}
        kept |= {each for each in past if every and step_in(each) % every == 0}
        self.write({each: self.checkpoints[each] for each in past if each in kept} | {name: manifest.digest})

    def _put(self, name: str, files: dict[str, int]) -> None:
        """Upload open files, the manifest last, until all have their size in the store."""
        sizes = {file: os.fstat(number).st_size for file, number in files.items()}
        for attempt in range(UPLOADS + 1):
            stored = self._stored(name)
            missing = [file for file, size in sizes.items() if stored.get(file) != size]
            if not missing:
                return
            self.left = sum(sizes[file] for file in missing)
            for file in missing if attempt < UPLOADS else ():
                store.upload_file(f"/proc/self/fd/{files[file]}", f"{self.url}/{name}/{file}")
                self.left -= sizes[file]
        problem = f"truncated in each of {UPLOADS} uploads; check the network"
        raise UserError(f"{self.url}/{name}/{missing[0]}: {problem}")

    def _stored(self, name: str) -> dict[str, int]:
        """Bytes of the objects in a folder, by name."""
        return {each.url.rpartition("/")[2]: each.bytes for each in store.list_objects(f"{self.url}/{name}")}

    def download(self, root: Path, own: Path | None, known: set[str]) -> None:
        """Download the newest whole checkpoint into `root`, whose newest is `own`, unless it is known there.

        Raises CorruptFileError if none is whole; UserError too if `own` is of another run; OSError.
        """
        problems = list[str]()
        for name in reversed(self.checkpoints):
            if name in known:
                return
            staging = folders.open_staging(root, step_in(name), name.rpartition("-")[2])
            try:
                manifest = self._fetch(name, staging, own)
                folders.set_newer_aside(root, manifest)
                return folders.publish(staging, root, manifest)
            except CorruptFileError as error:
                problems.append(str(error))
                log.warning("%s; taking the checkpoint before it", error)
            finally:
                folders.discard(staging)
        raise CorruptFileError(f"{self.url}: no checkpoint is whole. {problems[0]}")

    def _fetch(self, name: str, staging: Path, own: Path | None) -> Manifest:
        """Download a checkpoint that descends from `own` into a new folder, and compare every byte."""
        url, stored, out = f"{self.url}/{name}", self._stored(name), staging.parent.parent
        if MANIFEST not in stored:
            raise CorruptFileError(f"{url}/{MANIFEST}: is not there")
        store.download_file(f"{url}/{MANIFEST}", staging / MANIFEST)
        manifest = read_manifest(staging)
        if manifest.digest != self.checkpoints[name] or name_of(manifest) != name:
            raise CorruptFileError(f"{url}/{MANIFEST}: not the one that {LISTING} lists")
        if own is not None and read_manifest_head(own).save not in Lineage.of(manifest.state).ancestors:
            raise UserError(f"out={out}: holds another run than {self.url}; set out=… to a new folder")
        sizes = {file: entry.bytes for file, entry in manifest.files.items()}
        if wrong := [file for file, size in sizes.items() if stored.get(file) != size]:
            raise CorruptFileError(f"{url}/{wrong[0]}: missing or truncated")
        check_space(staging, sum(sizes.values()), f"out={out}")
        with progress_bar(f"downloading {url}", sum(sizes.values()), in_bytes=True) as advance:
            for file, size in sizes.items():
                store.download_file(f"{url}/{file}", staging / file)
                advance(size)
        check_whole(staging)
        return manifest

    def _read(self) -> tuple[str | None, dict[str, str]]:
        """Writer and checkpoints by mirror.json; None and none if there is none."""
        url = f"{self.url}/{LISTING}"
        if (content := store.read_object(url, MAX_LISTING)) is None:
            return None, {}
        try:
            body = parse_json(content)
            checkpoints = dict(body["checkpoints"])
            if not all(FOLDER.fullmatch(n) and DIGEST.fullmatch(digest) for n, digest in checkpoints.items()):
                raise ValueError("names or digests are none")
            return str(body["writer"]), checkpoints
        except (ValueError, TypeError, KeyError) as error:
            problem = f"{url}: no list of checkpoints ({error})"
            raise CorruptFileError(f"{problem}; restore it, or name another prefix") from error

    def write(self, checkpoints: dict[str, str]) -> None:
        """Write mirror.json, as its one writer from now on; delete what leaves it, and cut off uploads."""
        body = {"writer": self._writer, "checkpoints": checkpoints}
        store.write_object(f"{self.url}/{LISTING}", dump_json(body))
        found = {each.url.removeprefix(f"{self.url}/") for each in store.list_objects(self.url)}
        before, self.checkpoints = self.checkpoints, checkpoints
        for name in {path.partition("/")[0] for path in found} - checkpoints.keys():
            if name in before or (FOLDER.fullmatch(name) and f"{name}/{MANIFEST}" not in found):
                store.delete_folder(f"{self.url}/{name}")


def name_of(save: "Save | Manifest") -> str:
    """Name of a checkpoint's folder in a mirror. Two saves of one step have two."""
    return f"{folders.step_name(save.step)}-{save.save_id[:12]}"


def step_in(name: str) -> int:
    """The step in such a name."""
    return int(name.split("-")[1])
