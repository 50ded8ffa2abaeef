"""Conversations as tokens, and which of them are the assistant's answers.

Names of special tokens that a message spells out are text: only the template's are tokens.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mlm.data.chat_sandbox import BEGIN, END
from mlm.data.chat_template import ChatError, ChatTemplate, Message, Rendered
from mlm.data.tokenizer import PRIVATE, Tokenizer

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool")
WRITTEN = 0xF0000
"""Name n of a special token in a message is rendered as this letter + n, repeated to the same length: the
first plane for private use. In the second, from PRIVATE on, are the tokenizer's own letters for it."""
MARKS = re.compile(f"[{BEGIN}{END}]")
RESERVED = re.compile(f"[{BEGIN}{END}{chr(WRITTEN)}-\U0010fffd]")
"""Letters that messages may not hold; those for private use only if a message spells out a name."""

SHARE_GPT = "conversations"
"""Column of ShareGPT's messages."""
SPEAKERS = {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT}
"""Roles by ShareGPT's names, where these differ."""

AT_ONCE = 1 << 22
"""Letters that are tokenised at a time: meanwhile a token takes some hundred bytes."""

Answers = Literal["all", "last"]


@dataclass(frozen=True, eq=False)
class Tokens:
    """A conversation as a model reads it."""

    ids: NDArray[np.int32]
    """[n]."""
    is_answer: NDArray[np.bool_]
    """[n]: written by the assistant, the end of its turn included."""


@dataclass(frozen=True)
class RenderedText:
    """A rendered conversation."""

    text: str
    answers: Sequence[tuple[int, int]]
    """First letter and end of each answer, in their order."""
    is_hidden: bool
    """True if names of special tokens in its messages are hidden in it."""


def messages_in(record: Mapping[str, Any], column: str) -> Any:
    """Return the messages in `column`, in `conversations`, or of prompt and completion. Raises KeyError."""
    for name in (column, SHARE_GPT):
        if record.get(name) is not None:  # a table of several forms fills absent columns with null
            return record[name]
    messages = list[Any]()
    for key, role in (("prompt", "user"), ("completion", ASSISTANT)):
        said = record[key]
        messages += said if isinstance(said, list) else [{"role": role, "content": said}]
    return messages


def check_messages(messages: Any) -> list[Message]:
    """Return the messages of a conversation, ShareGPT's too, with a role and a text. Raises ChatError."""
    if not isinstance(messages, list) or not messages:
        raise ChatError('no list of messages: write [{"role": "user", "content": "…"}, …]')
    return [checked(message, number) for number, message in enumerate(messages, 1)]


def checked(message: Any, number: int) -> Message:
    """Return one message; a list of text parts as their text. Raises ChatError."""
    if not isinstance(message, dict):
        raise ChatError(f'message {number} is no object: write {{"role": "user", "content": "…"}}')
    # a table fills absent keys with null
    message = {key: value for key, value in message.items() if value is not None}
    if "from" in message and "role" not in message:
        speaker = message.pop("from")
        message |= {"role": SPEAKERS.get(str(speaker), speaker), "content": message.pop("value", None)}
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ChatError(f"message {number}: role={str(role)[:40]!r} is unknown: use {', '.join(ROLES)}")
    if isinstance(content, list):
        content = "".join(text_of_part(part, number) for part in content)
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise ChatError(f"message {number}: its 'content' is no text: give one, or delete the message")
    return {**message, "content": content}


def text_of_part(part: Any, number: int) -> str:
    """Return the text of a part of a message: {"type": "text", "text": …}. Raises ChatError."""
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise ChatError(
        f'message {number}: a part of its \'content\' is not {{"type": "text", "text": "…"}}: delete the row'
    )


def encode(
    conversations: Iterable[tuple[Sequence[Message], Any]],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    answers: Answers = "all",
) -> Iterator[Tokens | ChatError]:
    """Yield the tokens of each conversation (messages, tools), or its problem, as soon as one has any."""
    speller = Speller(tokenizer)
    waiting, letters = list[RenderedText](), 0
    for messages, tools in conversations:
        problem = None
        try:
            waiting.append(text_of(messages, tools, speller, template, answers))
            letters += len(waiting[-1].text)
        except ChatError as error:
            problem = error
        if problem is not None or letters >= AT_ONCE:
            yield from tokens_of(waiting, speller)
            waiting, letters = [], 0
        if problem is not None:
            yield problem
    yield from tokens_of(waiting, speller)


def text_of(
    messages: Sequence[Message], tools: Any, speller: "Speller", template: ChatTemplate, answers: Answers
) -> RenderedText:
    """Return a conversation as text. Raises ChatError."""
    (said, given), is_hidden = speller.hide(messages, tools)
    rendered = template.render(said, given)
    return RenderedText(rendered.text, answer_ranges(template, said, given, rendered, answers), is_hidden)


