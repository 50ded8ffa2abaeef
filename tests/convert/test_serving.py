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
from tests.convert.hf_models import import_model
from tests.finetune.chats import write_llama
from tests.pages import blocks

PAGE = Path(__file__).parents[2] / "scripts/docs/pages/guides/serving.md"
EXPORTS, SERVERS, CLIENT = [block.code for block in blocks(PAGE.read_text(), PAGE.name)]
NEEDED = {"transformers": ("openai", "fastapi", "uvicorn"), "vllm": ("openai",), "llama-server": ("openai",)}
STARTS_IN_S = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run named runs/chat, and what the page exports of it."""
    folder = tmp_path_factory.mktemp("serving")
    write_llama(folder / "llama", seed=3, head_dim=32)  # the least of vLLM on a CPU
    import_model(folder / "llama", folder / "runs/chat", verify=False)
    with contextlib.chdir(folder):
        for line in EXPORTS.splitlines():
            assert main([*shlex.split(line)[1:], "verify=false"]) == 0
    return folder


@contextlib.contextmanager
def serving(command: list[str], folder: Path, port: int) -> Iterator[None]:
    """Run a server until the block ends; it listens at the port by then."""
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    try:
        for _ in range(STARTS_IN_S):
            assert server.poll() is None, (folder / "server.log").read_text()
            with contextlib.suppress(OSError), socket.create_connection(("localhost", port), timeout=1):
                break
            time.sleep(1)
        yield
    finally:
        server.terminate()
        server.wait(30)


@pytest.mark.slow
@pytest.mark.timeout(300)
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
    answer = model.chat(messages, max_new_tokens=64, temperature=0)
    for name in model.tokenizer.special_names:  # which servers leave out
        answer = answer.replace(name, "")
    assert len(answer) > 20
    assert printed.getvalue() == answer + "\n"


def test_commands_of_the_page_are_those_of_the_servers() -> None:
    assert [line.split()[0] for line in SERVERS.splitlines()] == list(NEEDED)
