"""What may stand in the place of a file."""

import os
import socket
from pathlib import Path


def put(kind: str, path: Path) -> Path:
    match kind:
        case "FIFO":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(str(path))
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path.name)
    return path
