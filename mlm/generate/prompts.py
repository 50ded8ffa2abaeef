"""The prompts of `mlm generate`: from the command line, a file or standard input."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.format import CheckpointError
from mlm.data.tokenizer import Tokenizer
from mlm.errors import UserError
from mlm.generate.config import STDIN, GenerateConfig
from mlm.parallel.mesh import ParallelContext

KEYS = ("prompt", "text")
"""Keys of the prompt in a line of a .jsonl file; the first present counts."""
REMEDY = 'give prompt="some text", prompt=- for standard input, or prompts=FILE'
MAX_BYTES = 1 << 28
"""Largest file of prompts or standard input: 256 MiB."""


@dataclass(frozen=True)
class Prompt:
    """A text to continue."""

    place: str
    """Its location in messages: prompt, or FILE:LINE."""
    text: str
    ids: tuple[int, ...] = ()
    """Its tokens; of an empty text the end-of-document token, after which a document begins."""


def read_prompts(config: GenerateConfig, tokenizer: Tokenizer) -> list[Prompt]:
    """The prompts of a command in their order, with tokens. Raises UserError."""
    if config.prompts is not None:
        found = _of_file(Path(config.prompts))
    elif config.prompt == STDIN:
        text = _text(sys.stdin.buffer.read(MAX_BYTES + 1), "standard input")
        found = [Prompt("standard input", text.removesuffix("\n"))]  # which ends what a shell writes
        if not found[0].text:  # of a pipe: what should have written it failed
            raise UserError(f"standard input is empty: {REMEDY}")
    else:
        found = [Prompt("prompt", config.prompt)]
    encode = tokenizer.encode_special if config.special_tokens else tokenizer.encode
    return [
        Prompt(prompt.place, prompt.text, tuple(encode(prompt.text) or [tokenizer.eod_id]))
        for prompt in found
    ]


def share_prompts(config: GenerateConfig, tokenizer: Tokenizer, ctx: ParallelContext) -> list[Prompt]:
    """Return rank 0's prompts on every rank: it alone has standard input. Collective, raises UserError."""
    ranks = Ranks(ctx.rank, ctx.world_size, ctx.host_group, ctx.watch)

    def explain(error: Exception) -> UserError:
        return CheckpointError(f"prompts could not be read ({type(error).__name__}: {error}): give others")

    mine = ranks.together(lambda: read_prompts(config, tokenizer) if ranks.is_main else [], explain)
    return [Prompt(*fields) for fields in ranks.broadcast([[p.place, p.text, p.ids] for p in mine])]


def _of_file(path: Path) -> list[Prompt]:
    try:
        size = path.stat().st_size
        text = _text(path.read_bytes() if size <= MAX_BYTES else bytes(MAX_BYTES + 1), f"prompts={path}")
    except OSError as error:
        raise UserError(f"prompts={path}: {error.strerror}: make it readable, or name another") from error
    lines = [(number, line.removesuffix("\r")) for number, line in enumerate(text.split("\n"), 1)]
    read = _of_json if path.suffix == ".jsonl" else lambda line, _: line
    found = [
        Prompt(place, read(line, place))
        for number, line in lines
        if line.strip() and (place := f"{path}:{number}")
    ]
    if not found:
        raise UserError(f"prompts={path}: holds no prompt: give one per line")
    return found


def _of_json(line: str, place: str) -> str:
    try:
        said = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: is no JSON ({error}): fix it") from error
    texts = [said[key] for key in KEYS if key in said] if isinstance(said, dict) else []
    if not texts or not isinstance(texts[0], str):
        raise UserError(f'{place}: holds no prompt: write {{"prompt": "…"}} or {{"text": "…"}}')
    return str(texts[0])


def _text(content: bytes, place: str) -> str:
    if len(content) > MAX_BYTES:
        raise UserError(f"{place}: more than {MAX_BYTES} bytes: give fewer prompts at a time")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: is not UTF-8 ({error.reason} at byte {error.start}): convert it") from None
