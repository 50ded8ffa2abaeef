"""`mlm generate`: continue one text on the terminal, or many into a file.

A single text is printed as its tokens come. Several are printed one after the other, each when it and those
before it are done; with `out` they go to the file alone. Where the reader of standard output has left
(`| head -1`), the command ends.
"""

import json
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from mlm.data.tokenizer import Tokenizer
from mlm.inference.chat import end_of_turn_tokens, load_chat_template
from mlm.inference.generate.config import STDIN, GenerateConfig
from mlm.inference.generate.prompts import Prompt, read_prompts, share_prompts
from mlm.inference.generation import Sampling, before_stop, continuations, ends_at
from mlm.inference.trained import (
    checkpoint_problems,
    continuation_problem,
    load_tokenizer,
    load_trained,
    named_checkpoint,
)
from mlm.models.config import ModelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.util.errors import UserError
from mlm.util.results import folder_problem, target_name, write_result
from mlm.util.terminal import Advance, one_line, progress_bar, safe_text

SAMPLE_BITS = 32
"""Of the number that a text's draws are a function of, those below the number of its sample."""


def preflight(config: GenerateConfig) -> list[str]:
    """Problems that reading the named files shows; called before any rank starts."""
    problems = checkpoint_problems(config.ckpt, config.parallel)
    if problems:
        return problems
    try:
        target_name = named_checkpoint(config.ckpt)
        if problem := continuation_problem(config.ckpt, target_name.config.model):
            return [problem]
        tokenizer = tokenizer_of(config, target_name.path, target_name.config.model)
        problems = [*filter(None, [folder_problem(config.out)])]
        if "" in config.stop:
            problems.append('stop="" would end every text at once; give texts of one character or more')
        if config.prompt != STDIN:  # which can be read once
            read_prompts(config, tokenizer)
    except UserError as error:
        return [*problems, *error.problems]
    return problems


def run(config: GenerateConfig, ctx: ParallelContext) -> None:
    """Continue every prompt; rank 0 prints and writes. Raises UserError."""
    trained = load_trained(config.ckpt, config.parallel, config.precision, ctx)
    for chunk in trained.model.chunks:
        chunk.to(trained.model.dtype)  # every step reads all weights: once in this dtype, not cast each time
    tokenizer = tokenizer_of(config, trained.path, trained.config.model)
    prompts = share_prompts(config, tokenizer, ctx)
    texts = [(prompt, sample) for prompt in prompts for sample in range(config.num_samples)]
    numbers = [n + (s << SAMPLE_BITS) for n in range(len(prompts)) for s in range(config.num_samples)]
    if ctx.is_main:
        warn_of_long(prompts, trained.config.model.max_positions)
    started = time.perf_counter()
    tokens = continuations(
        trained,
        [prompt.ids for prompt, _ in texts],
        Sampling(**{each.name: getattr(config, each.name) for each in fields(Sampling)}),
        ctx=ctx,
        eod_id=ends_of(tokenizer, trained.path),
        numbers=numbers,
        until=ends_at(tokenizer, config.stops),
        should_stop=is_output_closed if config.out is None else lambda: False,
    )
    many = ctx.is_main and config.out is not None and len(texts) > 1
    with progress_bar("continuing", len(texts), shown=many) as advance:
        alone = config.out is None
        new = show(tokens, texts, tokenizer, config.stops, shown=ctx.is_main, alone=alone, advance=advance)
    if not ctx.is_main:
        return
    seconds, count = time.perf_counter() - started, sum(map(len, new))
    if config.out is not None:
        records = [record(*text, tokens, config, tokenizer) for text, tokens in zip(texts, new, strict=True)]
        lines = [json.dumps(said, ensure_ascii=False) + "\n" for said in records]
        text = "".join(lines).encode("utf-8", "backslashreplace")
        write_result(config.out, text, inputs=[config.prompts])
        print(f"written to {target_name(config.out)}", file=sys.stderr)
    print(f"{count:,} tokens in {seconds:.2f} s: {count / seconds:.1f} tokens/s", file=sys.stderr)


def is_output_closed() -> bool:
    """True once nothing can be printed, as after `| head -1`."""
    return bool(getattr(sys.stdout, "is_lost", False))


def tokenizer_of(config: GenerateConfig, path: Path, model: ModelConfig) -> Tokenizer:
    """Return the tokenizer, for chat=true with its template. Raises UserError."""
    tokenizer = load_tokenizer(config.tokenizer, path, model)
    if config.chat:
        tokenizer.chat_template = load_chat_template(
            config.chat_template, config.tokenizer, path, tokenizer, key="chat_template"
        )
    return tokenizer


