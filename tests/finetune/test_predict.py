"""`Model.predict`: the answers of `mlm eval TASK`, and of `transformers` after an export, at any layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

import mlm
from mlm.cli.entry import main
from mlm.parallel.mesh import ParallelContext
from tests.finetune.runs import evaluation, finetune, finetuning, json_lines, read, score
from tests.ranks import run_on_ranks
from tests.slow import slow

KINDS = ("classification", "span")
PAIRS = [("A cat sat .", "The cat was not far ."), ("who", "moon river . near the old tree"), ("", "a")]


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    """A finetuned run of each kind, `out-KIND`; that of labels with its best step before the last."""
    for kind in KINDS:
        train = {"validate_every": 1} if kind == "classification" else {"epochs": 1}
        finetune(finetuning(folder, kind, out=str(folder / f"out-{kind}"), train=train))
    gpt2, out = str(folder / "gpt2"), str(folder / "out-gpt2")
    finetune(finetuning(folder, out=out, ckpt=gpt2, train={"epochs": 1}))
    return folder


def evaluated(folder: Path, kind: str, out: Path) -> list[Any]:
    files = {"out": str(out / "e.json"), "predictions": str(out / "predictions")}
    score(evaluation(folder, kind, ckpt=str(folder / f"out-{kind}"), **files))
    if kind == "span":
        return list(read(out / "predictions/validation.json").values())
    lines = (out / "predictions/validation.tsv").read_text().splitlines()[1:]
    return [line.split("\t")[1] for line in lines]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_the_command(folder: Path, tmp_path: Path, kind: str) -> None:
    want = evaluated(folder, kind, tmp_path)
    rows = json_lines(folder / kind / "validation.jsonl")
    found = mlm.load(folder / f"out-{kind}", precision="fp64", device="cpu").predict(rows)
    if kind == "span":
        assert found == want
    else:
        assert [each["label"] for each in found] == want
        assert all(each["label"] == max(p := each["probabilities"], key=p.get) for each in found)


@pytest.mark.parametrize("run", ["out-classification", "out-gpt2"])
def test_answers_are_those_of_transformers_after_an_export(folder: Path, tmp_path: Path, run: str) -> None:
    mlm.export_hf(folder / run, tmp_path / "hf")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(tmp_path / "hf")
    found = mlm.load(folder / run, device="cpu").predict(PAIRS)
    for (first, second), answer in zip(PAIRS, found, strict=True):
        inputs = tokenizer(first, second, return_tensors="pt")
        with torch.no_grad():
            (shares,) = theirs(**inputs).logits.softmax(-1).tolist()
        names = [theirs.config.id2label[n] for n in range(3)]
        assert names == ["no", "yes", "maybe"]
        assert answer["probabilities"] == pytest.approx(dict(zip(names, shares, strict=True)), rel=1e-4)
    if run == "out-gpt2":
        return
    # the export and its import know the labels too
    mlm.import_hf(tmp_path / "hf", tmp_path / "run")
    for path in (tmp_path / "hf", tmp_path / "run"):
        for again, answer in zip(mlm.load(path, device="cpu").predict(PAIRS), found, strict=True):
            assert again["label"] == answer["label"]
            assert again["probabilities"] == pytest.approx(answer["probabilities"], rel=1e-5)


def predicted(ctx: ParallelContext, run: Path, rows: list[Any]) -> list[Any]:
    found: list[Any] = mlm.load(run, ctx=ctx, precision="fp64").predict(rows, batch_size=2)
    return found


def test_answers_are_equal_on_every_rank(folder: Path) -> None:
    run, rows = folder / "out-classification", [*PAIRS, PAIRS[1]]
    want = mlm.load(run, precision="fp64", device="cpu").predict(rows)
    for found in run_on_ranks(predicted, run, rows, tp=2, dp=2):
        for mine, one in zip(found, want, strict=True):
            assert mine["label"] == one["label"]
            assert mine["probabilities"] == pytest.approx(one["probabilities"], rel=1e-12)


def test_one_text_has_one_answer_and_none_has_none(folder: Path) -> None:
    model = mlm.load(folder / "out-classification", device="cpu")
    (want,) = model.predict(PAIRS[:1])
    assert model.predict(PAIRS[0]) == want
    assert model.predict({"first": PAIRS[0][0], "second": PAIRS[0][1]}) == want
    assert model.predict([]) == []


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        ("a cat", r"texts\[0\]: 1 of the task's columns; give a tuple or a dict of first, second"),
        ([("a", "b"), {"first": "a"}], r"texts\[1\]: no column 'second' \(those there: first\)"),
        ([("a", 7)], r"texts\[0\]: 'second' holds an integer, not a text"),
    ],
)
def test_a_row_of_other_columns_is_named(folder: Path, texts: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        mlm.load(folder / "out-classification", device="cpu").predict(texts)
    assert "\n" not in str(caught.value)


def test_an_export_has_a_model_card_of_what_is_known(folder: Path, tmp_path: Path) -> None:
    run = folder / "out-classification"
    mlm.export_hf(run, tmp_path / "hf", verify=False)
    card = ModelCard.load(tmp_path / "hf/README.md")
    result = read(run / "result.json")
    score = result["scores"]["validation"]["accuracy"]
    metadata = card.data.to_dict()
    (scored,) = metadata.pop("model-index")[0]["results"]
    assert metadata == {"library_name": "transformers", "tags": ["bert"]}
    assert scored["task"] == {"type": "text-classification"}
    assert scored["metrics"] == [{"type": "accuracy", "value": score, "name": "validation.accuracy"}]
    for row in (
        "| base model | tiny |",
        "| finetuned on | mine |",
        f"| step | {result['best_step']} |",
        "| peak learning rate | 0.001 |",
        f"| validation, accuracy | {score:.4f} |",
    ):
        assert row in card.text.splitlines()


@pytest.fixture(scope="module")
def paths(folder: Path) -> tuple[Path, Path, Path]:
    run = folder / "out-classification"
    (best,), (last,) = ((run / name).glob("step-*") for name in ("best/checkpoints", "checkpoints"))
    assert best.name < last.name
    return run, best, last


def test_a_run_is_its_best_checkpoint_to_load(paths: tuple[Path, Path, Path]) -> None:
    run, best, last = paths
    assert mlm.load(run, device="cpu").path == best
    assert mlm.load(last, device="cpu").path == last
    ours, theirs = (mlm.load(path, device="cpu").predict(PAIRS) for path in (run, last))
    assert ours != theirs


@pytest.mark.parametrize("command", ["reshard", slow("export hf")])
def test_a_run_is_its_best_checkpoint_to_each_command_which_says_so(
    paths: tuple[Path, Path, Path], tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, best, last = paths
    note = f"note: {run} keeps its best checkpoint, which is taken: {best}; name a step-… for another"
    for path, is_best in ((run, True), (last, False)):
        out = tmp_path / path.name
        words = [*command.split(), f"ckpt={path}", f"out={out}"]
        assert main([*words, "verify=false"] if command == "export hf" else words) == 0
        printed = "".join(capsys.readouterr().out.split())
        assert (note.replace(" ", "") in printed) == is_best
    if command == "reshard":
        assert [p.name for p in (tmp_path / run.name / "checkpoints").glob("step-*")] == [best.name]
    if command == "export hf":
        found, want = (mlm.load(path, device="cpu").predict(PAIRS) for path in (tmp_path / run.name, run))
        assert found[0]["probabilities"] == pytest.approx(want[0]["probabilities"], rel=1e-5)
