"""Log-likelihoods against `transformers` in float64, at every layout, and scores that a stopped run keeps."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2LMHeadModel

from mlm.convert.source import open_source
from mlm.inference import scoring
from mlm.inference.scoring import Request, Score, group_by_input, pack, score
from mlm.inference.trained import LoadedModel, load_trained
from mlm.models.documents import Boundaries
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.util.errors import UserError
from tests.convert.hf_models import MODEL, import_model, make_model
from tests.ranks import run_on_ranks

ALONE = ParallelContext()
LONGEST = MODEL.max_positions


Reference = tuple[GPT2LMHeadModel, Path]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A model of `transformers` in float64, and the run directory it is imported to."""
    folder = tmp_path_factory.mktemp("scoring")
    model = make_model(folder / "model", n_layer=4)
    return model.double(), import_model(folder / "model", folder / "run", verify=False)


def random_requests(model: GPT2LMHeadModel) -> list[Request]:
    """29 requests of all lengths the model takes; the first three continue as the model would."""
    drawn = np.random.default_rng(0)
    texts = [drawn.integers(0, MODEL.vocab_size, n) for n in drawn.integers(2, LONGEST + 2, 24)]
    texts += [drawn.integers(0, MODEL.vocab_size, n) for n in (2, LONGEST, LONGEST + 1)]
    requests = [Request(text, int(drawn.integers(1, len(text)))) for text in texts]
    requests += [Request(texts[-1], 1), Request(texts[-1], LONGEST)]
    for number, count in ((0, 1), (1, 3), (2, 7)):
        text = texts[5][:12].tolist()
        for _ in range(count):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
        requests[number] = Request(np.array(text), len(text) - count)
    return requests


@torch.no_grad()
def by_transformers(model: GPT2LMHeadModel, requests: Sequence[Request]) -> list[Score]:
    """Each request by itself in float64."""
    scores = []
    for request in requests:
        tokens = torch.from_numpy(request.tokens)
        log_p = model(tokens[None, :-1]).logits[0].log_softmax(-1)[request.first - 1 :]
        labels = tokens[request.first :]
        loss = -log_p.gather(1, labels[:, None]).sum().item()
        scores.append(Score(loss, bool((log_p.argmax(-1) == labels).all()), len(labels)))
    return scores


def assert_close(found: Sequence[Score], want: Sequence[Score], rtol: float = 1e-5) -> None:
    assert [(s.is_greedy, s.tokens) for s in found] == [(s.is_greedy, s.tokens) for s in want]
    np.testing.assert_allclose([s.loss for s in found], [s.loss for s in want], rtol=rtol)


def load(run: Path, ctx: ParallelContext = ALONE, *, vp: int = 1, dtype: str = "fp32") -> LoadedModel:
    layout = ParallelConfig(tp=ctx.tp.size, pp=ctx.pp.size, dp=ctx.dp.size, vp=vp)
    return load_trained(open_source(str(run)), layout, PrecisionConfig(dtype=dtype), ctx)  # type: ignore[arg-type]


def scores_on_rank(
    ctx: ParallelContext, run: Path, requests: Sequence[Request], vp: int, batch_size: int
) -> list[Score]:
    return score(load(run, ctx, vp=vp), requests, batch_size=batch_size, ctx=ctx)


def test_scores_are_those_of_transformers(reference: Reference) -> None:
    model, run = reference
    requests = random_requests(model)
    want = by_transformers(model, requests)
    assert 3 <= sum(s.is_greedy for s in want) < len(want)
    assert_close(score(load(run), requests, batch_size=7, ctx=ALONE), want)


@pytest.mark.parametrize(
    "layout, vp, batch_size",
    [({"tp": 2, "dp": 2}, 1, 7), ({"pp": 3}, 1, 7), ({"pp": 2}, 2, 1)],
    ids=str,
)
def test_scores_do_not_depend_on_layout_or_batch(
    reference: Reference, layout: dict[str, int], vp: int, batch_size: int
) -> None:
    model, run = reference
    requests = random_requests(model)
    results = run_on_ranks(scores_on_rank, run, requests, vp, batch_size, **layout)
    assert all(result == results[0] for result in results)
    assert_close(results[0], by_transformers(model, requests))


@pytest.mark.parametrize("dtype, rtol", [("bf16", 2e-2), ("fp64", 1e-12)])
def test_scores_of_other_precisions_are_near(reference: Reference, dtype: str, rtol: float) -> None:
    """bf16: a few of its epsilons of 2^-8, summed over up to 48 tokens of a loss of about 6 each."""
    model, run = reference
    requests = random_requests(model)
    found = score(load(run, dtype=dtype), requests, batch_size=2, ctx=ALONE)
    want = by_transformers(model, requests)
    np.testing.assert_allclose([s.loss for s in found], [s.loss for s in want], rtol=rtol)


