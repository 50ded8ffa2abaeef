"""How a run begins: `resume=` continues, `ckpt=` begins anew, and `--check` rejects what a start rejects."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mlm
from mlm.cli import main
from mlm.cli.pretrain.run import settle_cooldown
from mlm.corpus.train_tokenizer import train_bpe
from mlm.parallel.mesh import shape_context
from mlm.training.trainer import Trainer
from tests.checkpoints_on_disk import flip
from tests.convert.dcp.llamas import write_torch_dist
from tests.convert.megatron.written import arguments, gpt2_state, random_gpt2
from tests.data.corpora import write_corpus
from tests.slow import slow
from tests.training.records import losses, records
from tests.training.saving import save
from tests.training.test_trainer import config, steps_of

TINY = """
    model=gpt2_tiny model.vocab_size=400 data.seq_length=32 train.global_batch_size=4 train.micro_batch_size=4
    train.steps=1 train.validate_every=0 schedule=constant optimizer.lr=1e-3 log.every=1
    dist.device=cpu checkpoint.save_every=2 checkpoint.keep_every=2
""".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`a` and `b`, corpora of two tokenizers; `run`, six steps on `a`, and `branch`, its last two again."""
    root = tmp_path_factory.mktemp("begun")
    draw = random.Random(0)
    for name, seed in (("a", 1), ("b", 2)):
        (root / name).mkdir()
        words = [str(random.Random(seed).random()) for _ in range(300)]
        (root / name / "tokenizer.json").write_bytes(train_bpe([" ".join(words)], 300).content)
        write_corpus(root / name / "train", [[draw.randrange(300) for _ in range(80)] for _ in range(20)])
    assert main([*begin(root, "run", "train.steps=6"), f"data.path={root / 'a'}"]) == 0
    return root


def begin(root: Path, out: str, *words: str) -> list[str]:
    return ["pretrain", *TINY, *words, f"out={root / out}"]


@pytest.mark.parametrize("start", ["step", slow("run")])
def test_resume_continues_in_another_folder_bit_for_bit(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], start: str
) -> None:
    run, new = made / "run", tmp_path / "new"
    source, steps = (run, (7, 8)) if start == "run" else (run / "checkpoints/step-00000004", (5, 6))
    command = ["pretrain", f"resume={source}", f"out={new}", f"train.steps={steps[-1]}"]
    assert main(command) == 0
    assert f"resuming from {run}/checkpoints/step-0000000{steps[0] - 1} (step {steps[0] - 1})" in (
        told := capsys.readouterr().out
    )
    assert f"out {run} → {new}" in told
    assert [record["step"] for record in records(new, "step")] == list(steps)
    if start == "step":
        assert losses(new) == losses(run)[4:]
    assert main(command) == 0  # the same command continues what it began
    assert "is done" in capsys.readouterr().out
    assert main(["pretrain", f"resume={new}", f"train.steps={steps[-1] + 1}"]) == 0
    assert f"resuming from {new}" in capsys.readouterr().out


@pytest.mark.parametrize("start", ["ckpt", "resume"])
def test_damage_ends_a_start_with_weights_and_a_run_continues_before_it(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], start: str
) -> None:
    (shard,) = copied(made, tmp_path).glob("checkpoints/step-00000006/rank-*")
    flip(shard, -1)
    data = f"data.path={made / 'a'}"
    if start == "ckpt":
        assert main([*begin(tmp_path, "new", f"ckpt={tmp_path / 'run'}"), data]) == 1
        assert "step-00000006/rank-00000.safetensors: damaged" in capsys.readouterr().err
        assert not [*tmp_path.glob("new/checkpoints/step-*")]
    else:  # the step named alone would end with an error, too
        assert main(["pretrain", f"resume={tmp_path / 'run'}", f"out={tmp_path / 'new'}"]) == 0
        assert losses(tmp_path / "new") == losses(made / "run")[4:]


