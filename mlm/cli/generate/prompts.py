"""The prompts of `mlm generate`: from the command line, a file or standard input."""

import json
import sys
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.format import CheckpointError
from mlm.cli.generate.settings import STDIN, GenerateConfig
from mlm.data.chat_template import ChatError
from mlm.data.chat_tokens import encode_prompt
from mlm.data.conversation import SHARE_GPT, make_conversation
from mlm.data.records import SUFFIXES, Located, form_of, read_records
from mlm.data.row_forms import standard_form
from mlm.data.tokenizer import Tokenizer
from mlm.parallel.mesh import ParallelContext
from mlm.util.errors import UserError, lone_surrogate
from mlm.util.files import decode_text, read_input_text

MESSAGES = ("messages", SHARE_GPT)
KEYS = ("prompt", "text")
"""Keys of the prompt in a line of a .jsonl file; the first present counts."""


@dataclass(frozen=True)
class Prompt:
    """A text to continue."""

    location: str
    """Its location in messages: prompt, or FILE:LINE."""
    text: str
    ids: tuple[int, ...] = ()
    """Token ids, with the tokenizer's opening ones; the end-of-document token if there are none."""
    begin: int = 0
    """Index of the text's first token in `ids`."""
    is_message: bool = False
    """True for a message: only the answer is printed."""

    @property
    def shown(self) -> tuple[int, ...]:
        return self.ids[self.begin :] if self.text and not self.is_message else ()


def read_prompts(config: GenerateConfig, tokenizer: Tokenizer) -> list[Prompt]:
    """The prompts of a command in their order, with tokens. Raises UserError."""
    records: list[Located]  # objects with a text or messages
    if config.prompts is not None:
        path = Path(config.prompts)
        if form_of(path) in SUFFIXES:
            records = list(read_records(path))
        else:
            lines = read_input_text(path).split("\n")
            numbered = enumerate((line.removesuffix("\r") for line in lines), 1)
            records = [(f"{path}:{number}", {"prompt": line}) for number, line in numbered if line.strip()]
        if not records:
            raise UserError(f"prompts={path}: holds no prompt: give one per line")
    elif config.prompt == STDIN:
        content = b"" if sys.stdin is None else sys.stdin.buffer.read()  # None: closed (<&-)
        if not (text := decode_text(content, "standard input").removesuffix("\n")):  # a shell's last
            raise UserError('standard input is empty: give prompt="some text" or prompts=FILE')
        records = [("standard input", {"prompt": text})]
    else:
        records = [("prompt", {"prompt": config.prompt})]
    return [_prompt(config, tokenizer, location, record) for location, record in records]


def share_prompts(config: GenerateConfig, tokenizer: Tokenizer, ctx: ParallelContext) -> list[Prompt]:
    """Return rank 0's prompts on every rank: it alone has standard input. Collective, raises UserError."""
    ranks = Ranks.of(ctx)

    def explain(error: Exception) -> UserError:
        return CheckpointError(f"prompts could not be read ({type(error).__name__}: {error}): give others")

    prompts = ranks.together(lambda: read_prompts(config, tokenizer) if ranks.is_main else [], explain)
    return [Prompt(*fields) for fields in ranks.broadcast([astuple(prompt) for prompt in prompts])]


def _prompt(config: GenerateConfig, tokenizer: Tokenizer, location: str, record: dict[str, Any]) -> Prompt:
    """Encode a text, or with chat=true a conversation up to the answer. Raises UserError."""
    if config.chat:
        record, _ = standard_form({k: v for k, v in record.items() if k != "output"}, MESSAGES[:1])
    text: Any = next((record[key] for key in KEYS if key in record), None)
    messages: Any = next((record[key] for key in MESSAGES if record.get(key)), None) if config.chat else None
    messages = text if config.chat and messages is None and isinstance(text, list) else messages
    if messages is None and not isinstance(text, str):
        forms = '{"messages": […]} or {"prompt": "…"}' if config.chat else '{"prompt": "…"} or {"text": "…"}'
        raise UserError(f"{location}: holds no prompt: write {forms}")
    if (half := lone_surrogate(json.dumps([text, messages], ensure_ascii=False))) is not None:
        raise UserError(f"{location}: holds {half}, no UTF-8: correct it")
    if not config.chat:
        ids = tokenizer.encode_prompt(text, special_tokens=config.special_tokens)
        return Prompt(location, text, tuple(ids), len(tokenizer.opening))
    if messages is None:
        system = [] if config.system is None else [{"role": "system", "content": config.system}]
        messages = [*system, {"role": "user", "content": text}]
    assert tokenizer.chat_template is not None, "read with the tokenizer"
    try:
        conversation = make_conversation(record, messages)
        ids = encode_prompt(conversation, tokenizer, tokenizer.chat_template)
    except ChatError as error:
        raise UserError(f"{location}: {error}") from error
    message = str(conversation.messages[-1].get("content", ""))
    return Prompt(location, message, tuple(ids), is_message=True)
