"""Requests of tests, and their scores by `transformers` in float64."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2LMHeadModel

from mlm.convert.source import open_source
from mlm.inference.scoring import Request, Score
from mlm.inference.trained import LoadedModel, load_trained
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from tests.convert.hf_models import MODEL, import_model, make_model

ALONE = ParallelContext()
LONGEST = MODEL.max_positions


Reference = tuple[GPT2LMHeadModel, Path]


def make_reference(folder: Path) -> Reference:
    """A model of `transformers` in float64, and the run directory it is imported to."""
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