@pytest.mark.slow
def test_ckpt_of_adapters_begins_with_what_they_make_of_their_base(made: Path, tmp_path: Path) -> None:
    lora = begin(tmp_path, "lora", f"ckpt={made / 'run'}", "lora.rank=2", "train.steps=2", "optimizer.lr=0.1")
    assert main([*lora, f"data.path={made / 'a'}"]) == 0
    frozen = begin(tmp_path, "new", f"ckpt={tmp_path / 'lora'}", "train.steps=1", "optimizer.lr=1e-30")
    assert main([*frozen, f"data.path={made / 'a'}"]) == 0
    ids = torch.arange(20)[None]
    want, got = (mlm.load(str(tmp_path / name)).logits(ids) for name in ("lora", "new"))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert not torch.allclose(want, mlm.load(str(made / "run")).logits(ids), atol=1e-3)


def other_tokens(made: Path, out: Path) -> list[str]:
    return [*begin(out, "new", f"ckpt={made / 'run'}"), f"data.path={made / 'b'}"]


def copied(made: Path, out: Path) -> Path:
    return shutil.copytree(made / "run", out / "run")


def resumed(made: Path, out: Path, *words: str) -> list[str]:
    return ["pretrain", f"resume={copied(made, out)}", "train.steps=7", *words]


def damaged(made: Path, out: Path) -> list[str]:
    words = resumed(made, out)
    for shard in out.glob("run/checkpoints/step-*/*.safetensors"):
        shard.write_bytes(b"short")
    return words


def corpus_replaced(made: Path, out: Path) -> list[str]:
    shutil.copytree(made / "a", out / "corpus")
    assert main([*begin(out, "run", "train.steps=1"), f"data.path={out / 'corpus'}"]) == 0
    write_corpus(out / "corpus/train", [range(300)] * 9)
    return ["pretrain", f"resume={out / 'run'}", "train.steps=2"]


REFUSALS: dict[str, tuple[Callable[[Path, Path], list[str]], str]] = {
    "weights of other tokens": (other_tokens, "build the corpus with it, or set data.change=true"),
    "resumed on other tokens": (
        lambda made, out: resumed(made, out, f"data.path={made / 'b'}"),
        "use corpora of that tokenizer",
    ),
    "another length": (lambda made, out: resumed(made, out, "data.seq_length=16"), "begins it with these"),
    "other corpora": (
        lambda made, out: resumed(made, out, f"data.blend=[{made / 'a'},{made / 'c'}]", "data.path=null"),
        "set data.change=true to continue so",
    ),
    "replaced corpus": (corpus_replaced, "train.idx is not what this run was trained on"),
    "other weights": (
        lambda made, out: resumed(made, out, f"ckpt={made / 'run'}"),
        "has begun without ckpt=, and is at step 6; continue it by resume=",
    ),
    "two runs": (
        lambda made, out: ["pretrain", f"resume={made / 'run'}", f"out={copied(made, out)}"],
        "has begun without resume=",
    ),
    "step in its folder": (
        lambda made, out: ["pretrain", f"resume={copied(made, out)}/checkpoints/step-00000002"],
        "go back by mlm ckpt rollback",
    ),
    "damage": (damaged, "no checkpoint is whole"),
}
"""What a start rejects, and a part of the line."""


