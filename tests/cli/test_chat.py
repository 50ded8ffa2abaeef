"""`mlm chat` on a pipe and on a terminal: answers of `transformers`, commands, Ctrl-C."""

import json
import os
import pty
import select
import shlex
import subprocess
import sys
import time
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


def chat(llama: Path, text: str, *settings: str) -> "subprocess.CompletedProcess[str]":
    words = [sys.executable, "-m", "mlm", "chat", str(llama), *SETTINGS, *settings]
    return subprocess.run(words, input=text, capture_output=True, text=True, timeout=120)


def said_by_transformers(llama: Path, *questions: str, system: str | None = None) -> list[str]:
    """Its greedy answer to each message of a conversation."""
    tokenizer = Tokenizer.load(llama)
    messages = [] if system is None else [{"role": "system", "content": system}]
    answers = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        answers.append(tokenizer.decode(their_answer(llama, messages)))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_pipe_is_a_conversation_of_which_answers_alone_are_printed(llama: Path, tmp_path: Path) -> None:
    row = tmp_path / "talk.jsonl"
    done = chat(llama, f"sat?\na dog\\\nran\n\n/save {row}\n/reset\nsat?\n/system a cat\nsat?\n/exit\nsat?\n")
    first, second = said_by_transformers(llama, "sat?", "a dog\nran")
    (other,) = said_by_transformers(llama, "sat?", system="a cat")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"{answer}\n" for answer in (first, second, first, other))
    messages = json.loads(row.read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert messages[3]["content"] == second


def test_oldest_turns_make_room_for_the_answer(llama: Path) -> None:
    """The model reads 128 tokens: the last answer is that of what is left."""
    questions = ["the cat sat on a mat " * 3, "a dog ran home " * 3, "sat?"]
    done = chat(llama, "\n".join(questions) + "\n", "max_new_tokens=60")
    assert "messages are not read: the model reads" in done.stderr
    assert done.returncode == 0


def test_saved_conversation_has_every_turn_and_is_saved_again(llama: Path, tmp_path: Path) -> None:
    """Also those that the model no longer reads."""
    row = tmp_path / "talk.jsonl"
    lines = ["the cat sat on a mat " * 4, "a dog ran home " * 4, f"/save {row}", "sat?", f"/save {row}"]
    assert chat(llama, "\n".join(lines)).returncode == 0
    messages = json.loads(row.read_text())["messages"]
    assert [m["content"] for m in messages[::2]] == [lines[0], lines[1], lines[3]]


def test_file_that_changed_since_it_was_saved_stays(llama: Path, tmp_path: Path) -> None:
    row = tmp_path / "talk.jsonl"
    words = [sys.executable, "-m", "mlm", "chat", str(llama), *SETTINGS]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for text in ("sat?\n", f"/save {row}\n", "sat?\n"):
            process.stdin.write(text)
            process.stdin.flush()
        for _ in range(2):
            process.stdout.readline()
        row.write_text("mine")
        process.stdin.write(f"/save {row}\n")
        process.stdin.close()
        assert process.wait(120) == 2
    assert row.read_text() == "mine"


@pytest.mark.parametrize(
    "text, line",
    [
        ("sat? " * 400, "the message has "),
        ("/sytem a cat", "/sytem: unknown command; use /reset, /system, /save, /help, /exit"),
        ("/save x.jsonl", "/save: nothing is said yet"),
        ("sat?\n/save /", "/save /: is a directory; name a file in it"),
    ],
)
def test_mistake_in_a_line_is_one_line(llama: Path, text: str, line: str) -> None:
    done = chat(llama, text)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"mlm chat: {line}")


def test_bytes_that_are_no_text_and_no_input_at_all_are_no_traceback(llama: Path) -> None:
    words = [sys.executable, "-m", "mlm", "chat", str(llama), *SETTINGS]
    done = subprocess.run(words, input=b"a\xff\n", capture_output=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(b"mlm chat: the line holds half a surrogate pair (U+DCFF)")
    shell = " ".join(shlex.quote(word) for word in words)
    assert subprocess.run(["sh", "-c", f"{shell} <&-"], capture_output=True, timeout=120).returncode == 0


@pytest.mark.parametrize(
    "words, line",
    [
        (["ckpt=/nowhere"], "ckpt=/nowhere: "),
        (["min_new_tokens=900"], "min_new_tokens=900 is more than max_new_tokens=512"),
        (["chat_template=/nowhere.jinja"], "chat_template=/nowhere.jinja: "),
        (["temperature=-1"], "temperature=-1"),
    ],
)
def test_mistake_is_one_line_before_weights_are_read(
    llama: Path, words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ckpt = [] if words[0].startswith("ckpt=") else [f"ckpt={llama}"]
    assert main(["chat", *ckpt, *words]) == 2
    assert capsys.readouterr().err.startswith(f"mlm chat: {line}")


class Terminal:
    """A process on a terminal of its own."""

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
    time.sleep(1.0)  # it answers
    terminal.type("\x03")
    terminal.wait_for("> ")
    terminal.type("/save /nowhere/x.jsonl\n")
    terminal.wait_for("/nowhere/x.jsonl: ")  # one line, and the chat goes on
    time.sleep(1.0)
    terminal.type("\x04")
    assert terminal.code() == 0


def test_same_question_draws_another_answer(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each turn has draws of its own, the same ones in every chat of a seed."""
    texts = [chat(llama, "sat?\n/reset\nsat?\n", "temperature=2").stdout for _ in range(2)]
    first, second = texts[0].splitlines()
    assert texts[0] == texts[1]
    assert first != second
