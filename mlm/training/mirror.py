"""The mirror of a run's checkpoints in an object store: `checkpoint.mirror=s3://BUCKET/PREFIX`.

    PREFIX/mirror.json                      complete checkpoints, and the id of the writer
    PREFIX/config.yaml, tokenizer.json      copies from the run's folder
    PREFIX/step-00001000-<save id>/         manifest.json and shards of a checkpoint

An upload writes a folder, compares the sizes of its objects, then replaces mirror.json, which lists it. A
deletion removes the folder from the list first.

`Mirror.root` is a local folder of checkpoints with manifests alone, so that the functions for a run's folder
decide what is good, pruned, set aside or rolled back to.
"""

import logging
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from mlm.checkpoint.native import folders
from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.folders import CHECKPOINTS
from mlm.checkpoint.native.format import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
    decode_manifest,
    read_manifest_head,
)
from mlm.checkpoint.native.retention import choose_step, move_latest, outdated, reachable
from mlm.checkpoint.native.run_state import TOKENIZER_FILE, Lineage, Save, doubtful_since
from mlm.checkpoint.native.verify import check_whole
from mlm.launch.stop import StopRequest
from mlm.parallel.mesh import ParallelContext, host_group
from mlm.runs.config import CheckpointConfig, PretrainConfig
from mlm.runs.folder import check_space
from mlm.training.incidents.watcher import IncidentError
from mlm.training.saver import SaveFailedError
from mlm.util import object_store as store
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.files import dump_json, parse_json
from mlm.util.ownership import RUN_SETTINGS
from mlm.util.terminal import progress_bar

LISTING, MAX_LISTING = "mirror.json", 1 << 22  # bytes
FOLDER = re.compile(r"step-(\d{8,18})-[0-9A-Za-z-]{1,12}")

log = logging.getLogger(__name__)


@contextmanager
def mirroring(config: PretrainConfig, ctx: ParallelContext) -> Iterator[Callable[[Path], None]]:
    """Yield a function that uploads a checkpoint in the background; at the end, wait for uploads.

    Collective; rank 0 transfers. With checkpoint.from_mirror it first downloads what `out` lacks. Raises
    UserError if the mirror cannot be read or written, or is another run's; SaveFailedError if a finished
    run's last checkpoint is not uploaded.
    """
    if config.checkpoint.mirror is None:
        yield lambda path: None
        return
    # Others wait up to 30 days for rank 0 to transfer; an error ends the wait at once.
    ranks = Ranks(ctx.rank, ctx.world_size, host_group(ctx.world_size, 30 * 86400.0))
    uploads = ranks.together(
        lambda: Uploads(config) if ranks.is_main else None,
        lambda error: UserError(f"out={config.out}: {error}"),
    )
    failure = None
    try:
        yield uploads.add if uploads else lambda path: None
    except IncidentError as error:  # of all ranks; the newest good checkpoint may be on its way
        failure = error
    problem = ranks.broadcast(uploads.finish() if uploads else None)
    if failure:
        raise failure
    if problem:
        raise SaveFailedError(str(problem))


class Uploads:
    """Uploads checkpoints one after another in a thread. A newer checkpoint replaces a waiting one."""

    def __init__(self, config: PretrainConfig) -> None:
        self.out, self.settings, self.steps = Path(config.out), config.checkpoint, config.train.steps
        mirror, root = read_mirror(self.out, config.checkpoint), self.out / CHECKPOINTS
        if config.checkpoint.from_mirror and (mirror.newest is not None or mirror.has_config):
            mirror.download(root, folders.latest_checkpoint(root), config.checkpoint.from_step)
        mirror.write()
        self.mirror = mirror
        self._changed = threading.Condition()
        self._waiting: Path | None = None
        self._failure: str | None = None
        """Line on the last upload, unless it succeeded."""
        self._is_last = False
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()
        latest = folders.latest_checkpoint(self.out / CHECKPOINTS)
        if latest is not None and name_of(read_manifest_head(latest)) != self.mirror.newest:
            self.add(latest)  # its upload was interrupted, or the run was rolled back

    def add(self, path: Path) -> None:
        """Upload a checkpoint after the current upload. Returns at once."""
        with self._changed:
            if self._waiting is not None:
                skipped = self._waiting.name
                log.warning("%s is not mirrored: %s is complete before its turn", skipped, path.name)
            self._waiting = path
            self._changed.notify()

    def finish(self) -> str | None:
        """Wait for all uploads, with their progress on stderr, until a request to stop.

        Returns the problem of a finished run whose last checkpoint is not uploaded; for a stopped run it is a
        warning, as the next start uploads it.
        """
        with self._changed:
            self._is_last = True
            self._changed.notify()
        self._thread.join(0.5)
        url, later = self.mirror.url, f"mlm pretrain resume={self.out} uploads it"
        if self._thread.is_alive():
            size = self.mirror.remaining
            print(f"mlm pretrain: uploading to {url}; Ctrl-C leaves it out, and {later}", file=sys.stderr)
            with StopRequest() as stop, progress_bar(f"uploading to {url}", size, in_bytes=True) as advance:
                while self._thread.is_alive() and not stop.exit_code:  # not by a requeue's signal, repeated
                    self._thread.join(0.5)
                    advance(size - self.mirror.remaining)
                    size = self.mirror.remaining
            if self._thread.is_alive():
                self._failure = f"{url}: the upload is left out ({stop.reason})"
        if self._failure is None:
            return None
        latest = folders.latest_checkpoint(self.out / CHECKPOINTS)
        if latest is not None and folders.step_of(latest) >= self.steps:
            return f"{self._failure}; {later}"
        log.warning("%s; %s", self._failure, later)
        return None

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._is_last)
                path, self._waiting = self._waiting, None
            if path is None:
                return
            self._failure = f"{path.name} is not mirrored"
            try:
                self.mirror.upload(path, self.settings)
                self._failure = None
            except (UserError, OSError) as error:
                reason = error if path.exists() else "it was deleted before its turn"  # by keep_last
                self._failure = f"{path.name} is not mirrored: {reason}"
                if not self._is_last:
                    log.warning("%s; the next one is tried again", self._failure)


