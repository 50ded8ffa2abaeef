"""Local copies of corpora in an object store, but for their tokens.

It is a folder of `data.cache` for one state of a corpus: its index, receipt and tokenizer whole, and in
place of PREFIX.bin a PREFIX.bin.json that points to the object. Its tokens are read by stored_corpus.py.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path

from mlm.data.config import SPLITS
from mlm.util.errors import UserError
from mlm.util.files import digest_bytes, dump_json, write_atomic
from mlm.util.object_store import StoredObject, explain_store_errors, list_objects, open_object

REMAKE = "delete its folder, which is made again"


@cache
def copy_locally(url: str, cache: str, limit: int) -> Path:
    """Make the local copy of a corpus; return the prefix of its training part. `limit` is in bytes.

    `url` is a folder with train.bin and .idx, or the prefix of a pair; train.bin and .idx stand for their
    folder. Raises UserError.
    """
    folder = url.rstrip("/")
    objects, part = _corpus_files(folder, SPLITS), SPLITS[0]
    if not objects:
        folder, _, part = folder.rpartition("/")
        objects = _corpus_files(folder, SPLITS if part == SPLITS[0] else (part,))
    if not objects:
        problem = f"neither train.bin and train.idx in it, nor {part}.bin and {part}.idx"
        raise UserError(f"data: {url}: {problem}; name a folder or prefix that holds a corpus")
    identity = digest_bytes(dump_json({name: asdict(stored) for name, stored in objects.items()}))
    copy = Path(cache, identity.removeprefix("xxh3:")[:16], folder.rpartition("/")[2])
    with writing_cache(copy):
        copy.mkdir(parents=True, exist_ok=True)
        for name, stored in objects.items():
            path = copy / name
            if name.endswith(".bin"):
                write_atomic(stored_pointer(path), dump_json(asdict(stored) | {"limit": limit}))
            elif not path.is_file() or path.stat().st_size != stored.bytes:
                with explain_store_errors(stored.url), open_object(stored.url, stored.etag) as content:
                    write_atomic(path, partial(shutil.copyfileobj, content))
    return copy / part


@contextmanager
def writing_cache(folder: Path) -> Iterator[None]:
    """Turn an OSError of what is written below data.cache into a UserError."""
    try:
        yield
    except OSError as error:
        problem = f"data.cache: {error.filename or folder}: {error.strerror}"
        raise UserError(f"{problem}; name a folder with room in it that this user may write") from error


def _corpus_files(folder: str, parts: Sequence[str]) -> dict[str, StoredObject]:
    """Return the files of these parts in a folder, and what lies beside them; none without the first part."""
    listed = {stored.url.rpartition("/")[2]: stored for stored in list_objects(folder, depth=1)}
    if not {f"{parts[0]}.bin", f"{parts[0]}.idx"} <= listed.keys():
        return {}
    names = {"corpus.json", "tokenizer.json", *(f"{part}{end}" for part in parts for end in (".bin", ".idx"))}
    return {name: listed[name] for name in sorted(names & listed.keys())}


def stored_pointer(bin_path: Path) -> Path:
    """Return the path of the file that a local copy has in place of a .bin."""
    return bin_path.with_name(f"{bin_path.name}.json")
