"""`mlm chat`: a conversation with a model on the terminal, or with the lines of standard input."""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from mlm.cli.command import Command
from mlm.config.fields import POSITIVE, Aliases, CheckpointPath, InputPath
from mlm.inference.config import SamplingOptions, too_few_new_tokens
from mlm.util.errors import UserError, lone_surrogate

if TYPE_CHECKING:  # which need torch
    from mlm.api import Model
    from mlm.data.chat_template import ChatTemplate

HELP = """/reset          begin a new conversation
/system TEXT    begin a new one with this message of the system
/save FILE      write the conversation as a row for `mlm finetune chat`
/exit           end, as Ctrl-D does; Ctrl-C stops an answer
A line that ends with \\ goes on in the next one."""


@dataclass(frozen=True, kw_only=True)
class ChatConfig(SamplingOptions):
    """The run spec of `mlm chat`."""

    ckpt: CheckpointPath
    """Checkpoint (step-…), run directory, or Hugging Face folder or id."""
    max_new_tokens: Annotated[int, POSITIVE, Aliases("max_tokens")] = 512
    """Most tokens of an answer. The oldest turns are not read where they leave no room for one."""
    system: str | None = None
    """Message of the system that a conversation begins with; null sends none."""
    tokenizer: InputPath | None = None
    """tokenizer.json; null takes the one saved with the model."""
    chat_template: InputPath | None = None
    """Jinja file with the chat template, or chatml; null takes the tokenizer's."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Number format of the weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the weights; auto takes a GPU where there is one."""


def preflight(config: ChatConfig) -> list[str]:
    """Return problems of the checkpoint, its tokenizer or its template; reads no tensor."""
    from mlm.data import files_present as present
    from mlm.inference.trained import open_predictor
    from mlm.parallel.config import ParallelConfig

    if problem := present.chat_template("chat_template", config.chat_template):
        return [problem]
    try:
        source = open_predictor(config.ckpt, ParallelConfig())
        tokenizer = source.load_tokenizer(config.tokenizer)
        source.load_chat_template(config.chat_template, config.tokenizer, tokenizer, key="chat_template")
    except UserError as error:
        return list(error.problems)
    return []


def run(config: ChatConfig) -> None:
    """Answer until the input ends. Raises UserError."""
    from mlm.api import load

    model = load(config.ckpt, precision=config.precision, device=config.device, tokenizer=config.tokenizer)
    template = model.trained.source.load_chat_template(
        config.chat_template, config.tokenizer, model.tokenizer, key="chat_template"
    )
    chat = ChatSession(model, template, config)
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    if is_terminal:
        print(f"{model.path}; /help lists commands, Ctrl-D ends", file=sys.stderr)
    for line in read_lines(is_terminal):
        try:
            if problem := lone_surrogate(line):
                raise UserError(f"the line holds {problem}, no UTF-8: correct it")
            if re.fullmatch("/[a-z]+", line.split(" ")[0]):
                if not chat.run_command(*line.partition(" ")[::2]):
                    return
            elif line.strip():
                chat.answer(line)
        except UserError as error:
            if not is_terminal:
                raise
            print("\n".join(error.lines()), file=sys.stderr)
        except KeyboardInterrupt:  # before the answer began
            if not is_terminal:
                raise
            print(file=sys.stderr)


def read_lines(is_terminal: bool) -> Iterator[str]:
    """Yield messages and commands as typed, or the lines of standard input. Ctrl-C clears a prompt."""
    if is_terminal:
        import readline  # noqa: F401  (edits and remembers what `input` reads)
    while sys.stdin is not None:
        parts: list[str] = []
        try:
            while not parts or parts[-1].endswith("\\"):
                prompt = ("> " if not parts else "… ") if is_terminal else ""
                parts.append(input(prompt))
        except EOFError:
            if not parts:
                print(end="\n" * is_terminal, file=sys.stderr)
                return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print(file=sys.stderr)
            continue
        yield "\n".join(part.removesuffix("\\") for part in parts).removeprefix("\ufeff")


