"""`mlm chat` on a pipe and on a terminal: answers of `transformers`, commands, Ctrl-C."""

import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlm.cli.entry import main
from mlm.data.tokenizer import Tokenizer
from tests.finetune.chats import write_llama
from tests.inference.generate.test_chat import their_answer

SETTINGS = ("temperature=0", "max_new_tokens=8", "device=cpu")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("chat") / "llama")


Chat = Callable[..., tuple[int, str, str]]


@pytest.fixture
def chat(llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    """`mlm chat` with lines on its standard input: exit code, standard output and errors."""

    def run(lines: str | Iterator[str], *settings: str) -> tuple[int, str, str]:
        typed = iter(lines.splitlines(keepends=True)) if isinstance(lines, str) else lines
        monkeypatch.setattr(sys, "stdin", stdin := io.StringIO())
        stdin.readline = lambda *_: next(typed, "")  # type: ignore[method-assign]
        code = main(["chat", str(llama), *SETTINGS, *settings])
        return code, *capsys.readouterr()

    return run


def said_by_transformers(llama: Path, *questions: str, system: str | None = None) -> list[str]:
    tokenizer = Tokenizer.load(llama)
    messages = [] if system is None else [{"role": "system", "content": system}]
    answers = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        answers.append(tokenizer.decode(their_answer(llama, messages)))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_pipe_is_a_conversation_of_which_answers_alone_are_printed(
    llama: Path, chat: Chat, tmp_path: Path
) -> None:
    row = tmp_path / "talk.jsonl"
    lines = f"sat?\na dog\\\nran\n\n/save {row}\n/reset\nsat?\n/system a cat\nsat?\n/exit\nsat?\n"
    code, out, err = chat(lines)
    first, second = said_by_transformers(llama, "sat?", "a dog\nran")
    (other,) = said_by_transformers(llama, "sat?", system="a cat")
    assert code == 0, err
    assert out == "".join(f"{answer}\n" for answer in (first, second, first, other))
    messages = json.loads(row.read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert messages[3]["content"] == second


def test_oldest_turns_make_room_for_the_answer_and_are_saved(chat: Chat, tmp_path: Path) -> None:
    """The model reads 128 tokens: the last answer is that of what is left."""
    row = tmp_path / "talk.jsonl"
    lines = ["the cat sat on a mat " * 4, "a dog ran home " * 4, f"/save {row}", "sat?", f"/save {row}"]
    code, _, err = chat("\n".join(lines), "max_new_tokens=60")
    assert code == 0
    assert "messages are not read: the model reads" in err
    messages = json.loads(row.read_text())["messages"]
    assert [m["content"] for m in messages[::2]] == [lines[0], lines[1], lines[3]]


def test_file_that_changed_since_it_was_saved_stays(chat: Chat, tmp_path: Path) -> None:
    row = tmp_path / "talk.jsonl"

    def typed() -> Iterator[str]:
        yield from ("sat?\n", f"/save {row}\n", "sat?\n")
        row.write_text("mine")
        yield f"/save {row}\n"

    assert chat(typed())[0] == 2
    assert row.read_text() == "mine"


@pytest.mark.parametrize(
    "text, line",
    [
        ("sat? " * 400, "the message has "),
        ("/sytem a cat", "/sytem: unknown command; use /reset, /system, /save, /help, /exit"),
        ("sat?\n/save /", "/save /: is a directory; name a file in it"),
    ],
)
def test_mistake_in_a_line_is_one_line(chat: Chat, text: str, line: str) -> None:
    code, _, err = chat(text)
    assert code == 2
    assert err.splitlines()[-1].startswith(f"mlm chat: {line}")


def test_bytes_that_are_no_text_and_no_input_at_all_are_no_traceback(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["chat", str(llama), *SETTINGS]
    command = [sys.executable, "-m", "mlm", *words]
    done = subprocess.run(command, input=b"a\xff\n", capture_output=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(b"mlm chat: the line holds half a surrogate pair (U+DCFF)")
    monkeypatch.setattr(sys, "stdin", None)  # as a shell's <&- leaves it
    assert main(words) == 0


@pytest.mark.parametrize(
    "words, line",
    [
        (["ckpt=/nowhere"], "ckpt=/nowhere: "),
        (["min_new_tokens=900"], "min_new_tokens=900 is more than max_new_tokens=512"),
    ],
)
def test_mistake_is_one_line_before_weights_are_read(
    llama: Path, words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ckpt = [] if words[0].startswith("ckpt=") else [f"ckpt={llama}"]
    assert main(["chat", *ckpt, *words]) == 2
    assert capsys.readouterr().err.startswith(f"mlm chat: {line}")


class Terminal:
    def __init__(self, *words: str) -> None:
        self.pid, self.side = pty.fork()
        if self.pid == 0:
            os.execv(sys.executable, [sys.executable, "-m", "mlm", *words])
        self.said = ""

    def wait_for(self, text: str, seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while text not in self.said:
            assert time.monotonic() < end, self.said
            if select.select([self.side], [], [], 0.1)[0]:
                try:
                    self.said += os.read(self.side, 4096).decode(errors="replace")
                except OSError:  # it has ended
                    raise AssertionError(self.said) from None

    def type(self, text: str) -> None:
        self.said = ""
        os.write(self.side, text.encode())

    def code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_ctrl_c_stops_an_answer_and_ctrl_d_ends(llama: Path) -> None:
    terminal = Terminal("chat", str(llama), "temperature=1", "max_new_tokens=100000", "min_new_tokens=100000")
    terminal.wait_for("/help lists commands")
    terminal.wait_for("> ")
    terminal.type("sat?\n")
    terminal.wait_for("sat?\r\n")
    time.sleep(0.5)  # it answers
    terminal.type("\x03")
    terminal.wait_for("> ")
    terminal.type("/save /nowhere/x.jsonl\n")
    terminal.wait_for("/nowhere/x.jsonl: ")  # one line, and the chat goes on
    time.sleep(1.0)
    terminal.type("\x04")
    assert terminal.code() == 0


def test_same_question_draws_another_answer(chat: Chat) -> None:
    """Each turn has draws of its own, the same ones in every chat of a seed."""
    texts = [chat("sat?\n/reset\nsat?\n", "temperature=2")[1] for _ in range(2)]
    first, second = texts[0].splitlines()
    assert texts[0] == texts[1]
    assert first != second