def test_only_scored_positions_are_projected(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    real = torch.nn.functional.linear
    trained = load(reference[1])
    table = trained.model.chunks[0].token.weight

    def product(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        if weight.shape == table.shape:
            rows.append(x.shape[0])
        return real(x, weight, *rest)

    monkeypatch.setattr("mlm.parallel.cross_entropy.product", product)
    requests = [Request(np.arange(40), 37), Request(np.arange(5), 1)]
    score(trained, requests, batch_size=4, ctx=ALONE)
    assert sum(rows) == 3 + 4


def test_texts_that_are_read_alike_are_read_once(reference: Reference) -> None:
    """The choices of a task: one context, another last token each."""
    model, run = reference
    context = np.arange(9)
    requests = [Request(np.append(context, choice), 9) for choice in (4, 200, 17)]
    requests.insert(1, Request(np.arange(4), 1))
    assert group_by_input(requests, range(4)) == [[0, 2, 3], [1]]
    batch = pack(requests, [[0, 2, 3], [1]], 0, 1)
    assert batch.tokens.shape == (2, 9)
    assert batch.labels.tolist() == [4, 200, 17, 1, 2, 3]
    found = score(load(run), requests, batch_size=1, ctx=ALONE)
    assert_close(found, by_transformers(model, requests))


def test_the_end_of_a_document_is_a_token_like_any_other(reference: Reference) -> None:
    """Also to a model trained with everything that can restart after it."""
    model, run = reference
    requests = [Request(np.array([7, 0, 9, 11, 0, 3, 0]), 1)]
    trained = load(run)
    trained.model.boundaries = Boundaries(0, True, True, True)
    assert_close(score(trained, requests, batch_size=1, ctx=ALONE), by_transformers(model, requests))


def test_a_loss_that_is_not_finite_names_request_and_checkpoint(reference: Reference) -> None:
    trained = load(reference[1])
    with torch.no_grad():
        trained.model.chunks[0].position.weight[20] = float("nan")
    requests = [Request(np.arange(9), 3), Request(np.arange(30), 3), Request(np.arange(21), 3)]
    with pytest.raises(UserError, match=r"step-00000000: request 1 has the loss nan in float32"):
        score(trained, requests, batch_size=1, ctx=ALONE)


# ----- scores that a stopped run leaves on disk, and the next run reads


@pytest.fixture
def stopped(reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Scores of a run stopped after about half of the requests, one text per micro-batch."""
    monkeypatch.setattr(scoring, "CPU_TOKENS", 1)
    kept, done = tmp_path / "kept.jsonl", list[int]()

    def interrupt(count: int) -> None:
        done.append(count)
        if sum(done) >= 15:
            raise KeyboardInterrupt

    requests, settings = random_requests(reference[0]), {"saved": kept, "identity": "one"}
    with pytest.raises(KeyboardInterrupt):
        score(load(reference[1]), requests, batch_size=1, ctx=ALONE, advance=interrupt, **settings)  # type: ignore[arg-type]
    return kept


def go_on(reference: Reference, kept: Path, **changes: Any) -> list[int]:
    """Score again; what `advance` was told. The scores must be right, and all kept."""
    model, run = reference
    told: list[int] = []
    requests = changes.pop("requests", None) or random_requests(model)
    found = score(
        load(run),
        requests,
        batch_size=1,
        ctx=ALONE,
        saved=kept,
        advance=told.append,
        **({"identity": "one"} | changes),
    )
    assert_close(found, by_transformers(model, requests))
    assert sum(told) == len(requests)
    assert len(kept.read_bytes().splitlines()) == 1 + len(requests)
    return told


def test_a_stopped_run_continues_where_it_was(reference: Reference, stopped: Path) -> None:
    assert go_on(reference, stopped)[0] == 18  # four texts at a time; three requests read the longest
    assert go_on(reference, stopped) == [29]


@pytest.mark.parametrize(
    ("damage", "identity", "scored"),
    [
        (lambda content: content[:-5], "one", 17),  # the torn line again, and all where more is damaged
        (lambda content: content.replace(b"\n", b"\n\xff{\n", 3), "one", 6),
        (lambda content: content.partition(b"\n")[2], "one", 6),  # without its header
        (lambda content: content, "two", 6),
    ],
)
def test_damaged_scores_and_those_of_another_identity_are_computed_again(
    reference: Reference, stopped: Path, damage: Callable[[bytes], bytes], identity: str, scored: int
) -> None:
    stopped.write_bytes(damage(stopped.read_bytes()))
    assert go_on(reference, stopped, identity=identity)[0] == scored


def kept_on_rank(
    ctx: ParallelContext, run: Path, requests: Sequence[Request], kept: Path
) -> tuple[list[Score], list[int]]:
    told: list[int] = []
    settings: dict[str, Any] = {"saved": kept, "identity": "one", "advance": told.append}
    return score(load(run, ctx), requests, batch_size=1, ctx=ctx, **settings), told


@pytest.mark.slow
def test_every_rank_continues_from_what_the_first_one_reads(reference: Reference, stopped: Path) -> None:
    model, run = reference
    requests = random_requests(model)
    results = run_on_ranks(kept_on_rank, run, requests, stopped, tp=2, dp=2)
    assert all(result == results[0] for result in results)
    assert results[0][1][0] == 18
    assert_close(results[0][0], by_transformers(model, requests))
