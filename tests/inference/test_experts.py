"""Texts and scores of a mixture of experts that replicas split (ep=2): those of one process, in float64."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlm.cli.evaluate import zero_shot
from mlm.cli.evaluate.settings import AllDataConfig, EvalAllConfig
from mlm.cli.generate import run as generate
from mlm.cli.generate.settings import GenerateConfig
from mlm.convert.source import open_source
from mlm.inference.config import Sampling
from mlm.inference.generation import continuations
from mlm.inference.trained import load_trained
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext, shape_context
from tests.evaluate.zero_shot.texts import write_lambada, write_wikitext
from tests.finetune.chats import write_llama
from tests.ranks import command, run_on_ranks

FP64 = PrecisionConfig(dtype="fp64")
SPLIT = ParallelConfig(dp=2, ep=2)
SIZES = {"dp": 2, "ep": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("experts")
    write_llama(made / "mixtral", kind="Mixtral")
    write_wikitext(made)
    write_lambada(made)
    return made


def test_texts_are_those_of_one_process(folder: Path) -> None:
    prompts = folder / "prompts.txt"
    prompts.write_text("To be\nA\nThe cat sat on the mat, and\n")
    found = []
    for name, parallel in (("alone", ParallelConfig()), ("split", SPLIT)):
        config = GenerateConfig(
            ckpt=str(folder / "mixtral"),
            prompts=str(prompts),
            out=str(folder / f"{name}.jsonl"),
            max_new_tokens=12,
            batch_size=2,
            stop=("e",),
            precision=FP64,
            parallel=parallel,
        )
        assert generate.preflight(config) == []
        run_on_ranks(command, generate.run, config, **(SIZES if parallel is SPLIT else {}))
        found.append([json.loads(line) for line in Path(folder / f"{name}.jsonl").read_text().splitlines()])
    assert found[0] == found[1]
    assert len({tuple(text["tokens"]) for text in found[0]}) == 3


def read_until_closed(ctx: ParallelContext, folder: Path) -> int:
    """Number of tokens before rank 0's reader leaves, which no other rank sees."""
    trained = load_trained(open_source(str(folder)), ParallelConfig(), FP64, ctx)
    tokens = list[int]()
    options = Sampling(max_new_tokens=20)
    for _, token in continuations(
        trained, [[5, 6]], options, ctx=ctx, should_stop=lambda: ctx.is_main and len(tokens) > 2
    ):
        tokens.append(token or 0)
    return len(tokens)


def test_all_replicas_end_with_the_reader_of_the_first(folder: Path) -> None:
    """One that went on would wait for the others' tokens for ever."""
    assert run_on_ranks(read_until_closed, folder / "mixtral", **SIZES) == [3, 3]


@pytest.mark.slow
def test_scores_are_those_of_one_process(folder: Path) -> None:
    """WikiText-103 and LAMBADA by all protocols; one sequence a micro-batch, so that some ranks have none."""
    found = []
    for name, parallel in (("alone", ParallelConfig()), ("split", SPLIT)):
        config = EvalAllConfig(
            ckpt=str(folder / "mixtral"),
            out=str(folder / f"{name}.json"),
            seq_length=24,
            overlapping_eval=5,
            batch_size=1,
            data=AllDataConfig(
                wikitext103=str(folder / "wiki.test.tokens"), lambada=str(folder / "lambada.jsonl")
            ),
            precision=FP64,
            parallel=parallel,
        )
        assert zero_shot.preflight(config) == []
        if parallel is SPLIT:
            run_on_ranks(command, zero_shot.run, config, **SIZES)
        else:
            zero_shot.run(config, shape_context())
        found.append(metrics(folder / f"{name}.json"))
    assert len(found[0]) > 4
    assert found[1] == pytest.approx(found[0], rel=1e-10)


def metrics(path: Path) -> dict[str, Any]:
    return {
        f"{each['task']} {each['protocol']} {name}": metric["value"]
        for each in json.loads(path.read_text())["results"]
        for name, metric in each["metrics"].items()
    }