class ChatSession:
    """A conversation, and the model that answers."""

    def __init__(self, model: "Model", template: "ChatTemplate", config: ChatConfig) -> None:
        from mlm.data.chat_tokens import end_of_turn_tokens
        from mlm.inference.config import resolve_sampling

        self.model, self.template = model, template
        self.end_ids = end_of_turn_tokens(template, model.tokenizer)
        options = {option.name: getattr(config, option.name) for option in fields(SamplingOptions)}
        self.sampling = resolve_sampling(model.tokenizer.declared.generation, options)
        self.messages: list[dict[str, Any]] = []
        self.turns, self.saved = 0, dict[Path, bytes]()
        self.begin(config.system)

    def begin(self, system: str | None) -> None:
        self.system = system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def run_command(self, command: str, words: str) -> bool:
        """Run a /command; False for /exit."""
        if command not in COMMANDS:
            raise UserError(f"{command}: unknown command; use {', '.join(COMMANDS)}")
        if command == "/reset":
            self.begin(self.system)
        elif command == "/system":
            self.begin(words or None)
        elif command == "/save":
            self.save(words.strip())
        elif command == "/help":
            print(HELP, file=sys.stderr)
        return command != "/exit"

    def save(self, file: str) -> None:
        """Write the conversation as a line of JSON; replaces a file of this chat. Raises UserError."""
        from mlm.util.files import write_atomic
        from mlm.util.results import write_result

        if not file:
            raise UserError("/save: name a file, such as /save talk.jsonl")
        if not self.turns:
            raise UserError("/save: nothing is said yet")
        text = json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n"
        row = text.encode("utf-8", "backslashreplace")
        path = Path(file).absolute()
        try:
            # Replace a file that this chat wrote, unless it has changed since.
            if path in self.saved and not path.is_symlink() and path.read_bytes() == self.saved[path]:
                write_atomic(path, row)
            else:
                write_result(file, row, key="/save")
        except OSError as error:
            raise UserError(f"/save {file}: {error.strerror}") from None
        except UserError as error:
            raise UserError(str(error).replace("/save=", "/save ")) from None
        self.saved[path] = row
        print(f"written to {file}", file=sys.stderr)

    def answer(self, message: str) -> None:
        """Answer a user message on standard output. Ctrl-C ends the answer; the partial one stays.

        Raises UserError, and then drops the message.
        """
        from mlm.cli.generate.run import TextStream
        from mlm.inference.generation import continuations

        messages = [*self.messages, {"role": "user", "content": message}]
        ids = self.tokens_of(messages)
        tokenizer, new, stream = self.model.tokenizer, list[int](), TextStream(self.model.tokenizer, ())
        tokens = continuations(
            self.model.trained,
            [ids],
            self.sampling,
            ctx=self.model.ctx,
            end_ids=self.end_ids,
            numbers=[self.turns],  # the same question again draws another answer
        )
        try:
            for _, token in tokens:
                new += [] if token is None else [token]
                stream.print(new, is_whole=token is None)
        except KeyboardInterrupt:
            stream.print(new, is_whole=True)
            if not sys.stdin.isatty():
                raise
        self.messages = [*messages, {"role": "assistant", "content": tokenizer.decode(new)}]
        self.turns += 1

    def tokens_of(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of the prompt; the oldest turns are dropped if they leave no room for an answer.

        Raises UserError for messages that the template cannot render, or a last message that is too long.
        """
        from mlm.data.chat_template import ChatError
        from mlm.data.chat_tokens import encode_prompt
        from mlm.data.conversation import make_conversation

        max_positions, count = self.model.config.max_positions, len(messages)
        reserve = min(self.sampling.max_new_tokens, max_positions // 4)
        num_system = int(messages[0]["role"] == "system")
        while True:
            try:
                conversation = make_conversation({}, messages)
                ids = encode_prompt(conversation, self.model.tokenizer, self.template)
            except ChatError as error:
                raise UserError(str(error)) from error
            if len(ids) + reserve <= max_positions or len(messages) <= num_system + 2:
                break
            messages = messages[:num_system] + messages[num_system + 2 :]
        if len(ids) > max_positions:
            raise UserError(f"the message has {len(ids)} tokens, the model reads {max_positions}: shorten it")
        if count > len(messages):
            dropped = f"the oldest {count - len(messages)} messages are not read"
            print(f"mlm chat: {dropped}: the model reads {max_positions} tokens", file=sys.stderr)
        return ids


COMMANDS = ("/reset", "/system", "/save", "/help", "/exit")

CHAT = Command(
    name="chat",
    other_names=("interactive", "repl"),
    spec=ChatConfig,
    target="mlm.cli.chat:run",
    local_check=lambda config: [*filter(None, [too_few_new_tokens(config)])],
    preflight="mlm.cli.chat:preflight",
    positional=("ckpt",),
    summary="talk with a model on the terminal",
    about="""Answers each line as a message of the user, by the tokenizer's chat template, and prints the
        answer as its tokens come. /help lists what else can be typed. Of a pipe each line is a message, and
        standard output has the answers alone.""",
    examples="""
        # A finetuned model
        mlm chat runs/chat
        # One of the Hub
        mlm chat HuggingFaceTB/SmolLM2-135M-Instruct system="You are a pirate."
        # Without a terminal
        echo 'Who wrote Hamlet?' | mlm chat runs/chat temperature=0
    """,
    keys="""
        ckpt system max_new_tokens temperature top_k top_p repetition_penalty seed precision device tokenizer
        chat_template
    """,
)
