"""Runs of the examples as their docstrings document them."""

import io
import json
import runpy
import shlex
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import mlm
from mlm.cli import main
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.training.observer import Observers
from mlm.training.trainer import Trainer
from tests.convert.hf_models import TEXT, add_tokenizer, import_model, make_model
from tests.pages import blocks
from tests.ranks import run_on_ranks
from tests.training.records import records
from tests.training.test_gradient_sums import SPEC, batches

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "scripts/examples"


def run_example(name: str, *arguments: object) -> str:
    """Return the output of an example, run in this process: its top level, then its `main`."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out:
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        names = runpy.run_path(str(EXAMPLES / name))
        if "main" in names:
            names["main"](*arguments)
    return out.getvalue()


def run_on_rank(_: ParallelContext, name: str, *arguments: object) -> str:
    return run_example(name, *arguments)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random GPT-2 with a tokenizer, as a run directory."""
    folder = tmp_path_factory.mktemp("examples")
    make_model(folder / "source")
    add_tokenizer(folder / "source")
    return import_model(folder / "source", folder / "run", verify=False)


def test_tensor_parallel_mlp_equals_the_dense_one() -> None:
    """The example asserts equality itself."""
    found = run_on_ranks(run_on_rank, "tensor_parallel_mlp.py", tp=2)
    assert found == ["tp=2: output and gradients equal the dense MLP's\n", ""]


def test_toy_pipeline_equals_one_process() -> None:
    silent, printed = run_on_ranks(run_on_rank, "toy_pipeline.py", pp=2)
    assert (silent, "as in one process; bubble 0.25" in printed) == ("", True)


@pytest.mark.slow
def test_training_loop_learns_alike_at_every_layout(tmp_path: Path) -> None:
    """At cp=2 dp=2."""
    (tmp_path / "text").write_text(TEXT * 20)
    path = str(tmp_path / "text")
    printed = run_example("training_loop.py", path)
    losses = [float(line.split()[-1]) for line in printed.splitlines()]
    assert len(losses) == 3
    assert losses[-1] < losses[0] / 2
    split = run_on_ranks(run_on_rank, "training_loop.py", path, 1, 2, cp=2, dp=2)[0]
    # Adam's first steps are sign-like, so float32 rounding in another order shows
    assert [float(line.split()[-1]) for line in split.splitlines()] == pytest.approx(losses, rel=0.02)


@pytest.mark.slow
def test_own_optimizer_and_decay_train_alike_at_tp_1_and_tp_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the command in the docstring of own_optimizer.py, shortened."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    command = (EXAMPLES / "own_optimizer.py").read_text().split("mlm pretrain ")[1].partition("\n\n")[0]
    own = command.replace("scripts/examples/configs", str(EXAMPLES / "configs")).replace("\\\\", "").split()
    short = ["train.global_batch_size=2", "train.micro_batch_size=2", "train.steps=4", "log.every=1"]
    short += ["model.vocab_size=256", "data.seq_length=32"]
    for tp in ("tp=1", "tp=2"):
        words = [*own[:-1], tp, *short, "train.validate_every=0", "dist.device=cpu", f"out={tmp_path / tp}"]
        assert main(["pretrain", *words]) == 0
    steps = [records(tmp_path / tp, "step") for tp in ("tp=1", "tp=2")]
    assert [step["lr"] for step in steps[0]] == pytest.approx([5e-5, 5e-5, *2 * [0.25 / 0.3 * 5e-5]])
    # sums over tp are of two parts in another order, and Lion's step is a sign
    assert [s["loss"] for s in steps[1]] == pytest.approx([s["loss"] for s in steps[0]], rel=1e-4)


def notes_of_the_guide(ctx: ParallelContext, layout: ParallelConfig) -> list[str]:
    """What the observer in guides/observers.md shows on this rank in a tenth step."""
    guide = (ROOT / "scripts/docs/pages/guides/observers.md").read_text()
    names: dict[str, Any] = {}
    exec(guide.partition("```python\n")[2].partition("```")[0], names)
    trainer = Trainer[Any](replace(SPEC, parallel=layout), ctx)
    trainer.step, observer, notes = 9, names["GradNorm"](), []
    observer.on_run_start(trainer, SimpleNamespace(note=notes.append))
    trainer.observers = Observers([observer])
    trainer.train_step(batches(ctx.dp.rank, ctx.dp.size))
    return notes