def tokens_of(texts: Sequence[RenderedText], speller: "Speller") -> list[Tokens]:
    """Return the tokens of rendered conversations."""
    found = dict[int, Tokens]()
    for is_hidden, encode_all in ((False, speller.tokenizer.encode_marked), (True, speller.encode)):
        numbers = [n for n, text in enumerate(texts) if text.is_hidden == is_hidden]
        encoded = encode_all([texts[n].text for n in numbers])
        for number, (ids, places) in zip(numbers, encoded, strict=True):
            found[number] = Tokens(ids, overlaps(places, texts[number].answers))
    return [found[n] for n in range(len(texts))]


def encode_prompt(
    messages: Sequence[Message], tokenizer: Tokenizer, template: ChatTemplate, tools: Any = None
) -> list[int]:
    """Return the tokens of a conversation up to where the next answer begins. Raises ChatError."""
    speller = Speller(tokenizer)
    (said, given), is_hidden = speller.hide(messages, tools)
    text = template.render(said, given, add_generation_prompt=True).text
    encoder = speller.encode if is_hidden else tokenizer.encode_marked
    return [int(id) for id in encoder([text])[0][0]]


def answer_ranges(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Any,
    rendered: Rendered,
    answers: Answers,
) -> Sequence[tuple[int, int]]:
    """Return first character and end of each answer in a rendered conversation. Raises ChatError.

    Of a template without {% generation %} blocks an answer is what its message adds to the text before it,
    rendered up to where an answer begins.
    """
    if template.marks_answers:
        if not rendered.answers:
            raise ChatError(f"{template.place} marks no answer of it: correct its {{% generation %}} blocks")
        return rendered.answers if answers == "all" else rendered.answers[-1:]
    numbers = [n for n, message in enumerate(messages) if message["role"] == ASSISTANT]
    found = []
    for n in numbers if answers == "all" else numbers[-1:]:
        before = template.render(messages[:n], tools, add_generation_prompt=True).text
        after = rendered.text if n + 1 == len(messages) else template.render(messages[: n + 1], tools).text
        if not (after.startswith(before) and rendered.text.startswith(after)):
            raise ChatError(
                f"message {n + 1}: {template.place} renders an answer otherwise when messages follow it: "
                "mark answers in the template with {% generation %}, or set task.answers=last"
            )
        found.append((len(before), len(after)))
    return found


def overlaps(places: NDArray[np.int32], ranges: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Return which tokens, of letters `places` [n, 2], have a letter in one of the ranges: [n].

    Begins and ends of the ranges are in ascending order.
    """
    if not ranges:
        return np.zeros(len(places), dtype=bool)
    begins, ends = np.array(ranges).T
    last = np.searchsorted(begins, places[:, 1]) - 1  # of the ranges that begin before a token's end
    found: NDArray[np.bool_] = (last >= 0) & (ends[last] > places[:, 0])
    return found


def reserved(value: Any, letters: re.Pattern[str]) -> str | None:
    """Return the first of these letters in the texts of JSON values; None if they hold none."""
    if isinstance(value, str):
        letter = letters.search(value)
        return None if letter is None else letter[0]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return next((found for item in items if (found := reserved(item, letters)) is not None), None)


class Speller:
    """Names of special tokens in messages, kept apart from those of the template.

    In a message name n becomes letters of private use before it is rendered. After that the names left are
    the template's: they become the tokenizer's private letters, and the message's become names again. All
    have the length of the name, so that no place in the text moves.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.names = tokenizer, tokenizer.special_names
        longest = sorted(self.names, key=len, reverse=True)  # as the library finds them
        self.known = re.compile("|".join(map(re.escape, longest))) if longest else None
        self.numbers = {name: n for n, name in enumerate(self.names)}

    def hide(self, messages: Sequence[Message], tools: Any) -> tuple[tuple[Sequence[Message], Any], bool]:
        """Return messages and tools with the names in their texts hidden, and True if there were any.

        Raises ChatError for letters that have another use here.
        """
        given = [list(messages), tools]
        try:
            hidden = self._hidden(given)
            is_hidden = hidden != given
            found = reserved(given, RESERVED if is_hidden else MARKS)
        except RecursionError:
            raise ChatError("its messages or tools are nested too deeply: flatten them") from None
        if found is not None:
            raise ChatError(f"it holds the letter U+{ord(found):X}, which has another use here: delete it")
        return (hidden[0], hidden[1]), is_hidden

    def _hidden(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._replaced(value, WRITTEN)
        if isinstance(value, Mapping):
            return {key: self._hidden(item) for key, item in value.items()}
        return [self._hidden(item) for item in value] if isinstance(value, list | tuple) else value

    def encode(self, texts: Sequence[str]) -> list[tuple[NDArray[np.int32], NDArray[np.int32]]]:
        """Encode rendered texts with hidden names: see `Tokenizer.encode_marked`."""
        return self.tokenizer.encode_private([self._shown(self._replaced(text, PRIVATE)) for text in texts])

    def _replaced(self, text: str, first: int) -> str:
        def letters(found: re.Match[str]) -> str:
            return chr(first + self.numbers[found[0]]) * len(found[0])

        return text if self.known is None else self.known.sub(letters, text)

    def _shown(self, text: str) -> str:
        for name, n in self.numbers.items():
            text = text.replace(chr(WRITTEN + n) * len(name), name)
        return text
