"""Tokens of conversations, and a mask of the assistant's answers.

Names of special tokens in a message are text; only the template's are tokens.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mlm.data.chat_template import BEGIN, END, ChatError, ChatTemplate, Message, TemplateOutput
from mlm.data.conversation import ASSISTANT, Conversation, is_trained
from mlm.data.tokenizer import PRIVATE, Tokenizer, TokensWithOffsets

WRITTEN = 0xF0000
"""First letter for names in messages, in the first plane for private use: name n of a special token is
rendered as chr(WRITTEN + n), repeated to its length. The tokenizer's letters, from PRIVATE on, are in the
second plane."""
PROBE = "\ufdd2"
"""Text that replaces an answer to locate it in a rendered text: a noncharacter, which no text contains."""
ASKED = {"role": "user", "content": "a"}
"""Message before a first answer, to find the text that a template writes around it."""
MARKS = re.compile(f"[{BEGIN}{END}{PROBE}]")
RESERVED = re.compile(f"[{BEGIN}{END}{PROBE}{chr(WRITTEN)}-\U0010fffd]")
"""Letters that messages may not contain; private-use ones only if a message contains a name."""

Answers = Literal["all", "last"]


@dataclass(frozen=True, eq=False)
class Tokens:
    ids: NDArray[np.int32]
    """[n]."""
    is_answer: NDArray[np.bool_]
    """[n]: written by the assistant, the end of its turn included."""
    notes: tuple[str, ...] = ()
    """Remarks on the rendering."""


@dataclass(frozen=True)
class RenderedConversation:
    text: str
    answers: Sequence[tuple[int, int]]
    """First letter and end of each answer, in order."""
    is_hidden: bool
    """True if names of special tokens in messages are hidden in the text."""
    prompt: str | None = None
    """Text of the prompt, up to the beginning of an answer; None if roles decide."""
    notes: tuple[str, ...] = ()


def encode(
    conversations: Iterable[Conversation],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    answers: Answers = "all",
) -> Iterator[Tokens | ChatError]:
    """Yield the tokens of each conversation, or its problem, in batches that end at a problem."""
    speller = Speller(tokenizer)
    waiting, letters = list[RenderedConversation](), 0
    for conversation in conversations:
        problem = None
        try:
            waiting.append(text_of(conversation, speller, template, answers))
            letters += len(waiting[-1].text)
        except ChatError as error:
            problem = error
        # Bounds the letters that are tokenised at a time, as a token takes some hundred bytes meanwhile.
        if problem is not None or letters >= 1 << 22:
            yield from tokens_of(waiting, speller)
            waiting, letters = [], 0
        if problem is not None:
            yield problem
    yield from tokens_of(waiting, speller)


def text_of(
    conversation: Conversation, speller: "Speller", template: ChatTemplate, answers: Answers
) -> RenderedConversation:
    hidden, is_hidden = speller.hide(conversation)
    template = template.for_tools(hidden.tools)
    rendered = template.render(hidden.messages, hidden.tools, options=hidden.options)
    tools = (f"tools rendered by {template.location}",) if hidden.tools else ()
    if hidden.prompt and answers == "all":
        prompt = template.render(
            hidden.messages[: hidden.prompt], hidden.tools, options=hidden.options, add_generation_prompt=True
        )
        return RenderedConversation(rendered.text, (), is_hidden, prompt.text, tools)
    finder = AnswerFinder(hidden, template, rendered, speller.known)
    if template.keeps_turns:
        return RenderedConversation(*finder.turns(answers), is_hidden, notes=tools)
    return RenderedConversation(rendered.text, finder.ranges(answers), is_hidden, notes=tools)


def tokens_of(texts: Sequence[RenderedConversation], speller: "Speller") -> list[Tokens]:
    tokens = dict[int, Tokens]()
    for is_hidden in (False, True):
        numbers = [n for n, text in enumerate(texts) if text.is_hidden == is_hidden]
        encoded = speller.encode([texts[n].text for n in numbers], is_hidden)
        prompts = speller.encode([texts[n].prompt or "" for n in numbers], is_hidden)
        for number, (ids, offsets), (prompt_ids, _) in zip(numbers, encoded, prompts, strict=True):
            text, notes = texts[number], texts[number].notes
            if text.prompt is None:
                tokens[number] = Tokens(ids, overlaps(offsets, text.answers), notes)
                continue
            begin = common_start(prompt_ids, ids)
            if begin < len(prompt_ids):
                notes = (*notes, "the answer begins where the prompt alone is rendered otherwise")
            tokens[number] = Tokens(ids, np.arange(len(ids)) >= begin, notes)
    return [tokens[n] for n in range(len(texts))]


def common_start(first: Any, second: Any) -> int:
    """Return the length of the common prefix of two sequences."""
    size = min(len(first), len(second))
    if isinstance(first, np.ndarray):
        differs = np.flatnonzero(first[:size] != second[:size])
        return int(differs[0]) if len(differs) else size
    return next((n for n in range(size) if first[n] != second[n]), size)


def encode_prompt(conversation: Conversation, tokenizer: Tokenizer, template: ChatTemplate) -> list[int]:
    """Return the tokens of a conversation up to the beginning of the next answer. Raises ChatError."""
    speller = Speller(tokenizer)
    hidden, is_hidden = speller.hide(conversation)
    template = template.for_tools(hidden.tools)
    rendered = template.render(
        hidden.messages, hidden.tools, options=hidden.options, add_generation_prompt=True
    )
    return [int(id) for id in speller.encode([rendered.text], is_hidden)[0][0]]


@dataclass(frozen=True)
class AnswerFinder:
    """Locates the answers in a rendered conversation.

    Answers are the {% generation %} blocks of a template that has them. Otherwise an answer is the text that
    its message adds to the preceding ones; if a template renders earlier messages differently once others
    follow, the answer is located by PROBE in place of its content: text equal on both sides is outside of it.
    """

    conversation: Conversation
    template: ChatTemplate
    rendered: TemplateOutput
    special: re.Pattern[str]
    """Names of special tokens."""

    def ranges(self, answers: Answers) -> Sequence[tuple[int, int]]:
        """Return first letter and end of each trained answer. Raises ChatError."""
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
        """Return the numbers of the assistant's messages, and of the trained ones."""
        messages = self.conversation.messages
        numbers = [n for n, message in enumerate(messages) if message["role"] == ASSISTANT]
        return numbers, [
            n for n in (numbers if answers == "all" else numbers[-1:]) if is_trained(messages[n])
        ]

    def turns(self, answers: Answers) -> tuple[str, Sequence[tuple[int, int]]]:
        """Return the text with each answer rendered as the last message, and the ranges of trained answers.

        Raises ChatError.
        """
        messages, text = self.conversation.messages, self.rendered.text
        numbers, trained = self.numbers(answers)
        pieces, ranges, length, position = list[str](), list[tuple[int, int]](), 0, 0
        for n in numbers:
            begin, end = first, stop = self.find(n)
            turn = text
            if n + 1 < len(messages):
                last = replace(self.conversation, messages=[*(messages[:n] or [ASKED]), messages[n]])
                rendered = self.template.render(last.messages, last.tools, options=last.options)
                turn = rendered.text
                first, stop = AnswerFinder(last, self.template, rendered, self.special).find(n or 1)
            # `opening` is the text before the answer, from its last special token or line on. In the rendered
            # turn the template may write more between opening and answer, which belongs to the answer.
            gap = text[position:begin]
            starts = [match.start() for match in self.special.finditer(gap)]
            opening = gap[starts[-1] :] if starts else gap[gap[:-1].rfind("\n") + 1 :]
            start = turn.rfind(opening, 0, first) + len(opening) if opening in turn[:first] else first
            pieces += [gap, turn[start:stop]]
            length, position = length + begin - position + first - start, end
            ranges += [(length, length + stop - first)] if n in trained else []
            length += stop - first
        return "".join([*pieces, text[position:]]), ranges

    def find(self, number: int) -> tuple[int, int]:
        """Return first letter and end of an answer, for a template without blocks. Raises ChatError."""
        messages, text = self.conversation.messages, self.rendered.text
        prompt = self.render(messages[:number], add_generation_prompt=True)
        turn = text if number + 1 == len(messages) else self.render(messages[: number + 1])
        if prompt is not None and turn is not None and turn.startswith(prompt) and text.startswith(turn):
            return len(prompt), len(turn)
        probed = [*messages[:number], {**messages[number], "content": PROBE}, *messages[number + 1 :]]
        full = self.render(probed) or ""
        short = self.render(probed[: number + 1]) or self.render([ASKED, probed[number]]) or ""
        location, message = self.template.location, f"message {number + 1}"
        fix = "mark answers in the template with {% generation %}, or set data.chat_template"
        if {full.count(PROBE), short.count(PROBE)} != {1}:
            raise ChatError(f"{message}: {location} leaves its text out, or writes it more than once: {fix}")
        head, _, tail = full.partition(PROBE)
        begin = self.begin(prompt, head, number)
        # A turn ends with the text that follows its content as the last message too, and its closing token.
        short_tail = short.partition(PROBE)[2]
        size = self.common(tail, short_tail)
        closing = self.special.match(tail, size)
        if closing is not None and size < len(short_tail) and not self.special.search(tail, 0, size):
            size = closing.end()
        num_after = len(tail) - size
        end = len(text) - num_after
        if begin > end or text[:begin] != head[:begin] or text[end:] != full[len(full) - num_after :]:
            raise ChatError(
                f"{message}: {location} renders other messages otherwise after another text: {fix}"
            )
        return begin, end

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str | None:
        """Return some messages as text; None if the template rejects them."""
        tools, options = self.conversation.tools, self.conversation.options
        try:
            return self.template.render(
                messages, tools, options=options, add_generation_prompt=add_generation_prompt
            ).text
        except ChatError:
            return None

    def begin(self, prompt: str | None, head: str, number: int) -> int:
        """Return the beginning of an answer in `head`, the text before its content.

        `prompt` is the text rendered up to the answer. The answer begins after the generation prompt, as far
        as `head` contains it.
        """
        if prompt is not None and head.startswith(prompt):
            return len(prompt)
        earlier = self.conversation.messages[:number]
        if prompt is None:
            earlier = [ASKED]
            prompt = self.render(earlier, add_generation_prompt=True) or ""
        opening = prompt[self.common(prompt, self.render(earlier) or "") :]
        first = self.special.match(opening) or re.match(r".+\n?", opening)
        start = head.rfind(first[0]) if first else -1
        return len(head) if start < 0 else start + self.common(head[start:], opening)

    def common(self, first: str, second: str) -> int:
        """Return the length of the common prefix of two texts, without a part of a special token."""
        size = common_start(first, second)
        names = (
            m for text in (first, second) for m in self.special.finditer(text, max(0, size - 200), size + 200)
        )
        return min((m.start() for m in names if m.start() < size < m.end()), default=size)


