"""Commands that are run on fake GPUs, and the record of how they ended."""

import io
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpu.runner import run_limited

SCRIPTS = Path(__file__).resolve().parents[2]
JSON, TABLE = "fake_gpu.json", "fake_gpu.md"
LIMIT_S = 900
"""Of a case."""
LATE_MS = 5
"""Delay of messages: what reads them without waiting gets other numbers."""
EXACT = ("-m", "mlm", "parity", "precision=fp64")
EQUAL = r"^(EQUAL.*)$"
HEAD = """# A rehearsal on fake GPUs

PyTorch's CUDA code on a host without a GPU (`python scripts/fake_gpu.py --rehearse FOLDER`): dispatch,
autograd's threads, streams, events, the allocator, graph captures, process groups over NCCL. Operators
compute with their CPU kernels, or not at all; messages travel through memory. No kernel of a GPU has run.
"""


@dataclass(frozen=True)
class Case:
    """A command and what it must say."""

    name: str
    command: tuple[str, ...]
    gpus: int = 1
    arithmetic: bool = True
    expected: str = EQUAL
    """Pattern of lines of its output; the group of each match is recorded."""


def parity(name: str, gpus: int, *words: str, model: str = "gpt2_tiny") -> Case:
    """A layout over NCCL against one process, in float64."""
    return Case(name, (*EXACT, f"model={model}", *words), gpus)


LAYOUTS = (
    parity("tp", 2, "tp=2"),
    parity("sequence parallelism in parts", 2, "tp=2", "sequence_parallel=true", "tp_overlap=2"),
    parity("1F1B", 4, "pp=4", "model.num_layers=8"),
    parity("interleaved", 2, "pp=2", "vp=2", "model.num_layers=4"),
    parity("GPipe, recomputed", 2, "pp=2", "pipeline=gpipe", "recompute=full"),
    parity("zero bubble with tp", 4, "pp=2", "tp=2", "pipeline=zb_h1"),
    parity("dp", 2, "dp=2"),
    parity("sharded optimizer", 2, "dp=2", "zero=2"),
    parity("sharded parameters with tp", 4, "dp=2", "tp=2", "zero=3"),
    parity("three axes", 8, "tp=2", "pp=2", "dp=2", "sequence_parallel=true", "pipeline=zb_h1"),
    parity("context parallelism", 2, "cp=2"),
    parity("Llama with cp and tp", 4, "cp=2", "tp=2", model="llama_tiny"),
    parity("BERT", 4, "tp=2", "pp=2", model="bert_tiny"),
)
QUICK = ("scripts/gpu_check.py", "--quick", "--out", "check", "--minutes", "14", "--only")
CASES = (
    Case("NCCL on one rank", (*QUICK, "nccl"), expected=r"(ok +nccl.*)$"),
    Case(
        "speed and waits",
        (*QUICK, "facts", "waits", "speed-1.2b", "switches", "speed-124m"),
        arithmetic=False,
        expected=r"(ok +speed-124m.*)$",
    ),
    Case(
        "launches of a step of GPT-2 1.2B",
        ("scripts/gpu/fake/launches.py",),
        arithmetic=False,
        expected=r"^(.*: \d+ launches, .*)$",
    ),
    *LAYOUTS,
    Case(
        "killed and resumed",
        ("-m", "mlm", "verify-resume", "model=gpt2_tiny", "tp=2", "out=resumed"),
        gpus=2,
    ),
)


def rehearse(out: Path, cases: Sequence[Case] = CASES) -> int:
    """Run the cases and write both files; 0 if every one ended well. Raises OSError."""
    out.mkdir(parents=True, exist_ok=True)
    if isinstance(sys.stdout, io.TextIOWrapper):  # what commands say is no ASCII
        sys.stdout.reconfigure(errors="replace")
    done: list[dict[str, Any]] = []
    for case in cases:
        row = run_case(case)
        done.append(row)
        verdict = "ok    " if row["ok"] else "FAILED"
        print(f"{verdict} {case.name}, {row['seconds']:.0f} s: {row['said']}", flush=True)
    facts = {"torch": version("torch"), "python": platform.python_version()}
    record = {"when": datetime.now(UTC).isoformat(timespec="seconds"), "facts": facts, "cases": done}
    (out / JSON).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (out / TABLE).write_text(table(record), encoding="utf-8")
    return 0 if all(row["ok"] for row in done) else 1


def run_case(case: Case) -> dict[str, Any]:
    options = [
        "--gpus",
        str(case.gpus),
        "--rendezvous",
        "--late",
        str(LATE_MS),
        *([] if case.arithmetic else ["--no-arithmetic"]),
    ]
    words = [str(SCRIPTS.parent / w) if w.endswith(".py") else w for w in case.command]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mlm-rehearsal-") as scratch:
        command = [sys.executable, str(SCRIPTS / "fake_gpu.py"), *options, "--", *words]
        log = Path(scratch, "output.txt")
        code = run_limited(command, os.environ, LIMIT_S, lambda line: None, log, log.parent).code
        output = log.read_text(errors="replace")
    found = re.findall(case.expected, output, re.MULTILINE)
    last = [line for line in output.splitlines() if line.strip()][-1:]
    return {
        **asdict(case),
        "ok": code == 0 and bool(found),
        "exit code": code,
        "seconds": round(time.monotonic() - begin, 1),
        "said": " ".join("; ".join(found or last).split())[:600],
    }


def plain(said: str) -> str:
    """Text for a cell of a table, without a meaning for Markdown."""
    return said.replace("|", r"\|").replace("[", r"\[").replace("<", "&lt;")


def table(record: dict[str, Any]) -> str:
    lines = [HEAD, f"{', '.join(f'{k} {v}' for k, v in record['facts'].items())}; {record['when']}.", ""]
    lines += ["| case | GPUs | arithmetic | ended | output |", "| --- | --- | --- | --- | --- |"]
    for row in record["cases"]:
        ended = "well" if row["ok"] else f"**badly**, {row['exit code']}"
        computed = "yes" if row["arithmetic"] else "none"
        lines.append(f"| {row['name']} | {row['gpus']} | {computed} | {ended} | {plain(row['said'])} |")
    commands = [f"- {row['name']}: `{' '.join(row['command'])}`" for row in record["cases"]]
    return "\n".join([*lines, "", *commands, ""])
