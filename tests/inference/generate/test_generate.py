"""`mlm generate`: sources of prompts, output, and rejected settings."""

import errno
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from mlm.cli.entry import main
from mlm.cli.generate.prompts import Prompt
from mlm.cli.generate.run import TextStream, collect_tokens
from mlm.data.tokenizer import Tokenizer
from mlm.util.terminal import safe_text
from tests.convert.hf_models import SHAPE, add_tokenizer, import_model, make_model

COMMAND = ("generate", "dist.threads_per_rank=1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, initializer_range=0.3)
    add_tokenizer(folder)
    return folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def generated(model: Path, *settings: str) -> list[dict[str, Any]]:
    words = [*COMMAND, f"ckpt={model}", "out=out.jsonl", "max_new_tokens=6", "min_new_tokens=6", *settings]
    assert main(words) == 0
    return [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]


def rejected(capsys: pytest.CaptureFixture[str], model: Path, *settings: str, code: int = 2) -> str:
    """Message of a rejected command; nothing else may be on the terminal."""
    assert main([*COMMAND, f"ckpt={model}", *settings]) == code
    out, said = capsys.readouterr()
    assert (out, "Traceback" in said) == ("", False)
    return said


def give_stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))


@pytest.mark.parametrize("settings", [["prompt='a\nb'"], ["prompt=a", "num_samples=40", "batch_size=1"]])
def test_a_reader_that_left_ends_the_command(
    model: Path, settings: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a line, as `head -1` does."""

    def write(text: str) -> int:
        if "\n" in out.getvalue():
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        return io.StringIO.write(out, text)

    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr(out, "write", write)
    assert main([*COMMAND, f"ckpt={model}", "min_new_tokens=100", "max_new_tokens=100", *settings]) == 0
    said = re.search(r"([\d,]+) tokens in", capsys.readouterr().err)
    assert said is not None
    assert int(said[1].replace(",", "")) <= 100 * (len(settings) > 1) + 1


@pytest.mark.slow
def test_a_warning_of_the_checks_is_not_repeated_by_the_run_or_by_ranks(model: Path, tmp_path: Path) -> None:
    import_model(model, tmp_path / "run", verify=False)
    (tmp_path / "run/checkpoints/latest").write_text("step-00000007")
    words = [*COMMAND, f"ckpt={tmp_path / 'run'}", "prompt=a", "max_new_tokens=1", "tp=2"]
    command = [sys.executable, "-m", "mlm", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.count("latest names step-00000007, which is gone") == 1


def test_prompts_come_from_lines_of_a_file_jsonl_or_standard_input(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blank lines are none, and standard input is one without its last line end."""
    Path("p.txt").write_text("To be\n\n  \nor not\r\n")
    Path("p.jsonl").write_text('{"prompt": "To\\nbe", "text": "no"}\n{"text": "naïve"}\n')
    give_stdin(monkeypatch, b"To be,\nor not\n")
    for setting, prompts in (
        ("prompts=p.txt", ["To be", "or not"]),
        ("prompts=p.jsonl", ["To\nbe", "naïve"]),
        ("prompt=-", ["To be,\nor not"]),
    ):
        assert [said["prompt"] for said in generated(model, setting)] == prompts


@pytest.mark.parametrize("settings", [["prompt=''"], ["prompts=empty.jsonl"]])
def test_an_empty_prompt_begins_a_document(model: Path, settings: list[str]) -> None:
    """The model reads the end-of-document token, which is not part of the text."""
    Path("empty.jsonl").write_text('{"prompt": ""}\n')
    (said,) = generated(model, *settings)
    (after_eod,) = generated(model, "prompt=<|endoftext|>", "special_tokens=true")
    assert said["prompt"] == ""
    assert said["tokens"] == after_eod["tokens"] != generated(model, "prompt=<|endoftext|>")[0]["tokens"]


def test_empty_standard_input_is_rejected(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    give_stdin(monkeypatch, b"\n")
    assert "standard input is empty" in rejected(capsys, model, "prompt=-")
    monkeypatch.setattr("sys.stdin", None)  # closed by `<&-`
    assert "standard input is empty" in rejected(capsys, model, "prompt=-")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("p.jsonl", b'{"prompt": "\\ud800"}', "half a surrogate pair"),
        ("p.txt", b"a\n\xff", "is not UTF-8"),
        ("p.jsonl", b'{"text": "a"}\n[', "p.jsonl:2: not a line of JSON"),
    ],
)
def test_a_file_without_prompts_is_rejected(
    model: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, problem: str
) -> None:
    Path(name).write_bytes(content)
    assert problem in rejected(capsys, model, f"prompts={name}")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["prompt=a", "stop=['']"], 'stop="" would end'),
        (["prompt=a", "min_new_tokens=9", "max_new_tokens=3"], "use min_new_tokens=3 or fewer"),
        (["prompt=a", "tokenizer=none.json"], "tokenizer=none.json: no such file"),
    ],
)
def test_mistakes_in_settings_are_one_line(
    model: Path, capsys: pytest.CaptureFixture[str], settings: list[str], problem: str
) -> None:
    assert problem in rejected(capsys, model, *settings)


