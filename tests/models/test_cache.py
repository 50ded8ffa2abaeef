"""Reading with a cache gives the logits of reading everything again, at every layout."""

from functools import partial

import pytest
import torch
from torch import Tensor

from mlm.data.sampler import Batch
from mlm.models.cache import FIRST_COLUMNS, DecodePass, KeyValueCache, PrefillPass, Reading
from mlm.models.config import ModelConfig
from mlm.models.gpt2.model import GPT2
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.cross_entropy import full_logits
from mlm.parallel.mesh import Axis, ParallelContext, shape_context
from mlm.parallel.random import init_parameters
from mlm.training.pipelined import PipelinedModel
from tests.ranks import run_on_ranks
from tests.slow import thinned

MODEL = ModelConfig(
    num_layers=4,
    hidden_size=24,
    num_heads=4,
    max_positions=160,
    vocab_size=331,
    init_std=0.2,  # attention that is far from uniform
)
LENGTHS = (FIRST_COLUMNS - 3, 1, 9)  # read before the first step; one row's keys outgrow the first columns
STEPS = 6
TOLERANCE = {"fp32": 1e-5, "fp64": 1e-12}  # of the largest logit: sums in another order


def texts() -> Tensor:
    """[B, S] int64; of row b the first LENGTHS[b] + STEPS tokens are read."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(MODEL.vocab_size, (len(LENGTHS), max(LENGTHS) + STEPS), generator=generator)


def build(ctx: ParallelContext, dtype: str, vp: int = 1) -> PipelinedModel:
    layout = ParallelConfig(tp=ctx.tp.size, pp=ctx.pp.size, vp=vp)
    model = PipelinedModel(MODEL, layout, PrecisionConfig(dtype=dtype), ctx)
    for chunk in model.chunks:
        init_parameters(chunk, 5, ctx.tp)
    return model


def uncached(dtype: str, row: int, length: int) -> Tensor:
    """Logits [vocab_size] after the first tokens of a row, by one process that reads only them."""
    wide = torch.float64 if dtype == "fp64" else torch.float32
    model = GPT2(MODEL, tp=Axis("tp"), dtype=wide).to(wide)
    init_parameters(model, 5, Axis("tp"))
    with torch.no_grad():
        return full_logits(model.hidden_states(texts()[row : row + 1, :length])[-1], model.token)[0]


def read(model: PipelinedModel, tokens: Tensor, reading: Reading) -> list[Tensor]:
    def forward(chunk: GPT2, batch: Batch, x: Tensor | None) -> Tensor:
        return chunk.read(batch.tokens, reading, x)

    return [out for _, out in model.evaluate([Batch(tokens, tokens, 0)], forward)]


def fill(model: PipelinedModel, cache: KeyValueCache, rows: tuple[int, ...] = (0, 1, 2)) -> None:
    """Read the first LENGTHS tokens of each row, padded with tokens that must not be seen."""
    tokens = torch.full((len(rows), max(LENGTHS[row] for row in rows)), 7)
    for number, row in enumerate(rows):
        tokens[number, : LENGTHS[row]] = texts()[row, : LENGTHS[row]]
    read(model, tokens, PrefillPass(cache, rows))


def step(model: PipelinedModel, cache: KeyValueCache, number: int, rows: tuple[int, ...]) -> list[Tensor]:
    """The number-th step: row n of the cache is `rows[n]` of the texts."""
    columns = [LENGTHS[row] + number for row in rows]
    tokens = torch.stack([texts()[row, c : c + 1] for row, c in zip(rows, columns, strict=True)])
    return read(model, tokens, DecodePass(cache, columns, dtype=model.dtype, device=torch.device("cpu")))


def cached(ctx: ParallelContext, dtype: str, vp: int) -> list[Tensor]:
    """Logits [B, vocab_size] of each step, where they come out."""
    model, cache = build(ctx, dtype, vp), KeyValueCache(len(LENGTHS), MODEL.max_positions)
    fill(model, cache)
    return [logits for number in range(STEPS) for logits in step(model, cache, number, (0, 1, 2))]


def assert_close(got: Tensor, want: Tensor, dtype: str) -> None:
    assert (got - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()


@pytest.mark.parametrize("dtype", thinned(["fp32", "fp64"], 4))
@pytest.mark.parametrize(("tp", "pp", "vp"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2)], ids=str)
def test_cached_logits_equal_uncached_ones_at_every_step(tp: int, pp: int, vp: int, dtype: str) -> None:
    ranks = run_on_ranks(partial(cached, dtype=dtype, vp=vp), tp=tp, pp=pp)
    assert [len(logits) for logits in ranks] == [0] * (tp * (pp - 1)) + [STEPS] * tp
    for number in range(STEPS):
        want = torch.stack([uncached(dtype, row, n + number + 1) for row, n in enumerate(LENGTHS)])
        assert_close(ranks[-1][number], want, dtype)


def test_rows_filled_later_are_read_like_the_others() -> None:
    model, cache = build(shape_context(), "fp64"), KeyValueCache(3, MODEL.max_positions)
    fill(model, cache, (0,))
    step(model, cache, 0, (0,))
    for row in (1, 2):
        keep = PrefillPass(cache, (row,))
        read(model, texts()[row : row + 1, : LENGTHS[row]], keep)
    columns = [LENGTHS[0] + 1, LENGTHS[1], LENGTHS[2]]
    tokens = torch.stack([texts()[row, c : c + 1] for row, c in enumerate(columns)])
    (got,) = read(model, tokens, DecodePass(cache, columns, dtype=torch.float64, device=torch.device("cpu")))
    want = torch.stack([uncached("fp64", row, c + 1) for row, c in enumerate(columns)])
    assert_close(got, want, "fp64")


def test_a_row_that_is_moved_continues_as_before() -> None:
    model, cache = build(shape_context(), "fp64"), KeyValueCache(3, MODEL.max_positions)
    fill(model, cache)
    step(model, cache, 0, (0, 1, 2))
    cache.move(2, 0, LENGTHS[2] + 1)  # the text of row 0 has ended
    (got,) = step(model, cache, 1, (2, 1))
    want = torch.stack([uncached("fp64", row, LENGTHS[row] + 2) for row in (2, 1)])
    assert_close(got, want, "fp64")


def test_texts_of_equal_lengths_need_no_mask() -> None:
    """They take a shorter way through attention, to the same logits."""
    model, cache = build(shape_context(), "fp64"), KeyValueCache(2, MODEL.max_positions)
    tokens = texts()[:2]
    read(model, tokens[:, :9], PrefillPass(cache, (0, 1)))
    alike = DecodePass(cache, [9, 9], dtype=torch.float64, device=torch.device("cpu"))
    (got,) = read(model, tokens[:, 9:10], alike)
    assert alike.bias(0) is None
    assert_close(got, torch.stack([uncached("fp64", row, 10) for row in (0, 1)]), "fp64")


def test_the_cache_never_outgrows_the_model() -> None:
    cache = KeyValueCache(1, FIRST_COLUMNS + 1)
    like = torch.zeros(1, 2, 1, 3)
    assert cache.layer(0, like, 1)[0].shape == (1, 2, FIRST_COLUMNS, 3)
    assert cache.layer(0, like, FIRST_COLUMNS + 1)[0].shape == (1, 2, FIRST_COLUMNS + 1, 3)
