"""Conversations as tokens, and which of them are the assistant's answers.

Names of special tokens that a message spells out are text: only the template's are tokens.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mlm.data.chat_template import BEGIN, END, ChatError, ChatTemplate, Message, Rendered
from mlm.data.conversation import ASSISTANT, Conversation, is_trained
from mlm.data.tokenizer import PRIVATE, Placed, Tokenizer

WRITTEN = 0xF0000
"""Name n of a special token in a message is rendered as this letter + n, repeated to the same length: the
first plane for private use. In the second, from PRIVATE on, are the tokenizer's own letters for it."""
PROBE = "\ufdd2"
"""Text in place of an answer's, to find where a template writes it: a noncharacter, which no text holds."""
ASKED = {"role": "user", "content": "a"}
"""A message before an answer that has none, to find what a template writes around it."""
MARKS = re.compile(f"[{BEGIN}{END}{PROBE}]")
RESERVED = re.compile(f"[{BEGIN}{END}{PROBE}{chr(WRITTEN)}-\U0010fffd]")
"""Letters that messages may not hold; those for private use only if a message spells out a name."""

Answers = Literal["all", "last"]


@dataclass(frozen=True, eq=False)
class Tokens:
    """A conversation as a model reads it."""

    ids: NDArray[np.int32]
    """[n]."""
    is_answer: NDArray[np.bool_]
    """[n]: written by the assistant, the end of its turn included."""
    notes: tuple[str, ...] = ()
    """Remarks on how it was rendered."""


@dataclass(frozen=True)
class RenderedText:
    """A rendered conversation."""

    text: str
    answers: Sequence[tuple[int, int]]
    """First letter and end of each answer, in their order."""
    is_hidden: bool
    """True if names of special tokens in its messages are hidden in it."""
    prompt: str | None = None
    """The prompt alone, up to where an answer begins; None where roles decide."""
    notes: tuple[str, ...] = ()


def encode(
    conversations: Iterable[Conversation],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    answers: Answers = "all",
) -> Iterator[Tokens | ChatError]:
    """Yield the tokens of each conversation, or its problem, as soon as one has any."""
    speller = Speller(tokenizer)
    waiting, letters = list[RenderedText](), 0
    for conversation in conversations:
        problem = None
        try:
            waiting.append(text_of(conversation, speller, template, answers))
            letters += len(waiting[-1].text)
        except ChatError as error:
            problem = error
        # letters that are tokenised at a time: meanwhile a token takes some hundred bytes
        if problem is not None or letters >= 1 << 22:
            yield from tokens_of(waiting, speller)
            waiting, letters = [], 0
        if problem is not None:
            yield problem
    yield from tokens_of(waiting, speller)


def text_of(
    conversation: Conversation, speller: "Speller", template: ChatTemplate, answers: Answers
) -> RenderedText:
    hidden, is_hidden = speller.hide(conversation)
    template = template.for_tools(hidden.tools)
    rendered = template.render(hidden.messages, hidden.tools, options=hidden.options)
    tools = (f"tools rendered by {template.location}",) if hidden.tools else ()
    if hidden.prompt and answers == "all":
        prompt = template.render(
            hidden.messages[: hidden.prompt], hidden.tools, options=hidden.options, add_generation_prompt=True
        )
        return RenderedText(rendered.text, (), is_hidden, prompt.text, tools)
    finder = AnswerFinder(hidden, template, rendered, speller.known)
    if template.keeps_turns:
        return RenderedText(*finder.turns(answers), is_hidden, notes=tools)
    return RenderedText(rendered.text, finder.ranges(answers), is_hidden, notes=tools)


def tokens_of(texts: Sequence[RenderedText], speller: "Speller") -> list[Tokens]:
    tokens = dict[int, Tokens]()
    for is_hidden in (False, True):
        numbers = [n for n, text in enumerate(texts) if text.is_hidden == is_hidden]
        encoded = speller.encode([texts[n].text for n in numbers], is_hidden)
        prompts = speller.encode([texts[n].prompt or "" for n in numbers], is_hidden)
        for number, (ids, offsets), (before, _) in zip(numbers, encoded, prompts, strict=True):
            text, notes = texts[number], texts[number].notes
            if text.prompt is None:
                tokens[number] = Tokens(ids, overlaps(offsets, text.answers), notes)
                continue
            begin = common_start(before, ids)
            if begin < len(before):
                notes = (*notes, "the answer begins where the prompt alone is rendered otherwise")
            tokens[number] = Tokens(ids, np.arange(len(ids)) >= begin, notes)
    return [tokens[n] for n in range(len(texts))]


def common_start(one: Any, other: Any) -> int:
    """Return the number of equal items with which two sequences begin."""
    size = min(len(one), len(other))
    if isinstance(one, np.ndarray):
        differs = np.flatnonzero(one[:size] != other[:size])
        return int(differs[0]) if len(differs) else size
    return next((n for n in range(size) if one[n] != other[n]), size)