@pytest.mark.parametrize(
    "case", [slow(case) if case in ("replaced corpus", "damage") else case for case in REFUSALS]
)
def test_check_says_what_the_start_says(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    """In one line, with the same exit code; nothing is written."""
    shutil.copytree(made / "a", made / "c", dirs_exist_ok=True)
    write_corpus(made / "c/train", [range(300)] * 30)
    words, part = REFUSALS[case][0](made, tmp_path), REFUSALS[case][1]
    capsys.readouterr()
    before, said = sorted(tmp_path.rglob("*")), []
    for flags in (["--check"], []):
        said.append((main([*words, *flags]), capsys.readouterr().err))
        assert sorted(tmp_path.rglob("*")) == before
    assert said[0] == said[1]
    code, told = said[0]
    assert code == (1 if case == "damage" else 2)
    (line,) = [line for line in told.splitlines() if "mlm pretrain: model of ckpt=" not in line]
    assert part in line


@pytest.mark.slow
def test_other_tokens_may_be_wanted(made: Path, tmp_path: Path) -> None:
    words = [*other_tokens(made, tmp_path), "data.change=true", "train.steps=1"]
    assert main(words) == 0
    saved = (tmp_path / "new/tokenizer.json").read_bytes()
    assert saved == (made / "b/tokenizer.json").read_bytes()
    assert main(["pretrain", f"resume={tmp_path / 'new'}", "train.steps=2"]) == 0


def test_more_steps_of_a_decayed_schedule_keep_its_last_rate_or_begin_no_rise(
    made: Path, tmp_path: Path
) -> None:
    data = f"data.path={made / 'a'}"
    assert main([*begin(tmp_path, "run", "schedule=cosine", "train.steps=4"), data]) == 0
    assert main(["pretrain", f"resume={tmp_path / 'run'}", "train.steps=8", "schedule.decay_steps=4"]) == 0
    assert [record["lr"] for record in records(tmp_path / "run", "step")][4:] == [1e-5] * 4
    wsd = [*begin(tmp_path, "wsd", "schedule=wsd", "schedule.cooldown_share=0.5", "train.steps=4"), data]
    assert main(wsd) == 0
    step = tmp_path / "wsd/checkpoints/step-00000002"
    assert main(["pretrain", f"resume={step}", f"out={tmp_path / 'more'}", "train.steps=6"]) == 0
    rates = [record["lr"] for record in records(tmp_path / "more", "step")]
    assert rates[0] == 1e-3
    assert rates == sorted(rates, reverse=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stable")
    trainer = Trainer(config(), shape_context())
    steps_of(trainer, 3)
    save(trainer, out)
    return out


def settled(out: Path, typed: set[str], *, from_run: Path | None = None, cooldown: int | None = 5) -> int:
    values: dict[str, Any] = {"schedule": {"cooldown": cooldown}, "train": {"steps": 100}, "out": str(out)}
    values["checkpoint"] = {"from_run": from_run and str(from_run)}
    settle_cooldown(values, typed)
    steps: int = values["train"]["steps"]
    return steps


def test_cooldown_begins_at_the_newest_checkpoint_and_under_way_ends_where_it_would(
    run: Path, tmp_path: Path
) -> None:
    assert settled(run, {"schedule.cooldown"}) == 8
    assert settled(tmp_path, {"schedule.cooldown"}, from_run=run) == 8
    assert settled(run, {"schedule.cooldown", "train.steps"}) == 100
    assert settled(run, {"schedule.cooldown"}, cooldown=0) == 100
    assert settled(tmp_path, {"schedule.cooldown"}) == 100  # a run from the start
    for steps, expected in ((6, 6), (8, 8), (3, 3), (100, 8)):
        (run / "config.yaml").write_text(f"schedule: {{cooldown: 5}}\ntrain: {{steps: {steps}}}\n")
        assert settled(run, {"schedule.cooldown"}) == expected
    (run / "config.yaml").unlink()


@pytest.mark.parametrize("command", ["pretrain data=synthetic", "generate"])
def test_checkpoint_of_megatron_is_imported_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    write_torch_dist(tmp_path / "theirs", gpt2_state(random_gpt2()), arguments())
    assert main([*command.split(), f"ckpt={tmp_path / 'theirs'}", "dist.device=cpu"]) == 2
    said = f"ckpt={tmp_path / 'theirs'}: a Megatron-LM checkpoint; run `mlm convert {tmp_path / 'theirs'} "
    assert said in capsys.readouterr().err
