"""The prompts of `mlm generate`: from the command line, a file or standard input."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.format import CheckpointError
from mlm.data.chat_template import ChatError
from mlm.data.conversation import SHARE_GPT, check_messages, encode_prompt
from mlm.data.tokenizer import Tokenizer
from mlm.inference.generate.config import STDIN, GenerateConfig
from mlm.parallel.mesh import ParallelContext
from mlm.util.errors import UserError, half_pair

MESSAGES = ("messages", SHARE_GPT)
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
    is_message: bool = False
    """True if it is answered, not continued: the answer alone is printed."""


def read_prompts(config: GenerateConfig, tokenizer: Tokenizer) -> list[Prompt]:
    """The prompts of a command in their order, with tokens. Raises UserError."""
    if config.chat:
        return list(_of_messages(config, tokenizer))
    found = _texts(config, _prompt)
    encode = tokenizer.encode_special if config.special_tokens else tokenizer.encode
    return [
        Prompt(prompt.place, prompt.text, tuple(encode(prompt.text) or [tokenizer.eod_id]))
        for prompt in found
    ]


def _of_messages(config: GenerateConfig, tokenizer: Tokenizer) -> Iterator[Prompt]:
    """Conversations, with their tokens up to where an answer begins. Raises UserError."""
    template = tokenizer.chat_template
    assert template is not None, "read with the tokenizer"
    for found in _texts(config, _conversation):
        try:
            said, tools = json.loads(found.text) if config.prompts is not None else (found.text, None)
            if isinstance(said, str):
                system = [] if config.system is None else [{"role": "system", "content": config.system}]
                said = [*system, {"role": "user", "content": said}]
            messages = check_messages(said)
            ids = encode_prompt(messages, tokenizer, template, tools)
        except ChatError as error:
            raise UserError(f"{found.place}: {error}") from error
        yield Prompt(found.place, str(messages[-1]["content"]), tuple(ids), is_message=True)


def _texts(config: GenerateConfig, of_json: "Callable[[Any], str | None]") -> list[Prompt]:
    """Prompts without tokens; of_json(value of a line of .jsonl) gives its text, None if it holds none."""
    if config.prompts is not None:
        return _of_file(Path(config.prompts), of_json, chat=config.chat)
    if config.prompt == STDIN:
        content = b"" if sys.stdin is None else sys.stdin.buffer.read(MAX_BYTES + 1)  # None: closed (<&-)
        text = _text(content, "standard input")
        found = [Prompt("standard input", text.removesuffix("\n"))]  # which ends what a shell writes
        if not found[0].text:  # of a pipe: what should have written it failed
            raise UserError(f"standard input is empty: {REMEDY}")
        return found
    if (half := half_pair(config.prompt)) is not None:
        raise UserError(f"prompt: holds {half}, no UTF-8: correct it")
    return [Prompt("prompt", config.prompt)]


def share_prompts(config: GenerateConfig, tokenizer: Tokenizer, ctx: ParallelContext) -> list[Prompt]:
    """Return rank 0's prompts on every rank: it alone has standard input. Collective, raises UserError."""
    ranks = Ranks.of(ctx)

    def explain(error: Exception) -> UserError:
        return CheckpointError(f"prompts could not be read ({type(error).__name__}: {error}): give others")

    mine = ranks.together(lambda: read_prompts(config, tokenizer) if ranks.is_main else [], explain)
    sent = ranks.broadcast([[p.place, p.text, p.ids, p.is_message] for p in mine])
    return [Prompt(*fields) for fields in sent]


def _of_file(path: Path, of_json: "Callable[[Any], str | None]", *, chat: bool) -> list[Prompt]:
    try:
        size = path.stat().st_size
        text = _text(path.read_bytes() if size <= MAX_BYTES else bytes(MAX_BYTES + 1), f"prompts={path}")
    except OSError as error:
        raise UserError(f"prompts={path}: {error.strerror}: make it readable, or name another") from error
    lines = [(number, line.removesuffix("\r")) for number, line in enumerate(text.split("\n"), 1)]
    is_json = path.suffix == ".jsonl"
    found = [
        Prompt(
            place, _of_json(line, place, of_json) if is_json else json.dumps([line, None]) if chat else line
        )
        for number, line in lines
        if line.strip() and (place := f"{path}:{number}")
    ]
    if not found:
        raise UserError(f"prompts={path}: holds no prompt: give one per line")
    return found


def _of_json(line: str, place: str, of_json: "Callable[[Any], str | None]") -> str:
    try:
        said = json.loads(line)
        json.dumps(said, ensure_ascii=False).encode()  # half a surrogate pair is no text to a tokenizer
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: is no JSON ({error}): fix it") from error
    if (text := of_json(said)) is None:
        forms = (
            '{"messages": […]} or {"prompt": "…"}'
            if of_json is _conversation
            else '{"prompt": "…"} or {"text": "…"}'
        )
        raise UserError(f"{place}: holds no prompt: write {forms}")
    return text


def _prompt(said: Any) -> str | None:
    texts = [said[key] for key in KEYS if key in said] if isinstance(said, dict) else []
    return texts[0] if texts and isinstance(texts[0], str) else None


def _conversation(said: Any) -> str | None:
    """JSON of (messages, tools) of a line, or of the text of one message of the user."""
    if isinstance(said, dict) and (found := next((key for key in MESSAGES if key in said), None)):
        return json.dumps([said[found], said.get("tools")])
    text = _prompt(said)
    return None if text is None else json.dumps([text, None])


def _text(content: bytes, place: str) -> str:
    if len(content) > MAX_BYTES:
        raise UserError(f"{place}: more than {MAX_BYTES} bytes: give fewer prompts at a time")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: is not UTF-8 ({error.reason} at byte {error.start}): convert it") from None