def encode_prompt(conversation: Conversation, tokenizer: Tokenizer, template: ChatTemplate) -> list[int]:
    """Return the tokens of a conversation up to where the next answer begins. Raises ChatError."""
    speller = Speller(tokenizer)
    hidden, is_hidden = speller.hide(conversation)
    template = template.for_tools(hidden.tools)
    rendered = template.render(
        hidden.messages, hidden.tools, options=hidden.options, add_generation_prompt=True
    )
    return [int(id) for id in speller.encode([rendered.text], is_hidden)[0][0]]


@dataclass(frozen=True)
class AnswerFinder:
    """Finds the tokens of the answers in a rendered conversation.

    They are the {% generation %} blocks of a template that has them. Otherwise an answer is what its message
    adds to the text rendered up to it; where a template renders earlier messages otherwise once others
    follow, it is found with PROBE in place of its text: what stays the same on both sides is not its own.
    """

    conversation: Conversation
    template: ChatTemplate
    rendered: Rendered
    special: re.Pattern[str]
    """Names of special tokens."""

    def ranges(self, answers: Answers) -> Sequence[tuple[int, int]]:
        """Return first letter and end of each answer that is trained. Raises ChatError."""
        (numbers, trained), blocks = self.numbers(answers), self.rendered.answers
        if not self.template.marks_answers:
            return [self.find(n) for n in trained]
        if not blocks:
            location = self.template.location
            raise ChatError(f"{location} marks no answer of it: correct its {{% generation %}} blocks")
        if all(map(is_trained, self.conversation.messages)):
            return blocks if answers == "all" else blocks[-1:]
        if len(blocks) != len(numbers):
            raise ChatError(
                f"{self.template.location} marks {len(blocks)} answers of {len(numbers)}: leave weights of 0 "
                "out"
            )
        return [block for block, n in zip(blocks, numbers, strict=True) if n in trained]

    def numbers(self, answers: Answers) -> tuple[list[int], list[int]]:
        """Return the numbers of the assistant's messages, and of those that are trained."""
        messages = self.conversation.messages
        numbers = [n for n, message in enumerate(messages) if message["role"] == ASSISTANT]
        return numbers, [
            n for n in (numbers if answers == "all" else numbers[-1:]) if is_trained(messages[n])
        ]

    def turns(self, answers: Answers) -> tuple[str, Sequence[tuple[int, int]]]:
        """Return the text with each answer as it was when nothing followed it, and those that are trained.

        Raises ChatError.
        """
        messages, text = self.conversation.messages, self.rendered.text
        numbers, trained = self.numbers(answers)
        pieces, ranges, length, done = list[str](), list[tuple[int, int]](), 0, 0
        for n in numbers:
            begin, end = first, stop = self.find(n)
            whole = text
            if n + 1 < len(messages):
                last = replace(self.conversation, messages=[*(messages[:n] or [ASKED]), messages[n]])
                rendered = self.template.render(last.messages, last.tools, options=last.options)
                whole = rendered.text
                first, stop = AnswerFinder(last, self.template, rendered, self.special).find(n or 1)
            # what else the template writes before an answer that is the last, it wrote before this one: all
            # after the last special token or line before the answer
            before = text[done:begin]
            starts = [match.start() for match in self.special.finditer(before)]
            opening = before[starts[-1] :] if starts else before[before[:-1].rfind("\n") + 1 :]
            start = whole.rfind(opening, 0, first) + len(opening) if opening in whole[:first] else first
            pieces += [before, whole[start:stop]]
            length, done = length + begin - done + first - start, end
            ranges += [(length, length + stop - first)] if n in trained else []
            length += stop - first
        return "".join([*pieces, text[done:]]), ranges

    def find(self, number: int) -> tuple[int, int]:
        """Return first letter and end of an answer of a template without blocks. Raises ChatError."""
        messages, text = self.conversation.messages, self.rendered.text
        before = self.render(messages[:number], add_generation_prompt=True)
        after = text if number + 1 == len(messages) else self.render(messages[: number + 1])
        if before is not None and after is not None and after.startswith(before) and text.startswith(after):
            return len(before), len(after)
        probed = [*messages[:number], {**messages[number], "content": PROBE}, *messages[number + 1 :]]
        whole = self.render(probed) or ""
        last = self.render(probed[: number + 1]) or self.render([ASKED, probed[number]]) or ""
        location, message = self.template.location, f"message {number + 1}"
        fix = "mark answers in the template with {% generation %}, or set data.chat_template"
        if {whole.count(PROBE), last.count(PROBE)} != {1}:
            raise ChatError(f"{message}: {location} leaves its text out, or writes it more than once: {fix}")
        head, _, rest = whole.partition(PROBE)
        begin = self.begin(before, head, number)
        # after its content a turn has what it has as the last one too, and the special token that closes it
        alone = last.partition(PROBE)[2]
        size = self.common(rest, alone)
        closing = self.special.match(rest, size)
        if closing is not None and size < len(alone) and not self.special.search(rest, 0, size):
            size = closing.end()
        left = len(rest) - size
        end = len(text) - left
        if begin > end or text[:begin] != head[:begin] or text[end:] != whole[len(whole) - left :]:
            raise ChatError(
                f"{message}: {location} renders other messages otherwise after another text: {fix}"
            )
        return begin, end

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str | None:
        """Return some messages as text; None if the template rejects them."""
        given, options = self.conversation.tools, self.conversation.options
        try:
            return self.template.render(
                messages, given, options=options, add_generation_prompt=add_generation_prompt
            ).text
        except ChatError:
            return None

    def begin(self, before: str | None, head: str, number: int) -> int:
        """Return where an answer begins in the text `head` before its content.

        `before` is the text rendered up to it. An answer begins after the part of it with which an answer
        begins, as far as it is the same here.
        """
        if before is not None and head.startswith(before):
            return len(before)
        earlier = self.conversation.messages[:number]
        if before is None:
            earlier = [ASKED]
            before = self.render(earlier, add_generation_prompt=True) or ""
        opening = before[self.common(before, self.render(earlier) or "") :]
        first = self.special.match(opening) or re.match(r".+\n?", opening)
        start = head.rfind(first[0]) if first else -1
        return len(head) if start < 0 else start + self.common(head[start:], opening)

    def common(self, one: str, other: str) -> int:
        """Return the equal letters at the beginning of two texts, without a part of a special token."""
        size = common_start(one, other)
        inside = (
            m for text in (one, other) for m in self.special.finditer(text, max(0, size - 200), size + 200)
        )
        return min((m.start() for m in inside if m.start() < size < m.end()), default=size)


