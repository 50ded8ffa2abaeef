"""Objects of S3-compatible stores: listing, reading by ranges, uploads, and errors of a store in one line.

botocore finds endpoint, region and credentials as it does for every program (AWS_ENDPOINT_URL, AWS_PROFILE,
~/.aws); mlm neither has such settings nor saves them. Errors show only the error code of a response.
s3fs and botocore retry with back-off; an object that changes while it is read is an error (If-Match).
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlm.util.errors import CorruptFileError, Problem, UserError
from mlm.util.extras import load_extra

S3 = "s3://"
ATTEMPTS = 6
"""Attempts of botocore, with random doubling pauses: 16 s on average. s3fs repeats them 5 times if the store
does not respond or truncates bodies."""
PART = 1 << 23  # bytes of a request when an object is read from end to end: 8 MiB
CONCURRENT = 32  # requests at a time
UPLOADS = 3
"""Attempts to write an object whose content is truncated."""
TRUNCATED = f"truncated in each of {UPLOADS} uploads; check the network"
NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError")


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as it was when it was listed."""

    url: str
    bytes: int
    etag: str
    """The store's identifier of its content."""

    @property
    def digest(self) -> str:
        return f"s3:{self.etag.strip(chr(34))}"


def is_stored(path: str | None) -> bool:
    return path is not None and path.startswith(S3)


def split_step(url: str) -> tuple[str, int | None]:
    """Split `s3://BUCKET/PREFIX@STEP` into URL and step; None without a step."""
    match = re.fullmatch(r"(s3://.*[^/])@(\d{1,18})", url)
    return (match[1], int(match[2])) if match else (url, None)


def url_problem(key: str, url: str) -> Problem | None:
    """The problem of a text that is not a bucket URL, or holds credentials, which are not printed."""
    if not is_stored(url):
        return Problem.at(key, url, "no URL of an object store", f"write {key}=s3://BUCKET/NAME")
    bucket = url.removeprefix(S3).partition("/")[0]
    if "@" in bucket:
        fix = f"put them into the environment or ~/.aws, and write {key}=s3://BUCKET/NAME"
        return Problem((key,), f"{key}: the URL holds credentials", fix)
    return None if bucket else Problem.at(key, url, "names no bucket", f"write {key}=s3://BUCKET/NAME")


def open_store(url: str, etag: str | None = None) -> Any:
    """Return s3fs's file system; with `etag`, reads of other object contents fail."""
    s3fs = load_extra("s3fs", url, "cloud")
    return s3fs.S3FileSystem(
        use_listings_cache=False,
        config_kwargs={
            "retries": {"mode": "standard", "total_max_attempts": ATTEMPTS},
            "max_pool_connections": CONCURRENT,  # botocore's default is 10
            "connect_timeout": 10,
            "read_timeout": 30,
        },
        s3_additional_kwargs={} if etag is None else {"IfMatch": etag},
    )


def list_objects(url: str, depth: int | None = None) -> list[StoredObject]:
    """Return the object `url`, or all objects below it, sorted by name. Raises UserError."""
    with explain_store_errors(url):
        entries = open_store(url).find(url, maxdepth=depth, detail=True)
    return [
        StoredObject(f"{S3}{name}", int(entry["size"]), str(entry["ETag"]))
        for name, entry in sorted(entries.items())
        if entry["type"] == "file"
    ]


def read_ranges(source: StoredObject, starts: Sequence[int], length: int) -> list[bytes]:
    """Read `length` bytes from each start, fewer at the end of the object. Raises UserError."""
    ends = [min(start + length, source.bytes) for start in starts]
    with explain_store_errors(source.url):
        store = open_store(source.url, source.etag)
        contents: list[bytes] = store.cat_ranges(
            [source.url] * len(starts), list(starts), ends, batch_size=CONCURRENT, on_error="raise"
        )
    for start, end, content in zip(starts, ends, contents, strict=True):
        if len(content) != end - start:
            raise UserError(f"{source.url}: {len(content)} bytes instead of {end - start} at byte {start}")
    return contents


def open_object(url: str, etag: str | None = None) -> Any:
    """Open an object to read from end to end. It raises errors of the store (`explain_store_errors`)."""
    return open_store(url, etag).open(url, "rb", block_size=PART, cache_type="readahead")


def read_object(url: str, most: int) -> bytes | None:
    """Return an object of at most `most` bytes; None if it does not exist. Raises UserError."""
    stored = next((stored for stored in list_objects(url) if stored.url == url), None)
    if stored is None:
        return None
    if stored.bytes > most:
        raise CorruptFileError(f"{url}: {stored.bytes} bytes, {most} is the limit; name another")
    return read_ranges(stored, [0], most)[0]


def write_object(url: str, content: bytes) -> None:
    """Replace an object atomically. Raises UserError.

    Compares its size: a proxy or a store may accept a truncated body.
    """
    with explain_store_errors(url, "write"):
        for _ in range(UPLOADS):
            open_store(url).pipe_file(url, content)
            if open_store(url).size(url) == len(content):
                return
    raise UserError(f"{url}: {TRUNCATED}")


def upload_file(path: str, url: str) -> None:
    """Upload a file, in parts. Raises UserError, and OSError where the file cannot be read."""
    with explain_store_errors(url, "write"):
        # four parts at a time are in memory
        open_store(url).put_file(path, url, chunksize=2 * PART, max_concurrency=4)


def download_file(url: str, path: Path) -> None:
    with explain_store_errors(url):
        open_store(url).get_file(url, str(path))


def modified_at(url: str) -> float:
    with explain_store_errors(url):
        return float(open_store(url).modified(url).timestamp())


def delete_folder(url: str) -> None:
    with explain_store_errors(url, "write"):
        open_store(url).rm(url, recursive=True)


@contextmanager
def explain_store_errors(url: str, verb: str = "read") -> Iterator[None]:
    """Turn errors of a store into a one-line UserError without the text of its response."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # s3fs, botocore, aiohttp and asyncio share no base class
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        code = str(getattr(cause, "response", {}).get("Error", {}).get("Code", ""))
        name = code if code.isalnum() else type(cause).__name__
        problem = f"not {'readable' if verb == 'read' else 'writable'} after several attempts ({name})"
        retry = ", and run the same command again" if verb == "read" else ""
        fix = f"check the network and AWS_ENDPOINT_URL{retry}"
        if isinstance(error, FileNotFoundError):
            problem = f"no such {'bucket' if code == 'NoSuchBucket' else 'object'}"
            fix = "correct the URL"
        elif isinstance(error, PermissionError) or name in NO_CREDENTIALS:
            problem = f"access denied ({name})"
            fix = f"give credentials that may {verb} it (AWS_PROFILE, ~/.aws){retry}"
            open_store(url).clear_instance_cache()  # the next attempt reads credentials again
        elif code == "PreconditionFailed":
            problem, fix = "changed while it was read", "start again with what it holds now"
        raise UserError(f"{url}: {problem}; {fix}") from None