def ends_of(tokenizer: Tokenizer, path: Path) -> Collection[int]:
    """Return the tokens that end a text: of a document, or of an answer."""
    template = tokenizer.chat_template
    return (tokenizer.eod_id,) if template is None else end_of_turn_tokens(template, tokenizer, path)


def warn_of_long(prompts: Iterable[Prompt], max_positions: int) -> None:
    """Say of which prompts only the end is read."""
    for prompt in prompts:
        if len(prompt.ids) > max_positions:
            print(
                f"mlm generate: {one_line(prompt.place)}: of its {len(prompt.ids)} tokens the last "
                f"{max_positions} are read, the checkpoint's max_positions",
                file=sys.stderr,
            )


def show(
    tokens: Iterable[tuple[int, int | None]],
    texts: list[tuple[Prompt, int]],
    tokenizer: Tokenizer,
    stops: Sequence[str] = (),
    *,
    shown: bool,
    alone: bool,
    advance: Advance,
) -> list[list[int]]:
    """Take in what `continuations` yields and print it; each text's new tokens.

    `alone`: no file takes the texts. `advance` is called as each one ends. What follows one of `stops` is
    not printed.
    """
    new: list[list[int]] = [[] for _ in texts]
    stream = Stream(tokenizer, stops, shown=shown) if len(texts) == 1 else None
    if stream:
        stream.begin(printed_ids(texts[0][0]))
    ended, printed = set(), 0
    for index, token in tokens:
        if token is None:
            ended.add(index)
            advance(1)
        else:
            new[index].append(token)
            if stream:
                stream.add([token])
        while alone and stream is None and printed in ended:
            if shown:
                print_whole(texts[printed], new[printed], tokenizer, stops, first=printed == 0)
            printed += 1
    if stream:
        stream.end()
    return new


def printed_ids(prompt: Prompt) -> list[int]:
    """The tokens of a prompt that are its text: none where a document begins."""
    return list(prompt.ids) if prompt.text and not prompt.is_message else []


def print_whole(
    text: tuple[Prompt, int], new: list[int], tokenizer: Tokenizer, stops: Sequence[str], *, first: bool
) -> None:
    """A text among several, under the location of its prompt."""
    prompt, sample = text
    ids = printed_ids(prompt)
    print(f"{'' if first else chr(10)}--- {one_line(prompt.place)}, sample {sample + 1}")
    print(
        safe_text(before_stop(tokenizer.decode([*ids, *new]), stops, len(tokenizer.decode(ids)))), flush=True
    )


def record(
    prompt: Prompt, sample: int, new: list[int], config: GenerateConfig, tokenizer: Tokenizer
) -> dict[str, Any]:
    """A line of the result file."""
    text = tokenizer.decode(new)
    continuation = before_stop(text, config.stops)
    ending = "max_new_tokens" if len(new) == config.max_new_tokens else "eod"
    return {
        "prompt": prompt.text,
        "sample": sample,
        "continuation": continuation,
        "tokens": new,  # those of the stop too
        "stop": ending if continuation == text else "stop",
        "seed": config.seed,
    }


class Stream:
    """Printer of text as its tokens come.

    A character split over tokens waits until it is whole, and so does what may become one of `stops`, before
    which the text ends.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, shown: bool) -> None:
        self.tokenizer, self.stops, self.shown = tokenizer, stops, shown
        self.ids: list[int] = []
        self.printed = self.start = 0

    def begin(self, ids: list[int]) -> None:
        """The tokens of the prompt, in which stops are text."""
        self.ids += ids
        self._print(self.tokenizer.decode(self.ids))
        self.start = self.printed

    def add(self, ids: list[int]) -> None:
        """More tokens."""
        self.ids += ids
        text = self.tokenizer.decode(self.ids)
        if not text.endswith("\ufffd"):
            text = before_stop(text, self.stops, self.start)
            self._print(text[: len(text) - self._held(text)])

    def end(self) -> None:
        """No more tokens."""
        self._print(before_stop(self.tokenizer.decode(self.ids), self.stops, self.start))
        if self.shown:
            print(flush=True)

    def _held(self, text: str) -> int:
        """Characters at the end that may be the beginning of a stop."""
        longest = max(map(len, self.stops), default=1) - 1
        for count in range(min(longest, len(text) - self.start), 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self.stops):
                return count
        return 0

    def _print(self, text: str) -> None:
        if self.shown:
            sys.stdout.write(safe_text(text[self.printed :]))
            sys.stdout.flush()
        self.printed = len(text)
