"""An S3-compatible store on this host: moto's server, in a thread, behind errors that a test chooses.

It starts as `moto_server` does: werkzeug serves moto's DomainDispatcherApplication on a free port.
"""

import io
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from mlm.util.object_store import open_store

BUCKET = "s3://bucket"
KEY, SECRET = "AKIATESTSONLY", "secret-of-the-tests"
ERROR = b'<?xml version="1.0"?><Error><Code>%b</Code><Message>of %b</Message></Error>'


class Quiet(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        """Print nothing."""


@dataclass
class Store:
    """The server's counts, and what happens to the requests for content."""

    app: Any
    gets: int = 0
    """Requests for the content of an object."""
    fail: Callable[[int], bytes | str | None] = lambda number: None
    """What happens to the GET with this number: an HTTP status with its code, "truncate", or nothing."""
    put: Callable[[str], bytes | str | None] = lambda path: None
    """The same of the PUT to this path."""
    latency_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if method not in ("GET", "PUT") or path.count("/") < 2:
            return self.app(environ, start)
        if method == "PUT":
            action = self.put(path)
            content = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            if isinstance(action, bytes):
                return self.answer_error(start, action)
            content = content[:-1] if action == "truncate" else content
            environ |= {"wsgi.input": io.BytesIO(content), "CONTENT_LENGTH": str(len(content))}
            return self.app(environ, start)
        with self.lock:
            number, self.gets = self.gets, self.gets + 1
        time.sleep(self.latency_s)
        action = self.fail(number)
        if isinstance(action, bytes):
            return self.answer_error(start, action)
        answer = self.app(environ, start)
        return [b"".join(answer)[:-1]] if action == "truncate" else answer

    def answer_error(self, start: Callable[..., Any], action: bytes) -> Iterable[bytes]:
        start(action.decode(), [("Content-Type", "application/xml")])
        return [ERROR % (action.partition(b" ")[2], KEY.encode())]

    def reset(self) -> None:
        self.gets, self.fail, self.put, self.latency_s = 0, lambda number: None, lambda path: None, 0.0

    def upload(self, folder: Path, url: str) -> str:
        store = open_store(url)
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                store.pipe_file(f"{url}/{path.relative_to(folder)}", path.read_bytes())
        return url


@contextmanager
def serve() -> Iterator[Store]:
    store = Store(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, store, threaded=True, request_handler=Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        open_store(BUCKET).clear_instance_cache()  # of another server
        address = f"http://127.0.0.1:{server.server_port}"
        urlopen(f"{address}/moto-api/reset", b"").close()  # moto keeps one state for all servers of a process
        patch.setenv("AWS_ENDPOINT_URL", address)
        patch.setenv("AWS_ACCESS_KEY_ID", KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        open_store(BUCKET).makedirs(BUCKET, exist_ok=True)
        yield store
    server.shutdown()
