"""A long line of JSON: its long strings are left where they are, the rest is parsed.

Strings are the only place of JSON where quotes stand, so they are found without parsing. Each long one is
replaced by a short name, and what is left, the skeleton, is given to json.loads.
"""

import json
import re
import secrets
from collections.abc import Iterator
from typing import Any

from mlm.corpus.read.long_text import LONG, JsonText
from mlm.corpus.read.records import BadRecordError

INSIDE = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
HELD = 1 << 12
"""Bytes of a string above which it is left in the line."""
MOST = 1 << 22
"""Longest skeleton: as Python objects it takes up to thirty times its size."""


class LongLine:
    """A JSON object of more than LONG bytes. Raises BadRecordError."""

    def __init__(self, line: bytes | bytearray) -> None:
        self.line = line
        while (name := f"long string {secrets.token_hex(8)} ").encode() in line:
            pass
        self._name, self._strings = name, list[JsonText]()
        skeleton = self._skeleton()
        try:
            self.record = json.loads(skeleton.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise BadRecordError("not_utf8", f"not UTF-8 ({error.reason})") from error
        except json.JSONDecodeError as error:
            raise BadRecordError("not_json", f"not a line of JSON ({error.msg})") from error
        except (ValueError, RecursionError) as error:
            raise BadRecordError("not_json", f"not a line of JSON ({type(error).__name__})") from error
        for text in self._strings:
            for _ in decoded(text):
                pass

    def value(self, key: str) -> Any:
        """A value of the object: a JsonText if it is a long string."""
        found = self.record[key]
        if not (isinstance(found, str) and found.startswith(self._name)):
            return found
        text = self._strings[int(found.removeprefix(self._name))]
        return text if text.end - text.begin > LONG else "".join(text.pieces())

    def _skeleton(self) -> bytes:
        """The line with the names of its long strings in their place."""
        parts, copied, at = bytearray(), 0, 0
        while (begin := self.line.find(b'"', at) + 1) > 0:
            found = INSIDE.match(self.line, begin)
            end = found.end() if found else begin
            if end >= len(self.line) or self.line[end] != ord('"'):
                raise BadRecordError("not_json", "not a line of JSON (Unterminated string)")
            if end - begin > HELD:
                parts += self.line[copied:begin] + f"{self._name}{len(self._strings)}".encode()
                self._strings.append(JsonText(self.line, begin, end))
                copied = end
            at = end + 1
            if len(parts) + at - copied > MOST:
                break
        if len(parts) + len(self.line) - copied > MOST:
            raise BadRecordError("too_long", f"a line of more than {MOST} bytes beside its long strings")
        return bytes(parts + self.line[copied:])


def decoded(text: JsonText) -> Iterator[str]:
    """The pieces of a string. Raises BadRecordError where it is none."""
    try:
        yield from text.pieces()
    except UnicodeDecodeError as error:
        raise BadRecordError("not_utf8", f"not UTF-8 ({error.reason})") from error
    except json.JSONDecodeError as error:
        raise BadRecordError("not_json", f"not a line of JSON ({error.msg})") from error
