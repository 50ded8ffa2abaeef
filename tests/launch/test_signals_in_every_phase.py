"""Requests to stop that reach processes while they import, wait for each other, load, compile or save."""

import os
import pkgutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlm.cli import main
from mlm.launch.stop import ECHO_S
from tests.launch.ranks_of_jobs import free_port
from tests.slow import slow

RUN = [
    *("pretrain", "model=gpt2_tiny", "model.vocab_size=64", "model.num_layers=1", "data=synthetic"),
    *("data.seq_length=8", "train.steps=2", "train.global_batch_size=2", "train.micro_batch_size=1"),
    *("train.validate_every=1", "train.validate_batches=1", "schedule.warmup_steps=1", "dist.device=cpu"),
    *("dist.peak_tflops=1", "dist.threads_per_rank=1"),
]
SIGNALS_WHILE_IMPORTING = """
import os, runpy, signal, sys

def signal_at(name):
    print("at", name, flush=True)
    os.kill(os.getpid(), signal.SIGUSR1)

class Signals:  # an import hook: repeats the signal whenever one of these modules is about to be imported
    def find_spec(self, name, path=None, target=None):
        if name in ("mlm.launch.stop", "hydra", "torch", "mlm.cli.pretrain.run"):
            signal_at(name)

def at_the_last_checkpoint(event, values):
    if event == "os.rename" and os.path.basename(values[1]) == "latest":
        signal_at("latest")

sys.addaudithook(at_the_last_checkpoint)
sys.meta_path.insert(0, Signals())
runpy.run_module("mlm", run_name="__main__", alter_sys=True)
"""


def saved(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").glob("step-*"))


def test_signals_from_the_first_import_to_the_checkpoint_are_one_request(tmp_path: Path) -> None:
    words = [*RUN, f"out={tmp_path / 'run'}"]
    done = subprocess.run([sys.executable, "-c", SIGNALS_WHILE_IMPORTING, *words], capture_output=True)
    said = done.stdout.decode()
    assert done.returncode == 0, done.stderr.decode()
    assert [line for line in said.splitlines() if line.startswith("at ")] == [
        f"at {name}" for name in ("mlm.launch.stop", "hydra", "torch", "mlm.cli.pretrain.run", "latest")
    ]
    assert saved(tmp_path / "run") == ["step-00000001"]


@pytest.mark.slow
def test_a_rank_that_waits_for_the_others_notes_every_signal(tmp_path: Path) -> None:
    """The signal reaches a rank that started, and its peer not at all."""
    port = free_port()
    words = [sys.executable, "-m", "mlm", *RUN, "tp=2", f"out={tmp_path / 'run'}"]

    def rank(number: int) -> "subprocess.Popen[str]":
        place = {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environ = {**os.environ, **place, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(words, env=environ, stderr=subprocess.PIPE, text=True, stdout=subprocess.PIPE)

    first = rank(0)
    try:
        wait_for_server(port, first)
        for number in (signal.SIGUSR1, signal.SIGUSR1):
            first.send_signal(number)
            time.sleep(0.05)
        second = rank(1)
        ended = [process.communicate(timeout=100) for process in (first, second)]
    finally:
        first.kill()
    assert [first.returncode, second.returncode] == [0, 0], ended
    assert "mlm: SIGUSR1: noted" in ended[0][1]
    assert saved(tmp_path / "run") == ["step-00000001"]


def wait_for_server(port: int, process: "subprocess.Popen[str]") -> None:
    end = time.monotonic() + 100
    while time.monotonic() < end and process.poll() is None:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
    raise AssertionError(process.communicate()[1])


@pytest.mark.parametrize(
    "phase, number, code, steps",
    [
        ("cli.pretrain.run.resume", signal.SIGTERM, 143, 1),
        slow(("training.trainer.compile_layers", signal.SIGHUP, 129, 1)),
        slow(("training.loop.Loop.save", signal.SIGUSR1, 0, 2)),
        ("cli.pretrain.run.print_next_commands", signal.SIGTERM, 0, 2),
    ],
    ids=["loading", "compiling", "saving", "finishing"],
)
def test_signals_of_any_phase_save_and_kill_nothing(
    phase: str, number: signal.Signals, code: int, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two each time: a scheduler repeats itself."""
    work = pkgutil.resolve_name(f"mlm.{phase}")

    def interrupted(*args: object, **kwargs: object) -> object:
        for _ in range(2):
            signal.raise_signal(number)
        return work(*args, **kwargs)

    monkeypatch.setattr(f"mlm.{phase}", interrupted)
    out = tmp_path / "run"
    assert main([*RUN, f"out={out}"]) == code
    assert saved(out)[-1] == f"step-{steps:08d}"


def test_a_second_ctrl_c_says_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        signal.raise_signal(signal.SIGINT)
        time.sleep(ECHO_S)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("mlm.training.loop.Loop.save", interrupted)
    assert main([*RUN, f"out={tmp_path / 'run'}"]) == 130
    assert capfd.readouterr().err.endswith("\nmlm: Ctrl-C: stopped at once; no checkpoint was saved\n")
