"""Samples at validations: the same in any layout, those of `mlm generate`, and no change of training."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from mlm.cli import main
from mlm.cli.pretrain.samples import PromptSampler
from mlm.data.tokenizer import Tokenizer
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.runs.config import PretrainConfig
from mlm.tracking.reporter import Reporter
from mlm.training.preflight import prompt_problems
from mlm.training.trainer import Trainer
from tests.convert.hf_models import add_tokenizer
from tests.data.corpora import write_corpus
from tests.ranks import run_on_ranks
from tests.slow import slow_but, thinned
from tests.training.records import records
from tests.training.test_trainer import SEQ, VOCAB, config, steps_of

TINY = [
    *("model=gpt2_tiny", "model.vocab_size=512", "model.hidden_dropout=0.1", "model.attention_dropout=0.1"),
    *("data.seq_length=32", "train.steps=4", "train.global_batch_size=4", "train.micro_batch_size=2"),
    *("train.validate_every=2", "train.validate_batches=1", "checkpoint.save_every=2", "schedule=constant"),
    *("schedule.warmup_steps=1", "optimizer.lr=1e-2", "log.every=1", "dist.device=cpu"),
]
SAMPLED = ('train.sample_prompts=["To be","ROMEO:\n"]', "train.sample_tokens=8")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    random = torch.Generator().manual_seed(0)
    for part in ("train", "validation"):
        rows = torch.randint(0, 500, (40, 20), generator=random).tolist()
        write_corpus(folder / part, rows)
    add_tokenizer(folder)
    return folder


def trained(corpus: Path, out: Path, *words: str) -> list[dict[str, Any]]:
    assert main(["pretrain", *TINY, f"data.path={corpus}", f"out={out}", *words]) == 0
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "sampled"
    trained(corpus, out, *SAMPLED)
    return out


def test_samples_are_what_generate_writes_from_the_checkpoint_of_the_step(run: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "To be"}\n{"prompt": "ROMEO:\\n"}\n')
    samples = records(run, "sample")
    assert [(each["step"], each["prompt"]) for each in samples] == [
        (step, prompt) for step in (2, 4) for prompt in ("To be", "ROMEO:\n")
    ]
    for step in (2, 4):
        words = [f"ckpt={run / f'checkpoints/step-{step:08d}'}", f"prompts={tmp_path / 'prompts.jsonl'}"]
        words += [f"out={tmp_path / 'out.jsonl'}", "max_new_tokens=8", "temperature=0", "dist.device=cpu"]
        assert main(["generate", *words]) == 0
        lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert [each["text"] for each in samples if each["step"] == step] == [
            line["continuation"] for line in lines
        ]


def test_losses_are_equal_to_the_bit_with_samples_and_without(
    corpus: Path, run: Path, tmp_path: Path
) -> None:
    trained(corpus, tmp_path / "plain")
    drawn = trained(corpus, tmp_path / "drawn", *SAMPLED, "train.sample_temperature=1")
    assert len({each["text"] for each in drawn if each["kind"] == "sample"}) > 1
    numbers = [
        [(each["step"], each["loss"]) for each in records(out, "step", "validation")]
        for out in (tmp_path / "plain", tmp_path / "drawn", run)
    ]
    assert numbers[0] == numbers[1] == numbers[2]


LAYOUTS = {
    "tp, sequence parallel": ParallelConfig(tp=2, sequence_parallel=True),
    "pp, chunks": ParallelConfig(pp=2, vp=2),
    "cp": ParallelConfig(cp=2),
    "zero=3": ParallelConfig(dp=2, zero=3),
}


def spec_of(parallel: ParallelConfig, **train: Any) -> PretrainConfig:
    """A model that is far from uniform, whose samples outgrow the sequence it reads."""
    spec = config(dropout=0.1)
    return replace(
        spec,
        model=replace(spec.model, num_layers=4, init_std=0.3),
        parallel=parallel,
        train=replace(spec.train, sample_prompts=("To be", "or not to be", "x"), sample_tokens=SEQ, **train),
    )


def sampler_of(trainer: Trainer) -> PromptSampler:
    encode = lambda text: [ord(char) % VOCAB for char in text]  # noqa: E731
    tokenizer = SimpleNamespace(encode_prompt=encode, eod_id=0)
    return PromptSampler(trainer, cast(Reporter, None), cast(Tokenizer, tokenizer))


def drawn_between_steps(ctx: ParallelContext, spec: PretrainConfig) -> list[list[int]]:
    """Tokens drawn between two steps, whose losses are those of steps with nothing in between."""
    trainer: Trainer = Trainer(spec, ctx)
    losses = steps_of(trainer, 1)
    found = sampler_of(trainer).continue_prompts()
    assert [*losses, *steps_of(trainer, 1)] == steps_of(Trainer(spec, ctx), 2)
    return found


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    found = drawn_between_steps(ParallelContext(), spec_of(ParallelConfig()))
    assert len({token for tokens in found for token in tokens}) > 3
    return found


@pytest.mark.parametrize("layout", slow_but({3}, LAYOUTS))
def test_any_layout_draws_the_same_and_trains_as_without(layout: str, alone: list[list[int]]) -> None:
    """Of one process; in float64, and greedily, so that rounding chooses no token."""
    parallel = LAYOUTS[layout]
    sizes = {"tp": parallel.tp, "pp": parallel.pp, "dp": parallel.dp or 1, "cp": parallel.cp}
    found = run_on_ranks(drawn_between_steps, spec_of(parallel), **sizes)
    assert found == [alone] * len(found)


def test_shapes_of_micro_batches_draw_the_same(alone: list[list[int]]) -> None:
    """As where kernels are compiled, which another shape would compile anew."""
    spec = replace(spec_of(ParallelConfig()), compile=True)
    sampler = sampler_of(Trainer(replace(spec, compile=False), ParallelContext()))
    steps_of(sampler.trainer, 1)
    sampler.trainer.config = spec
    assert sampler.shape([[1]]) == (spec.train.micro_batch_size, SEQ)
    assert sampler.continue_prompts() == alone


@pytest.mark.parametrize(
    "words, line",
    thinned(
        [
            (['train.sample_prompts=[""]'], "train.sample_prompts: prompt 1 ()"),
            (['train.sample_prompts=["' + "to be " * 40 + '"]'], "more than data.seq_length=32"),
            (
                ["train.sample_prompts=[a]", "model=bert_tiny"],
                "model.kind=bert does not read from left to right",
            ),
        ],
        3,
    ),
)
def test_prompts_that_cannot_be_continued_are_rejected_in_a_line(
    words: list[str], line: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pretrain", *TINY, f"data.path={corpus}", f"out={tmp_path / 'run'}", *words]) == 2
    out, said = capsys.readouterr()
    assert line in said
    assert "Traceback" not in said
    assert out == ""
    assert not (tmp_path / "run").exists()


def test_tokens_that_the_tokenizer_puts_before_a_prompt_count(tmp_path: Path) -> None:
    """A prompt that fills the sequence would lose its first without a word."""
    add_tokenizer(tmp_path)
    file = str(tmp_path / "tokenizer.json")
    backend = Backend.from_file(file)
    ends = [("<|endoftext|>", backend.token_to_id("<|endoftext|>"))]
    backend.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=ends)
    backend.save(file)
    count = len(backend.encode("to be", add_special_tokens=False).ids)
    spec = spec_of(ParallelConfig())
    spec = replace(spec, train=replace(spec.train, sample_prompts=("to be",)))
    for length, is_long in ((count, True), (count + 1, False)):
        data = replace(spec.data, tokenizer=file, seq_length=length)
        problems = prompt_problems(replace(spec, data=data, model=replace(spec.model, vocab_size=512)))
        assert [f"prompt 1 has {count + 1} tokens" in problem for problem in problems] == [True] * is_long
