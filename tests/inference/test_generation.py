"""Continuations of many texts at a time: those of `transformers`, at every layout and batch size."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel

from mlm.convert.source import open_source
from mlm.inference.config import Sampling
from mlm.inference.generation import continuations, generate
from mlm.inference.sampling import choose, uniforms
from mlm.inference.trained import LoadedModel, load_trained
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext, shape_context
from mlm.util.errors import UserError
from tests.convert.hf_models import SHAPE, make_model
from tests.ranks import run_on_ranks

GREEDY = Sampling(temperature=0.0, max_new_tokens=12)
DRAWN = Sampling(temperature=0.9, top_k=50, top_p=0.95, max_new_tokens=12, seed=3)
MOST = SHAPE["n_positions"]


@cache
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 331, (n,), generator=generator).tolist() for n in (5, 1, 17, 9, 20)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GPT2LMHeadModel:
    """Weights so large that continuations differ from text to text."""
    folder = tmp_path_factory.mktemp("gpt2")
    made = make_model(folder, initializer_range=0.3)
    made.folder = folder
    return made


@pytest.fixture(scope="module")
def trained(model: GPT2LMHeadModel) -> LoadedModel:
    return load_trained(open_source(str(model.folder)), ParallelConfig(), PrecisionConfig(), shape_context())


def ours(trained: LoadedModel, options: Sampling, texts: list[list[int]] | None = None, **how: Any) -> Any:
    texts = prompts() if texts is None else texts
    return generate(trained, texts, options, **({"ctx": shape_context()} | how))


def on_ranks(ctx: ParallelContext, folder: Path, options: Sampling, vp: int) -> list[list[int]]:
    layout = ParallelConfig(tp=ctx.tp.size, pp=ctx.pp.size, vp=vp)
    trained = load_trained(open_source(str(folder)), layout, PrecisionConfig(), ctx)
    return ours(trained, options, ctx=ctx)


def theirs(model: GPT2LMHeadModel, prompt: list[int], count: int, **how: Any) -> list[int]:
    tokens = torch.tensor([prompt])
    how |= {"do_sample": False, "use_cache": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, **how)
    return out[0, len(prompt) :].tolist()


def test_greedy_continuations_equal_those_of_transformers(
    model: GPT2LMHeadModel, trained: LoadedModel
) -> None:
    want = [theirs(model, prompt, 12) for prompt in prompts()]
    assert len({tuple(tokens) for tokens in want}) == len(want)
    assert ours(trained, Sampling(temperature=0.0, max_new_tokens=12, batch_size=2)) == want


@pytest.mark.parametrize("size", [1, 3])
def test_greedy_continuations_without_repeated_n_grams_equal_those_of_transformers(
    model: GPT2LMHeadModel, trained: LoadedModel, size: int
) -> None:
    """Prompts that repeat themselves, so that each size forbids a token that another allows."""
    texts = [prompt[:4] * (len(prompt) // 4 + 1) for prompt in prompts()]
    want = [theirs(model, text, 24, no_repeat_ngram_size=size) for text in texts]
    assert want != [theirs(model, text, 24, no_repeat_ngram_size=size + 1) for text in texts]
    options = Sampling(temperature=0.0, max_new_tokens=24, no_repeat_ngram_size=size, batch_size=3)
    assert ours(trained, options, texts) == want


@pytest.mark.parametrize(
    ("tp", "pp", "vp", "options"),
    [(2, 2, 1, DRAWN), (1, 1, 3, replace(GREEDY, no_repeat_ngram_size=1))],
    ids=["drawn", "no repeats"],
)
def test_every_rank_of_every_layout_has_the_tokens_of_one_process(
    model: GPT2LMHeadModel, trained: LoadedModel, tp: int, pp: int, vp: int, options: Sampling
) -> None:
    got = run_on_ranks(on_ranks, model.folder, options, vp, tp=tp, pp=pp)
    assert got == [ours(trained, options)] * (tp * pp)


def test_draws_do_not_depend_on_what_shares_the_batch(trained: LoadedModel) -> None:
    whole = ours(trained, DRAWN)
    assert len({tuple(tokens) for tokens in whole}) == len(whole)
    some = [prompts()[i] for i in (3, 1)]
    chosen = list(continuations(trained, some, DRAWN, ctx=shape_context(), numbers=[3, 1]))
    drawn = [[token for index, token in chosen if index == n and token is not None] for n in (0, 1)]
    assert drawn == [whole[3], whole[1]]


def test_each_token_is_drawn_from_the_logits_of_transformers_at_its_place(
    model: GPT2LMHeadModel, trained: LoadedModel
) -> None:
    for index, (prompt, new) in enumerate(zip(prompts(), ours(trained, DRAWN), strict=True)):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1]
        chances = uniforms(DRAWN.seed, [index] * len(new), range(len(new))).tolist()
        assert new == [choose(row, chance, DRAWN) for row, chance in zip(logits, chances, strict=True)]


def test_a_full_context_is_halved_and_continues(model: GPT2LMHeadModel, trained: LoadedModel) -> None:
    """Rows fill up at different steps; the last prompt is longer than the model reads.

    Each new token is transformers' most probable one after the newest half of MOST, until there are MOST.
    """
    texts = [*prompts(), [token for prompt in prompts() for token in prompt] * 2]
    assert len(texts[-1]) > MOST
    got = ours(trained, Sampling(temperature=0.0, max_new_tokens=80, batch_size=4), texts)
    assert [len(new) for new in got] == [80] * len(texts)
    for prompt, new in zip(texts, got, strict=True):
        text, start, done = prompt + new, max(0, len(prompt) - MOST), len(prompt)
        while done < len(text):
            if done - start > MOST:
                start = done - MOST // 2
            end = min(start + MOST + 1, len(text))
            with torch.no_grad():
                best = model(torch.tensor([text[start : end - 1]])).logits[0].argmax(-1).tolist()
            assert best[done - start - 1 :] == text[done:end]
            done = end


def test_a_text_ends_before_its_end_token_or_where_until_says(trained: LoadedModel) -> None:
    whole = ours(trained, GREEDY)
    end = whole[2][4]
    want = [tokens[: tokens.index(end)] if end in tokens else tokens for tokens in whole]
    assert want != whole
    assert ours(trained, GREEDY, end_ids=[end]) == want
    whole = ours(trained, GREEDY)
    got = ours(trained, GREEDY, until=lambda i, tokens: len(tokens) == i + 1)
    assert got == [tokens[: i + 1] for i, tokens in enumerate(whole)]


def left(ctx: ParallelContext, folder: Path) -> list[tuple[int, int | None]]:
    """What a rank yields where rank 0 wants no more after two tokens of each text."""
    layout = ParallelConfig(tp=ctx.tp.size, pp=ctx.pp.size)
    trained = load_trained(open_source(str(folder)), layout, PrecisionConfig(), ctx)
    wanted = iter([True, True, False])
    leave = (lambda: not next(wanted)) if ctx.is_main else (lambda: False)
    some = prompts()[:2]
    return list(continuations(trained, some, GREEDY, ctx=ctx, should_stop=leave))


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_all_ranks_end_where_rank_0_wants_no_more(
    model: GPT2LMHeadModel, trained: LoadedModel, tp: int, pp: int
) -> None:
    first, second = ours(trained, GREEDY)[:2]
    expected = [(0, first[0]), (1, second[0]), (0, first[1]), (1, second[1])]
    assert run_on_ranks(left, model.folder, tp=tp, pp=pp) == [expected] * tp * pp


def spoilt(ctx: ParallelContext, folder: Path) -> str:
    """The error of a model whose table holds a NaN at token 7."""
    layout = ParallelConfig(tp=ctx.tp.size, pp=ctx.pp.size)
    trained = load_trained(open_source(str(folder)), layout, PrecisionConfig(), ctx)
    for chunk in trained.model.chunks:
        if chunk.stage.is_last and ctx.tp.rank == 0:
            with torch.no_grad():
                chunk.final_norm.bias[0] = torch.nan
    with pytest.raises(UserError) as caught:
        ours(trained, GREEDY, ctx=ctx)
    return str(caught.value)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_logits_that_are_no_numbers_stop_every_rank_and_name_the_step(
    model: GPT2LMHeadModel, tp: int, pp: int
) -> None:
    for message in run_on_ranks(spoilt, model.folder, tp=tp, pp=pp):
        assert "the logits of new token 1 of text 1 are not finite" in message
