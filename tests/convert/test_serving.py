"""The page on serving: its commands, and answers of each installed server, asked by the `openai` client."""

import contextlib
import io
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import mlm
from mlm.cli import main
from tests.finetune.chats import write_llama
from tests.finetune.material import write_rows
from tests.pages import blocks

PAGE = Path(__file__).parents[2] / "scripts/docs/pages/guides/serving.md"
EXPORTS, SERVERS, CLIENT = [block.code for block in blocks(PAGE.read_text(), PAGE.name)]
NEEDED = {"transformers": ("openai", "fastapi", "uvicorn"), "vllm": ("openai",), "llama-server": ("openai",)}
ANSWERS = {
    "Who wrote Hamlet?": "William Shakespeare wrote it, in 1600.",
    "Who wrote Faust?": "Johann Wolfgang von Goethe did.",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run named runs/chat that has learnt to answer in text, and what the page exports of it.

    Of random bytes, servers drop what is no UTF-8.
    """
    folder = tmp_path_factory.mktemp("serving")
    write_llama(folder / "llama", seed=3, head_dim=32)  # the least of vLLM on a CPU
    turns = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in ANSWERS.items()
    ]
    for part in ("train", "validation"):
        write_rows(folder / f"chats/{part}.jsonl", [{"messages": turn} for turn in turns] * 16)
    settings = "optimizer.lr=0.01 train.epochs=4 train.global_batch_size=2 task.max_length=96 dist.device=cpu"
    with contextlib.chdir(folder):
        assert main(["finetune", "chat", "data=chats", "ckpt=llama", "out=runs/chat", *settings.split()]) == 0
        for line in EXPORTS.splitlines():
            assert main([*shlex.split(line)[1:], "verify=false"]) == 0
    return folder


@contextlib.contextmanager
def serving(command: list[str], folder: Path, port: int) -> Iterator[None]:
    """Run a server until the block ends; it listens at the port by then."""
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    try:
        for _ in range(500):  # seconds
            assert server.poll() is None, (folder / "server.log").read_text()
            with contextlib.suppress(OSError), socket.create_connection(("localhost", port), timeout=1):
                break
            time.sleep(1)
        yield
    finally:
        server.terminate()
        server.wait(30)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("line", SERVERS.splitlines(), ids=lambda line: line.split()[0])
def test_answer_of_a_server_is_that_of_the_run(line: str, folder: Path) -> None:
    """Greedily, at the context and with the template that travelled with the weights."""
    program, *words = shlex.split(line)
    for module in NEEDED[program]:
        pytest.importorskip(module)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if (found := shutil.which(program, path=path)) is None:
        pytest.skip(f"{program} is not installed")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    printed = io.StringIO()
    command = [found, *(word.replace("8000", str(port)) for word in words)]
    with serving(command, folder, port), contextlib.redirect_stdout(printed):
        exec(compile(CLIENT.replace("8000", str(port)), str(PAGE), "exec"), {})
    messages = [{"role": "user", "content": "Who wrote Hamlet?"}]
    model = mlm.load(folder / "runs/chat", device="cpu")
    assert model.chat(messages, max_new_tokens=64, temperature=0) == ANSWERS["Who wrote Hamlet?"]
    assert printed.getvalue() == ANSWERS["Who wrote Hamlet?"] + "\n"


def test_commands_of_the_page_are_those_of_the_servers() -> None:
    assert [line.split()[0] for line in SERVERS.splitlines()] == list(NEEDED)