def overlaps(offsets: NDArray[np.int32], ranges: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Return which tokens, of letters `offsets` [n, 2], have a letter in one of the ranges: [n].

    Begins and ends of the ranges are in ascending order.
    """
    if not ranges:
        return np.zeros(len(offsets), dtype=bool)
    begins, ends = np.array(ranges).T
    last = np.searchsorted(begins, offsets[:, 1]) - 1  # of the ranges that begin before a token's end
    overlap: NDArray[np.bool_] = (last >= 0) & (ends[last] > offsets[:, 0])
    return overlap


def reserved(value: Any, letters: re.Pattern[str]) -> str | None:
    """Return the first of these letters in the texts of JSON values; None if they hold none."""
    if isinstance(value, str):
        match = letters.search(value)
        return None if match is None else match[0]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return next((letter for item in items if (letter := reserved(item, letters)) is not None), None)


class Speller:
    """Names of special tokens in messages, kept apart from the template's.

    In a message name n becomes letters of private use before it is rendered. After that the names left are
    the template's: they become the tokenizer's private letters, and the message's become names again. All
    have the length of the name, so that no place in the text moves.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.names = tokenizer, tokenizer.special_names
        longest = sorted(self.names, key=len, reverse=True)  # as the library finds them
        self.known = re.compile("|".join(map(re.escape, longest)) or r"(?!)")
        self.numbers = {name: n for n, name in enumerate(self.names)}

    def hide(self, conversation: Conversation) -> tuple[Conversation, bool]:
        """Return a conversation with the names in its texts hidden, and True if there were any.

        Raises ChatError for letters that have another use here.
        """
        given = [list(conversation.messages), conversation.tools, dict(conversation.options)]
        try:
            hidden = self._hidden(given)
            is_hidden = hidden != given
            letter = reserved(given, RESERVED if is_hidden else MARKS)
        except RecursionError:
            raise ChatError("its messages or tools are nested too deeply: flatten them") from None
        if letter is not None:
            raise ChatError(f"it holds the letter U+{ord(letter):X}, which has another use here: delete it")
        messages, tools, options = hidden
        return replace(conversation, messages=messages, tools=tools, options=options), is_hidden

    def _hidden(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._replaced(value, WRITTEN)
        if isinstance(value, Mapping):
            return {key: self._hidden(item) for key, item in value.items()}
        return [self._hidden(item) for item in value] if isinstance(value, list | tuple) else value

    def encode(self, texts: Sequence[str], is_hidden: bool) -> list[Placed]:
        """Encode rendered texts, with hidden names or without: see `Tokenizer.encode_with_offsets`."""
        if not is_hidden:
            return self.tokenizer.encode_with_offsets(texts, "tokens")
        shown = list[str]()
        for text in texts:
            text = self._replaced(text, PRIVATE)
            for name, n in self.numbers.items():
                text = text.replace(chr(WRITTEN + n) * len(name), name)
            shown.append(text)
        return self.tokenizer.encode_with_offsets(shown, "private")

    def _replaced(self, text: str, first: int) -> str:
        return self.known.sub(lambda name: chr(first + self.numbers[name[0]]) * len(name[0]), text)


def end_of_turn_tokens(template: ChatTemplate, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that end an answer: `end_ids`, and what the template writes after an answer."""
    question: list[dict[str, Any]] = [{"role": "user", "content": "question"}]
    try:
        text = template.render([*question, {"role": ASSISTANT, "content": "answer"}]).text
    except ChatError:
        text = ""  # reported where a conversation is rendered
    after = tokenizer.encode_special(text.rpartition("answer")[2]) if "answer" in text else []
    return tokenizer.end_ids | set([id for id in after if id in tokenizer.special_ids][:1])