def read_mirror(out: Path, settings: CheckpointConfig) -> "Mirror":
    """Return the mirror of the run in `out`. Raises UserError, also for another run's mirror; OSError."""
    mirror, root = Mirror(str(settings.mirror)), out / CHECKPOINTS
    latest = folders.latest_checkpoint(root)
    local = {name_of(save) for save in (*folders.saves_in(root), *_save_and_ancestors(latest))}
    if not settings.from_mirror and mirror.newest not in (None, *local):
        problem = f"holds {mirror.newest} of another run, or of this one on another machine"
        fix = f"continue it by resume={mirror.url}, or name another prefix"
        raise UserError(f"checkpoint.mirror={mirror.url}: {problem}; {fix}")
    if settings.from_mirror and mirror.newest is not None:
        mirror.choose_source(latest, settings.from_step)
    return mirror


class Mirror:
    """The checkpoints of one run below a URL, for the one process that writes them. Raises UserError."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.remaining = 0
        """Bytes still to upload of the current checkpoint."""
        self._writer = os.urandom(8).hex()
        self._folder = tempfile.TemporaryDirectory(prefix="mlm-mirror-", ignore_cleanup_errors=True)
        self.root = Path(self._folder.name)
        """Folder of checkpoints: manifests, and sparse files of the sizes in the store."""
        self._load()
        self.stored = {*self.checkpoints, *self.aside}
        """Folders that mirror.json lists."""

    @property
    def checkpoints(self) -> list[str]:
        return [name_of(read_manifest_head(path)) for path in folders.checkpoints(self.root).values()]

    @property
    def aside(self) -> list[str]:
        paths = sorted(path for path in self.root.iterdir() if folders.ASIDE.fullmatch(path.name))
        return [name_of(read_manifest_head(path)) for path in paths]

    @property
    def newest(self) -> str | None:
        """Folder of the checkpoint to continue from."""
        return next(reversed(self.checkpoints), None)

    def choose_step(self, step: int | None, setting: str) -> int:
        """Return the step to continue from; `step` None chooses the newest good one."""
        if not (paths := folders.candidates(self.root)):
            fix = "restore one, or name the prefix of a run's checkpoint.mirror"
            raise CorruptFileError(f"{self.url}: holds no whole checkpoint; {fix}")
        since = doubtful_since(read_manifest_head(paths[0]).state) or None
        return choose_step(self.root, step, since=since, setting=setting, location=self.url)

    def upload(self, directory: Path, settings: CheckpointConfig) -> None:
        """Upload a checkpoint; delete outdated ones that are not in its local folder. Raises OSError."""
        manifest = read_manifest_head(directory)
        with ExitStack() as stack:  # all opened now: the run may delete them during the upload
            opened = {n: stack.enter_context(open(directory / n, "rb")) for n in (*manifest.files, MANIFEST)}
            encoded = opened[MANIFEST].read()
            self._check_writer()
            self._put(name_of(manifest), {file: content.fileno() for file, content in opened.items()})
        for path in (directory.parent.parent / file for file in (RUN_SETTINGS, TOKENIZER_FILE)):
            if path.is_file():
                store.write_object(f"{self.url}/{path.name}", path.read_bytes())
        self._check_writer()
        self._place(manifest, encoded, {name: entry.bytes for name, entry in manifest.files.items()})
        local = folders.saves_in(directory.parent)
        for path in outdated(self.root, keep_last=settings.keep_last, keep_every=settings.keep_every):
            if read_manifest_head(path).save not in local:
                folders.discard(path)
        self.write()

    def _put(self, name: str, files: dict[str, int]) -> None:
        """Upload open files, the manifest last, until all have their size in the store."""
        sizes = {file: os.fstat(number).st_size for file, number in files.items()}
        for attempt in range(store.UPLOADS + 1):
            stored = self._sizes(f"/{name}")
            missing = [file for file, size in sizes.items() if stored.get(file) != size]
            self.remaining = sum(sizes[file] for file in missing)
            if not missing:
                return
            for file in missing if attempt < store.UPLOADS else ():
                store.upload_file(f"/proc/self/fd/{files[file]}", f"{self.url}/{name}/{file}")
                self.remaining -= sizes[file]
        raise UserError(f"{self.url}/{name}/{missing[0]}: {store.TRUNCATED}")

    def _place(self, manifest: Manifest, encoded: bytes, sizes: Mapping[str, int]) -> None:
        """Make a checkpoint the newest one in `root`, and set other branches aside."""
        if (old := folders.saves_in(self.root).get(manifest.save)) is not None:
            folders.discard(old)
        staging = folders.open_staging(self.root, manifest.step, manifest.save_id)
        (staging / MANIFEST).write_bytes(encoded)
        for file in manifest.files.keys() & sizes.keys():
            (staging / file).touch()
            os.truncate(staging / file, sizes[file])
        folders.set_newer_aside(self.root, manifest)
        folders.publish(staging, self.root, manifest)
        move_latest(self.root, manifest.step)

    def choose_source(self, latest: Path | None, step: int | None) -> tuple[int, Path]:
        """Return the step to continue from, and its checkpoint in `root`. Raises as `download`."""
        chosen, past = self.choose_step(step, "checkpoint.from_step"), _save_and_ancestors(latest)
        source = reachable(self.root)[chosen]
        manifest = read_manifest_head(source)
        if latest is None or manifest.save in past or past[0] in Lineage.of(manifest.state).ancestors:
            return chosen, source
        out = latest.parent.parent
        raise UserError(f"out={out}: holds another run than {self.url}; set out=… to a new folder")

    def download(self, root: Path, latest: Path | None, step: int | None = None) -> None:
        """Let a run's folder `root`, whose latest checkpoint is `latest`, continue from that of a step.

        `step` None means the newest good one, or `latest` if it descends from that and the mirror was not
        rolled back since. Raises CorruptFileError if none is good, UserError if `latest` is of another run;
        OSError.
        """
        past = _save_and_ancestors(latest)
        while True:
            chosen, source = self.choose_source(latest, step)
            manifest = read_manifest_head(source)
            before, is_past = Lineage.of(manifest.state).ancestors, manifest.save in past
            later = {name_of(save) for save in past if save not in (manifest.save, *before)}
            if is_past and step is None and not later & self.stored:
                return
            self.write()  # other writers stop deleting
            try:
                local = folders.saves_in(root).get(manifest.save)
                if local is None or local != reachable(root).get(chosen) or folders.checkpoint_problem(local):
                    self._fetch(source, manifest, root)
                break
            except CorruptFileError as error:
                if step is not None:
                    raise
                log.warning("%s; taking the checkpoint before it", error)
                (source / next(iter(manifest.files))).unlink()
        if is_past and later:
            log.warning("out=%s: goes back to step %d, as %s does", root.parent, chosen, self.url)
        move_latest(root, chosen)
        move_latest(self.root, chosen)

    def _fetch(self, source: Path, manifest: Manifest, root: Path) -> None:
        """Download the checkpoint whose manifest is in `source` into `root`, and verify every byte."""
        url, sizes = f"{self.url}/{name_of(manifest)}", {n: e.bytes for n, e in manifest.files.items()}
        staging = folders.open_staging(root, manifest.step, manifest.save_id)
        try:
            shutil.copyfile(source / MANIFEST, staging / MANIFEST)
            check_space(staging, sum(sizes.values()), f"out={root.parent}")
            with progress_bar(f"downloading {url}", sum(sizes.values()), in_bytes=True) as advance:
                for file, size in sizes.items():
                    store.download_file(f"{url}/{file}", staging / file)
                    advance(size)
            check_whole(staging)
            folders.set_newer_aside(root, manifest)
            folders.publish(staging, root, manifest)
        finally:
            folders.discard(staging)

    def _load(self) -> None:
        """Fill `root` by mirror.json, or from all complete folders if that is empty, damaged or missing.

        A complete upload that is not listed yet counts if it continues the newest checkpoint.
        """
        sizes, url, damage = self._sizes(), f"{self.url}/{LISTING}", ""
        self.has_config = RUN_SETTINGS in sizes
        try:
            checkpoints, aside = self._listing()[1:]
        except CorruptFileError as error:
            checkpoints, aside, damage = [], [], str(error)
        folder_names = {path.removesuffix(f"/{MANIFEST}") for path in sizes if path.endswith(f"/{MANIFEST}")}
        unlisted = [name for name in folder_names.difference(checkpoints, aside) if FOLDER.fullmatch(name)]
        unlisted.sort(key=lambda name: (store.modified_at(f"{self.url}/{name}/{MANIFEST}"), name))
        for name in (*aside, *checkpoints, *unlisted):
            file = f"{self.url}/{name}/{MANIFEST}"
            try:
                encoded = store.read_object(file, MAX_MANIFEST_BYTES) or b""
                manifest = decode_manifest(encoded, file, with_chunks=False)
                if name_of(manifest) != name:
                    raise CorruptFileError(f"{file}: of another checkpoint")
            except CorruptFileError as error:
                log.warning("%s; it is passed over", error)
                continue
            stored = {n: sizes[path] for n in manifest.files if (path := f"{name}/{n}") in sizes}
            if name in unlisted:
                is_next = self.newest in {name_of(save) for save in Lineage.of(manifest.state).ancestors}
                is_whole = stored == {n: entry.bytes for n, entry in manifest.files.items()}
                if not is_whole or not (is_next or self.newest is None or not checkpoints):
                    continue
            self._place(manifest, encoded, stored)
            if name in aside:
                folder = folders.checkpoints(self.root)[manifest.step]
                folder.rename(folders.free_name(self.root, manifest.step))
        if damage and not self.checkpoints:
            raise CorruptFileError(f"{url}: {damage}; restore it, or name another prefix")
        if self.checkpoints and not set(checkpoints).intersection(self.checkpoints):
            why = damage or "missing, or names none"
            log.warning("%s: %s; rebuilt from whole folders, the newest is %s", url, why, self.newest)

    def _sizes(self, below: str = "") -> dict[str, int]:
        """Bytes of the objects of the mirror, or of a folder below it, by path."""
        url = f"{self.url}{below}"
        return {entry.url.removeprefix(f"{url}/"): entry.bytes for entry in store.list_objects(url)}

    def _listing(self) -> tuple[str | None, list[str], list[str]]:
        """Writer, checkpoints and set-aside checkpoints by mirror.json; None, [], [] without it."""
        if (content := store.read_object(f"{self.url}/{LISTING}", MAX_LISTING)) is None:
            return None, [], []
        try:
            body = parse_json(content)
            writer, checkpoints = str(body["writer"]), list(body["checkpoints"])
            aside = [name for name in body["aside"] if name not in checkpoints]
            if not all(map(FOLDER.fullmatch, (*checkpoints, *aside))):
                raise ValueError("names are none")
            return writer, checkpoints, aside
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptFileError(f"no list of checkpoints ({error})") from error

    def _check_writer(self) -> None:
        with suppress(CorruptFileError):  # a damaged listing is replaced
            if self._listing()[0] not in (None, self._writer):
                raise UserError(f"{self.url}: another run writes there now; name another prefix for this one")

    def write(self) -> None:
        """Write mirror.json as its only writer; delete unlisted checkpoints and interrupted uploads.

        A failed deletion is a warning, and repeated later.
        """
        body = {"writer": self._writer, "checkpoints": self.checkpoints, "aside": self.aside}
        store.write_object(f"{self.url}/{LISTING}", dump_json(body))
        sizes, listed = self._sizes(), {*self.checkpoints, *self.aside}
        try:
            for name in {path.partition("/")[0] for path in sizes} - listed:
                is_partial = f"{name}/{MANIFEST}" not in sizes
                if name in self.stored and not is_partial:  # first: a folder without it counts as partial
                    store.delete_folder(f"{self.url}/{name}/{MANIFEST}")
                if name in self.stored or (is_partial and FOLDER.fullmatch(name)):
                    store.delete_folder(f"{self.url}/{name}")
            self.stored = listed
        except UserError as error:
            self.stored |= listed
            log.warning("old checkpoints are not deleted: %s", error)


def _save_and_ancestors(path: Path | None) -> tuple[Save, ...]:
    return () if path is None else (read_manifest_head(path).save, *folders.ancestors_of(path))


def name_of(save: "Save | Manifest") -> str:
    """Name of a checkpoint's folder in a mirror, different for two saves of one step."""
    return f"{folders.step_name(save.step)}-{save.save_id[:12]}"