def overlaps(offsets: NDArray[np.int32], ranges: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Return a mask of tokens, of letters `offsets` [n, 2], with a letter in one of the ranges: [n].

    Begins and ends of the ranges ascend.
    """
    if not ranges:
        return np.zeros(len(offsets), dtype=bool)
    begins, ends = np.array(ranges).T
    last = np.searchsorted(begins, offsets[:, 1]) - 1  # last range that begins before the end of a token
    overlap: NDArray[np.bool_] = (last >= 0) & (ends[last] > offsets[:, 0])
    return overlap


def reserved(value: Any, letters: re.Pattern[str]) -> str | None:
    """Return the first of these letters in the strings of JSON values, or None."""
    if isinstance(value, str):
        match = letters.search(value)
        return None if match is None else match[0]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return next((letter for item in items if (letter := reserved(item, letters)) is not None), None)


class Speller:
    """Distinguishes names of special tokens in messages from the template's.

    Name n in a message becomes private-use letters before rendering. After it, the remaining names are the
    template's: they become the tokenizer's private letters, and the messages' letters become names again. All
    replacements keep the length, so that positions in the text do not move.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.names = tokenizer, tokenizer.special_names
        longest = sorted(self.names, key=len, reverse=True)  # longest match first, like the library
        self.known = re.compile("|".join(map(re.escape, longest)) or r"(?!)")
        self.numbers = {name: n for n, name in enumerate(self.names)}

    def hide(self, conversation: Conversation) -> tuple[Conversation, bool]:
        """Return a conversation with the names in its texts hidden, and True if there are any.

        Raises ChatError for letters that are reserved.
        """
        values = [list(conversation.messages), conversation.tools, dict(conversation.options)]
        try:
            hidden = self._hidden(values)
            is_hidden = hidden != values
            letter = reserved(values, RESERVED if is_hidden else MARKS)
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

    def encode(self, texts: Sequence[str], is_hidden: bool) -> list[TokensWithOffsets]:
        """Encode rendered texts, with or without hidden names: see `Tokenizer.encode_with_offsets`."""
        if not is_hidden:
            return self.tokenizer.encode_with_offsets(texts, "tokens")
        spelled = list[str]()
        for text in texts:
            text = self._replaced(text, PRIVATE)
            for name, n in self.numbers.items():
                text = text.replace(chr(WRITTEN + n) * len(name), name)
            spelled.append(text)
        return self.tokenizer.encode_with_offsets(spelled, "private")

    def _replaced(self, text: str, first: int) -> str:
        return self.known.sub(lambda name: chr(first + self.numbers[name[0]]) * len(name[0]), text)


def end_of_turn_tokens(template: ChatTemplate, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that end an answer: `end_ids`, and the template's special token after an answer."""
    question: list[dict[str, Any]] = [{"role": "user", "content": "question"}]
    try:
        text = template.render([*question, {"role": ASSISTANT, "content": "answer"}]).text
    except ChatError:
        text = ""  # the error is reported when a conversation is rendered
    ids_after = tokenizer.encode_special(text.rpartition("answer")[2]) if "answer" in text else []
    return tokenizer.end_ids | set([id for id in ids_after if id in tokenizer.special_ids][:1])
