"""Messages between two processes of this host over a Unix socket: JSON and bytes, nothing pickled.

A message is two lengths of 8 bytes, little-endian, then that much JSON and that many bytes.
"""

import json
import select
import socket
import struct
from typing import Any

HEADER = struct.Struct("<QQ")


class Channel:
    """One end of the socket between lm-eval and rank 0."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end

    @classmethod
    def connect(cls, path: str) -> "Channel":
        """Rank 0's end."""
        end = socket.socket(socket.AF_UNIX)
        end.connect(path)
        return cls(end)

    def is_ready(self, seconds: float) -> bool:
        """Whether a message, or the other's leaving, comes within this time."""
        return bool(select.select([self.end], [], [], seconds)[0])

    def send(self, head: dict[str, Any], body: bytes = b"") -> None:
        """Send a message. Raises OSError when the other has left."""
        content = json.dumps(head).encode()
        self.end.sendall(HEADER.pack(len(content), len(body)) + content + body)

    def receive(self) -> bytes | None:
        """The next message as it was sent; None when the other has left."""
        start = self._exactly(HEADER.size)
        rest = None if start is None else self._exactly(sum(HEADER.unpack(start)))
        return None if start is None or rest is None else start + rest

    def _exactly(self, count: int) -> bytes | None:
        content = bytearray(count)
        view = memoryview(content)
        while view:
            received = self.end.recv_into(view)
            if not received:
                return None
            view = view[received:]
        return bytes(content)


def read_message(message: bytes) -> tuple[dict[str, Any], bytes]:
    """Its JSON and its array."""
    size, _ = HEADER.unpack_from(message)
    middle = HEADER.size + size
    return json.loads(message[HEADER.size : middle]), message[middle:]
