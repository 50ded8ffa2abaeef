"""`mlm generate`: continue one text on the terminal, or many into a file.

Texts are printed in order, the first unfinished one token by token; with `out` several go to the file alone.
The command ends when the reader of standard output closes it (`| head -1`).
"""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import fields

from mlm.cli.generate.prompts import Prompt, read_prompts, share_prompts
from mlm.cli.generate.settings import STDIN, GenerateConfig
from mlm.convert.source import Source, open_source
from mlm.data.chat_tokens import end_of_turn_tokens
from mlm.data.tokenizer import Tokenizer
from mlm.data.tokenizer_settings import GENERATION_CONFIG
from mlm.inference.config import Sampling, declared_sampling, resolve_sampling
from mlm.inference.generation import continuations, stop_check, truncate_at_stop
from mlm.inference.trained import load_trained, open_predictor
from mlm.parallel.mesh import ParallelContext
from mlm.util.errors import UserError
from mlm.util.results import folder_problem, target_name, write_result
from mlm.util.terminal import Advance, one_line, progress_bar, safe_text

SAMPLE_BITS = 32  # a text's draws are a function of its number: below these bits the prompt, above the sample


def preflight(config: GenerateConfig) -> list[str]:
    problems: list[str] = []
    try:
        tokenizer = tokenizer_of(config, open_predictor(config.ckpt, config.parallel))
        problems = [*filter(None, [folder_problem(config.out)])]
        invalid = sampling_of(config, tokenizer).problems()  # typed settings are checked already
        problems += [f"{GENERATION_CONFIG}: {p}" for p in invalid if getattr(config, p.keys[0]) is None]
        if "" in config.stop:
            problems.append('stop="" would end every text at once; give texts of one character or more')
        if config.prompt != STDIN:  # which can be read once
            read_prompts(config, tokenizer)
    except UserError as error:
        return [*problems, *error.problems]
    return problems


def run(config: GenerateConfig, ctx: ParallelContext) -> None:
    trained = load_trained(open_source(config.ckpt), config.parallel, config.precision, ctx)
    for chunk in trained.model.chunks:
        chunk.to(trained.model.dtype)  # every step reads all weights: once in this dtype, not cast each time
    tokenizer = tokenizer_of(config, trained.source)
    prompts = share_prompts(config, tokenizer, ctx)
    texts = [(prompt, sample) for prompt in prompts for sample in range(config.num_samples)]
    numbers = [n + (s << SAMPLE_BITS) for n in range(len(prompts)) for s in range(config.num_samples)]
    if ctx.is_main:
        limit = trained.config.model.max_positions
        for prompt in (prompt for prompt in prompts if len(prompt.ids) > limit):
            note = (
                f"of its {len(prompt.ids)} tokens the last {limit} are read, the checkpoint's max_positions"
            )
            print(f"mlm generate: {one_line(prompt.location)}: {note}", file=sys.stderr)
        declared = declared_sampling(tokenizer.declared.generation)
        if used := [f"{key}={value}" for key, value in declared.items() if getattr(config, key) is None]:
            print(f"as {GENERATION_CONFIG} declares: {', '.join(used)}", file=sys.stderr)
    started, template = time.perf_counter(), tokenizer.chat_template
    tokens = continuations(
        trained,
        [prompt.ids for prompt, _ in texts],
        sampling_of(config, tokenizer),
        ctx=ctx,
        end_ids=tokenizer.end_ids if template is None else end_of_turn_tokens(template, tokenizer),
        numbers=numbers,
        until=stop_check(tokenizer, config.stops),
        # once nothing can be printed, as after `| head -1`
        should_stop=lambda: config.out is None and bool(getattr(sys.stdout, "is_lost", False)),
    )
    has_bar = config.out is not None and len(texts) > 1
    with progress_bar("continuing", len(texts), shown=ctx.is_main and has_bar) as advance:
        shown = ctx.is_main and not has_bar
        new = collect_tokens(tokens, texts, tokenizer, config.stops, shown=shown, advance=advance)
    if not ctx.is_main:
        return
    seconds, count = time.perf_counter() - started, sum(map(len, new))
    if config.out is not None:
        lines = ""
        for (prompt, sample), ids in zip(texts, new, strict=True):
            text = tokenizer.decode(ids)
            continuation = truncate_at_stop(text, config.stops)
            ending = "max_new_tokens" if len(ids) == config.max_new_tokens else "eod"
            row = {
                "prompt": prompt.text,
                "sample": sample,
                "continuation": continuation,
                "tokens": ids,  # the stop's too
                "stop": ending if continuation == text else "stop",
                "seed": config.seed,
            }
            lines += json.dumps(row, ensure_ascii=False) + "\n"
        write_result(config.out, lines.encode("utf-8", "backslashreplace"), inputs=[config.prompts])
        print(f"written to {target_name(config.out)}", file=sys.stderr)
    print(f"{count:,} tokens in {seconds:.2f} s: {count / seconds:.1f} tokens/s", file=sys.stderr)