@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_the_guides_observer_shows_one_norm_at_every_layout(layout: dict[str, int]) -> None:
    """On every rank, that of one process."""
    ((note,),) = run_on_ranks(notes_of_the_guide, ParallelConfig())
    assert note.startswith("step 10: gradient norm ")
    sizes = {key: size for key, size in layout.items() if key != "zero"}
    assert run_on_ranks(notes_of_the_guide, ParallelConfig(**layout), **sizes) == [[note]] * 2  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_notebook_leads_from_a_base_to_merged_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cells in order, with two steps of pretraining of a small model."""
    monkeypatch.chdir(tmp_path)
    cells = json.loads((EXAMPLES / "laptop_chat.ipynb").read_text())["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert "STEPS = 300" in source
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", ()) for output in outputs)
    assert "tp=2 × pp=1" in "".join(line for output in outputs for line in output.get("text", ()))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    source = source.replace("STEPS = 300", "STEPS = 2").replace("range(20)", "range(14)")
    source = source.replace("model.vocab_size=400", " ".join(TINY["pretrain"][:5]))
    source = source.replace(
        'subprocess.run([sys.executable, "-m", "mlm", *command.split()], check=True)', RUN
    )
    assert "subprocess.run" not in source
    exec(source, {"main": main})
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    assert (tmp_path / "adapters" / "adapter_model.safetensors").is_file()


RUN = "assert main(command.split()) == 0"
"""In place of a process for each command of the notebook."""
TINY = {
    "data tokenizer": ["vocab_size=400"],
    "pretrain": [
        *("model.vocab_size=400", "model.num_layers=2", "model.hidden_size=32", "model.num_heads=4"),
        *("model.ffn_hidden_size=64", "data.seq_length=64", "train.steps=3", "train.validate_batches=2"),
    ],
    "finetune chat": ["train.epochs=1", "train.global_batch_size=8"],
    "finetune preferences": ["train.global_batch_size=8"],
    "generate": ["max_new_tokens=8"],
}
"""What makes the commands of the tutorial small."""


@pytest.mark.slow
def test_commands_of_the_chat_tutorial_run_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To what other libraries load: merged weights, adapters on their base, and a file of llama.cpp."""
    gguf, peft = pytest.importorskip("gguf"), pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    words = ["king", "queen", "sword", "crown", "night", "day", "heart", "storm"]
    Path("book.txt").write_text("\n\n".join(f"The {a} and the {b}. " * 9 for a in words for b in words))
    with open("conversations.jsonl", "w") as chats, open("pairs.jsonl", "w") as pairs:
        for a in words:
            answers = [{"role": "assistant", "content": text} for text in (f"The {a}.", "Nobody.")]
            question = {"role": "user", "content": f"Who has the {a}?"}
            chats.write(json.dumps({"messages": [question, answers[0]]}) + "\n")
            row = {"prompt": [question], "chosen": answers[:1], "rejected": answers[1:]}
            pairs.write(json.dumps(row) + "\n")
    page = "scripts/docs/pages/tutorials/laptop-chat.md"
    commands = [line for block in blocks((ROOT / page).read_text(), page) for line in block.commands]
    assert len(commands) == 11
    monkeypatch.setattr("sys.stdin", io.StringIO("Who are you?\n"))  # of mlm chat
    for line in commands:
        _, *typed = shlex.split(line, comments=True)
        small = [word for name in TINY if " ".join(typed).startswith(f"{name} ") for word in TINY[name]]
        assert main([*typed, *small]) == 0, line
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained("merged").eval()(tokens).logits
        base = AutoModelForCausalLM.from_pretrained("base")
        adapted = peft.PeftModel.from_pretrained(base, "adapters").eval()(tokens).logits
    torch.testing.assert_close(adapted, whole, rtol=0, atol=1e-5)
    torch.testing.assert_close(mlm.load("runs/preferred").logits(tokens), whole, rtol=0, atol=1e-5)
    assert {x.name for x in gguf.GGUFReader("model.gguf").tensors} >= {"token_embd.weight"}


def test_load_and_score_prints_texts_and_scores(run: Path) -> None:
    printed = run_example("load_and_score.py", run)
    assert printed.startswith(f"Model({run}/checkpoints/step-00000000, gpt2, ")
    assert printed.count("follows with probability") == 3
    assert printed.splitlines()[-1].endswith("be not To or be, to")


def test_export_loads_in_transformers(run: Path, tmp_path: Path) -> None:
    assert "largest difference of a logit" in run_example("export_to_transformers.py", run, tmp_path / "hf")