def test_samples_of_a_prompt_differ_and_do_not_depend_on_how_many_are_asked_for(model: Path) -> None:
    Path("p.txt").write_text("To be\nor not\n")
    few = generated(model, "prompts=p.txt", "num_samples=2")
    many = generated(model, "prompts=p.txt", "num_samples=3", "batch_size=2")
    assert [(said["prompt"], said["sample"]) for said in few] == [
        (prompt, sample) for prompt in ("To be", "or not") for sample in (0, 1)
    ]
    assert [said for said in many if said["sample"] < 2] == few
    assert len({tuple(said["tokens"]) for said in many}) == 6


def test_texts_are_printed_in_order_the_first_as_its_tokens_come(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = Tokenizer.load(model)
    ids = {text: tokenizer.encode(text)[0] for text in "abc"}
    texts = [(Prompt(f"prompt {n}", "b", (ids["b"],)), 0) for n in range(3)]
    heard = []

    def chosen() -> Iterator[tuple[int, int | None]]:
        for index, text in [(1, "a"), (1, None), (0, "c"), (2, None), (0, "a"), (0, None)]:
            yield index, None if text is None else ids[text]
            heard.append(capsys.readouterr().out)

    collect_tokens(chosen(), texts, tokenizer, shown=True, advance=lambda _: None)
    heads = [f"--- prompt {n}, sample 1\n" for n in range(3)]
    assert heard[:5] == [f"{heads[0]}b", "", "c", "", "a"]
    assert heard[5] == f"\n\n{heads[1]}ba\n\n{heads[2]}b\n"


def test_a_prompt_longer_than_the_model_reads_is_cut_and_reported(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generated(model, f"prompt='{'to be ' * SHAPE['n_positions']}'")
    assert f"the last {SHAPE['n_positions']} are read" in capsys.readouterr().err


def test_a_continuation_is_cut_before_the_first_stop(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["max_new_tokens=30", "min_new_tokens=30"]
    (whole,) = generated(model, "prompt='To be'", *more)
    stop = re.findall(r"[A-Za-z]{2}", whole["continuation"])[1]
    Path("p.jsonl").write_text(json.dumps({"text": "To be"}))
    settings = ["prompts=p.jsonl", f"stop={json.dumps(['nowhere', stop])}", *more]
    (cut,) = generated(model, *settings)
    assert cut["continuation"] == whole["continuation"].split(stop)[0]
    assert cut["stop"] == "stop"
    assert cut["tokens"] == whole["tokens"][: len(cut["tokens"])] != whole["tokens"]
    capsys.readouterr()
    assert main([*COMMAND, f"ckpt={model}", *settings]) == 0
    assert capsys.readouterr().out == "To be" + cut["continuation"] + "\n"


def test_nothing_is_printed_that_becomes_a_stop(capsys: pytest.CaptureFixture[str]) -> None:
    letters = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))
    stream = TextStream(letters, [ord("b"), ord("c")], ["bcd"])  # type: ignore[arg-type]
    said, new = [], [ord(letter) for letter in "dbcabcd"]
    for count in range(1, 8):
        stream.print(new[:count])
        said.append(capsys.readouterr().out)
    stream.print(new, is_whole=True)
    assert said == ["bcd", "", "", "bca", "", "", ""]
    assert capsys.readouterr().out == "\n"


def test_a_repetition_penalty_is_that_of_transformers(model: Path) -> None:
    """Greedy, 20 tokens: prompt and continuation count, logits below 0 are multiplied."""
    ids = Tokenizer.load(model).encode("To be")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(model).generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids)),
        do_sample=False,
        max_new_tokens=20,
        min_new_tokens=20,
        repetition_penalty=1.7,
        pad_token_id=0,
    )[0, len(ids) :]
    more = ["prompt='To be'", "temperature=0", "max_new_tokens=20", "min_new_tokens=20"]
    (ours,) = generated(model, *more, "repetition_penalty=1.7")
    assert ours["tokens"] == theirs.tolist() != generated(model, *more)[0]["tokens"]


def test_what_could_steer_a_terminal_is_not_printed_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a\x1b[2Jb\n\té\x9b"
    assert safe_text(text) == text  # a file or a pipe gets what the model said
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: True))
    assert safe_text(text) == "a\ufffd[2Jb\n\té\ufffd"


def test_a_character_split_over_tokens_is_printed_once_it_is_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts = {(): "", (0,): "a", (0, 1): "a\ufffd", (0, 1, 2): "aé"}
    stream = TextStream(SimpleNamespace(decode=lambda ids: parts[tuple(ids)]), ())  # type: ignore[arg-type]
    said = []
    for count in (1, 2, 3):
        stream.print(range(count))
        said.append(capsys.readouterr().out)
    assert said == ["a", "", "é"]
