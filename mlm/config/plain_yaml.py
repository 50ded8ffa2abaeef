"""Plain data from a YAML file that may come from anyone, such as the config.yaml of a run.

The loader is safe and bounded: each key once, no aliases, no tags, no interpolation.
"""

import os
import re
import unicodedata
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from mlm.config.tree import MISSING_VALUE
from mlm.util.errors import UserError, escape_controls, reading_from
from mlm.util.files import decode_text, open_regular

MAX_BYTES = 1 << 18  # 256 KiB: a run's config is 3 kB
MAX_TEXT = 10_000  # characters of one value: reading a number takes time quadratic in its digits
FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)


class PlainLoader(yaml.SafeLoader):
    """YAML as Hydra reads it: 1e-4 is a number, a date is text."""


PlainLoader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if not pair[0].endswith((":float", ":timestamp", ":merge", ":value"))]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
PlainLoader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789."))


def read_text(path: Path) -> str:
    """The text of a regular file of bounded size. Raises UserError, also for a link out of the run."""
    flags = os.O_RDONLY | os.O_NOFOLLOW
    with reading_from(path, "Name a plain file that can be read"), open(open_regular(path, flags), "rb") as f:
        content = f.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise UserError(f"{path}: more than {MAX_BYTES} bytes; shorten it")
    return decode_text(content, str(path))


def parse(text: str, path: Path | str) -> dict[str, Any]:
    """YAML as nested dicts of plain values. Raises UserError."""
    try:
        check_events(text)
        node = yaml.compose(text, Loader=PlainLoader)
        check_keys(node)
        values = PlainLoader("").construct_document(node) if node is not None else None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        fix = "correct it, or restore it from a copy"
        raise UserError(f"{path}: {line}{escape_controls(str(error.problem))[:200]}; {fix}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())[:200]}; restore it from a copy") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds no settings; restore it from a copy")
    return values


def check_events(text: str) -> None:
    """Raise ValueError for YAML features that no saved config has, before building values."""
    depth = nodes = 0
    for event in yaml.parse(text, Loader=PlainLoader):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise ValueError("anchors and aliases are not supported")
        if isinstance(event, yaml.NodeEvent):
            nodes += 1
            if event.tag is not None:
                raise ValueError(f"the tag {event.tag[:60]} is not supported")
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_TEXT:
            raise ValueError(f"a value of {len(event.value)} characters; {MAX_TEXT} is the limit")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > 12 or nodes > 20_000:
            raise ValueError("it nests too deeply, or holds too many values")


def check_keys(node: Any) -> None:
    """Raise ValueError for a duplicate key, or one that is not a string."""
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            check_keys(child)
    if isinstance(node, yaml.MappingNode):
        if not all(key.tag == "tag:yaml.org,2002:str" for key, _ in node.value):
            raise ValueError("a key is not text")
        keys = [key.value for key, _ in node.value]
        if len(set(keys)) < len(keys):
            raise ValueError("a key occurs twice")
        for _, child in node.value:
            check_keys(child)


def problem_of(value: Any) -> str | None:
    """The reason why a run cannot have saved a value or item: an interpolation, missing, not plain."""
    if isinstance(value, list | tuple | dict):
        items = value.values() if isinstance(value, dict) else value
        return next((problem for item in items if (problem := problem_of(item))), None)
    if isinstance(value, str) and "${" in value:
        return "an interpolation (${…}) is not resolved here; write the value itself"
    if isinstance(value, str) and value == MISSING_VALUE:
        return f"{MISSING_VALUE} is not a value; write one"
    if isinstance(value, str) and any(unicodedata.category(c) == "Cc" for c in value if c not in "\n\t"):
        return f"{escape_controls(value)[:60]} holds control characters; write it without"
    if isinstance(value, int) and abs(value) >= 1 << 63:
        return "the number is too large; write a smaller one"
    if not isinstance(value, str | int | float | bool | None):
        return "must be text, a number, true, false, null or a list of them"
    return None
