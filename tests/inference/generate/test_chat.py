"""`mlm generate chat=true`: answers of a model, equal to those of `transformers`."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from mlm.cli.entry import main
from mlm.cli.generate.run import run
from mlm.cli.generate.settings import GenerateConfig
from mlm.data.chat_files import find_chat_template
from mlm.data.chat_tokens import end_of_turn_tokens
from mlm.data.tokenizer import Tokenizer
from mlm.parallel.config import ParallelConfig
from tests.data.chats import TALK, TEMPLATES, theirs, write_tokenizer
from tests.finetune.chats import write_llama
from tests.ranks import command, run_on_ranks

COMMAND = ("generate", "dist.threads_per_rank=1", "chat=true", "temperature=0", "max_new_tokens=8")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("chat") / "llama")


def answers(llama: Path, *settings: str) -> list[dict[str, Any]]:
    assert main([*COMMAND, f"ckpt={llama}", "out=out.jsonl", *settings]) == 0
    return [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]


def their_answer(llama: Path, messages: list[dict[str, str]]) -> list[int]:
    tokenizer, model = theirs(llama), transformers.AutoModelForCausalLM.from_pretrained(llama)
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    ids = asked["input_ids"]
    ends = [tokenizer.convert_tokens_to_ids(name) for name in ("<|im_end|>", "<|endoftext|>")]
    found = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=ends, pad_token_id=ends[1])
    return [id for id in found[0, ids.shape[1] :].tolist() if id not in ends]


def test_answers_equal_those_of_transformers(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    question, system = {"role": "user", "content": "sat?"}, {"role": "system", "content": "a cat"}
    said = [{"from": "human", "value": "sat?"}]
    alpaca = {"instruction": "sat?", "input": "", "output": "a dog"}
    Path("talks.json").write_text(
        json.dumps([{"messages": TALK[:3]}, {"prompt": "sat?"}, {"conversations": said}, alpaca])
    )
    several = [each["tokens"] for each in answers(llama, "prompts=talks.json")]
    assert several == [their_answer(llama, TALK[:3]), *3 * [their_answer(llama, [question])]]
    (one,) = answers(llama, "prompt=sat?", "system=a cat")
    assert one["prompt"] == "sat?"
    assert one["tokens"] == their_answer(llama, [system, question])
    capsys.readouterr()
    assert main([*COMMAND, f"ckpt={llama}", "prompt=sat?"]) == 0
    assert capsys.readouterr().out == Tokenizer.load(llama).decode(several[1]) + "\n"  # the answer alone


def test_message_comes_from_standard_input(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"sat?\n")))
    (one,) = answers(llama, "prompt=-")
    assert one["tokens"] == their_answer(llama, [{"role": "user", "content": "sat?"}])
    capsys.readouterr()
    assert main([*COMMAND, f"ckpt={llama}", "prompt=-"]) == 2  # which has ended
    assert capsys.readouterr().err.startswith("mlm generate: standard input is empty: ")


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}], ids=str)
def test_answers_do_not_depend_on_the_layout(llama: Path, tmp_path: Path, sizes: dict[str, int]) -> None:
    talk = [{"role": "system", "content": "a cat"}, *TALK[:3]]
    prompts, out = tmp_path / "talks.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(json.dumps({"messages": talk}) + "\n")
    files = {"ckpt": str(llama), "prompts": str(prompts), "out": str(out)}
    settings: dict[str, Any] = {"chat": True, "temperature": 0, "max_new_tokens": 8}
    config = GenerateConfig(**files, **settings, parallel=ParallelConfig(**sizes))
    run_on_ranks(command, run, config, **sizes)
    assert json.loads(out.read_text())["tokens"] == their_answer(llama, talk)


@pytest.mark.slow
def test_ctrl_c_ends_an_answer_with_130_and_no_word(llama: Path) -> None:
    words = ["chat=true", "prompt=sat?", "max_new_tokens=1000000", "min_new_tokens=1000000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mlm", "generate", f"ckpt={llama}", *words, "dist.device=cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    assert process.stdout is not None
    begun = process.stdout.read(1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the process of the template gets it too
    rest, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, b"")
    assert (begun + rest).isascii()


@pytest.mark.parametrize(
    "settings, problem",
    [
        (["chat=true"], "chat=true: no message to answer"),
        (["system=be brief", "prompt=a"], "system=be brief: has no effect with chat=false"),
        (["chat=true", "prompts=bad.jsonl"], "bad.jsonl:1: message 1: role='bot' is unknown"),
        (["chat=true", "prompts=empty.jsonl"], 'empty.jsonl:1: holds no prompt: write {"messages": […]} or'),
    ],
)
def test_what_cannot_be_answered_is_an_error(
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    settings: list[str],
    problem: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"messages": [{"role": "bot", "content": "a"}]}\n')
    Path("empty.jsonl").write_text("{}\n")
    assert main(["generate", f"ckpt={llama}", *settings]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line


@pytest.mark.parametrize("style", TEMPLATES)
def test_turn_ends_with_the_template_s_token_and_the_document_s(tmp_path: Path, style: str) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, style))
    template = find_chat_template(tmp_path, tokenizer)
    assert template is not None
    closing = {"llama3": "<|eot_id|>", "qwen2": "<|im_end|>"}.get(style, "</s>")
    names = {tokenizer.name_of(id) for id in end_of_turn_tokens(template, tokenizer)}
    assert names == {closing, tokenizer.name_of(tokenizer.eod_id)}