def tokenizer_of(config: GenerateConfig, source: Source) -> Tokenizer:
    """Return the tokenizer, for chat=true with its template. Raises UserError."""
    tokenizer = source.load_tokenizer(config.tokenizer)
    if config.chat:
        tokenizer.chat_template = source.load_chat_template(
            config.chat_template, config.tokenizer, tokenizer, key="chat_template"
        )
    return tokenizer


def sampling_of(config: GenerateConfig, tokenizer: Tokenizer) -> Sampling:
    """Return the settings that are typed, else declared by the model, else the usual ones."""
    typed = {option.name: getattr(config, option.name) for option in fields(Sampling)}
    return resolve_sampling(tokenizer.declared.generation, typed)


def collect_tokens(
    tokens: Iterable[tuple[int, int | None]],
    texts: Sequence[tuple[Prompt, int]],
    tokenizer: Tokenizer,
    stops: Sequence[str] = (),
    *,
    shown: bool,
    advance: Advance,
) -> list[list[int]]:
    """Collect each text's new tokens from `continuations`; print the texts if `shown`.

    `advance` is called as each text ends.
    """
    new: list[list[int]] = [[] for _ in texts]
    finished, current = set(), 0
    stream = begin_text(texts, current, tokenizer, stops) if shown else None
    for index, token in tokens:
        if token is None:
            finished.add(index)
            advance(1)
        else:
            new[index].append(token)
        while stream is not None and (index == current or current in finished):
            stream.print(new[current], is_whole=current in finished)
            if current not in finished:
                break
            current += 1
            stream = begin_text(texts, current, tokenizer, stops) if current < len(texts) else None
    return new


def begin_text(
    texts: Sequence[tuple[Prompt, int]], number: int, tokenizer: Tokenizer, stops: Sequence[str]
) -> "TextStream":
    """Print the location of a text among several, and its prompt unless it is a message."""
    prompt, sample = texts[number]
    if len(texts) > 1:
        print(f"{chr(10) * (number > 0)}--- {one_line(prompt.location)}, sample {sample + 1}")
    # with an empty prompt the token before it does not belong to the text
    stream = TextStream(tokenizer, prompt.shown, stops)
    stream.print([])
    return stream


class TextStream:
    """Prints a text as its tokens come.

    A character split over tokens waits for its end; so does a possible beginning of one of `stops`, before
    which the text ends. `stops` in the prompt are text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        self.tokenizer, self.prompt, self.stops = tokenizer, prompt, stops
        self.start, self.printed = len(tokenizer.decode(list(prompt))), 0

    def print(self, new: Sequence[int], *, is_whole: bool = False) -> None:
        """Print the part of the prompt and its new tokens that is not printed yet."""
        text = self.tokenizer.decode([*self.prompt, *new])
        if text.endswith("\ufffd") and not is_whole:
            return
        text = truncate_at_stop(text, self.stops, self.start)
        if not is_whole:  # the end may be the beginning of a stop
            longest = max(map(len, self.stops), default=1) - 1
            lengths = range(min(longest, len(text) - self.start), 0, -1)
            stop_starts = (n for n in lengths if any(stop.startswith(text[-n:]) for stop in self.stops))
            text = text[: len(text) - next(stop_starts, 0)]
        sys.stdout.write(safe_text(text[self.printed :]) + "\n" * is_whole)
        sys.stdout.flush()
        self.printed = len(text)
