"""Journal of the complete files in an unfinished folder, from which a killed command continues."""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mlm.checkpoint.native.format import JSON
from mlm.util.errors import UserError
from mlm.util.files import digest_file, parse_json, read_bounded, write_atomic
from mlm.util.ownership import MARKER
from mlm.util.terminal import Advance

log = logging.getLogger(__name__)

JOURNAL = "journal.json"
MAX_BYTES = 1 << 26
FIELDS = ("digest", "value")
"""Fields of a complete file: its digest, and the value of `write`."""


class Journal:
    """Complete files of a folder, in JSON: digest and `write_file`'s value by name, and `identity`.

    `identity`: everything that determines the bytes of the files.
    """

    def __init__(self, identity: Mapping[str, JSON]) -> None:
        self.identity: dict[str, JSON] = parse_json(json.dumps(identity))  # tuples are lists in a file
        self.files: dict[str, dict[str, Any]] = {}

    def open(self, work: Path, folder: Path) -> int:
        """Begin, or continue the files of a command with the same identity; return their bytes.

        Deletes incomplete files in `folder`.
        """
        self.path, self.folder = work / JOURNAL, folder
        try:
            saved = parse_json(read_bounded(self.path, MAX_BYTES, "delete it"))
            changed = [key for key in self.identity if saved["identity"].get(key) != self.identity[key]]
            files = {str(name): {key: entry[key] for key in FIELDS} for name, entry in saved["files"].items()}
        except FileNotFoundError:
            return 0
        except (ValueError, KeyError, TypeError, AttributeError, UserError):
            changed = [JOURNAL]
        if changed:
            log.warning("an interrupted conversion starts over: %s changed since", ", ".join(changed))
            return 0
        self.files, size = files, 0
        for path in folder.rglob("*"):
            name = path.relative_to(folder).as_posix()
            if path.is_symlink() or (path.is_file() and name not in {*self.files, MARKER}):
                path.unlink()
            elif path.is_file():
                size += path.stat().st_size
        log.warning("an interrupted conversion continues with %d complete files", len(self.files))
        return size

    def write_file(
        self, path: Path, write: Callable[[], JSON], progress: Advance = lambda count: None
    ) -> JSON:
        """Call `write`, which writes `path`, unless the file is complete; return its value.

        `progress` receives bytes of complete files.
        """
        name = path.relative_to(self.folder).as_posix()
        entry = self.files.get(name)  # it stays complete while its digest is compared
        if entry is None or not path.is_file() or digest_file(path, progress) != entry["digest"]:
            self.files.pop(name, None)
            path.unlink(missing_ok=True)
            value = write()
            entry = {"digest": digest_file(path), "value": value}
        self.files[name] = entry
        write_atomic(self.path, json.dumps({"identity": self.identity, "files": self.files}).encode())
        return entry["value"]
