"""Builds of corpora by `mlm data build`, each in a process of its own: their time and their memory."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from bench.harness import Say, Times, alternate, ratio_of, timed
from bench.machine import REPOSITORY
from bench.text_supply import read_passages, write_documents, write_evaluation
from mlm.data.tokenizer import Tokenizer
from mlm.util.errors import UserError

TOKENISE_TARGET = 0.9
BATCH = 1024  # documents per call of the bare library: more makes it slower, for the memory they take
OFTEN_S, SELDOM_S = 0.02, 0.2  # between two looks at a process: to see peaks, and not to disturb
FLAT = 1.25
"""Peak at the largest input over peak at the smallest, up to which memory counts as flat."""


@dataclass(frozen=True)
class Seen:
    """Observations of a command and its descendants.

    peaks   bytes, of the `main` process and of its largest `worker`: `resident` is VmHWM, which counts mapped
            files too; `anonymous` the largest RssAnon that was seen
    cpu     seconds of all of them
    """

    peaks: dict[str, dict[str, int]]
    cpu: float


def tokenise(args: argparse.Namespace, say: Say) -> dict[str, Any]:
    """The whole command, from start to receipt, against the bare library on texts that are in memory."""
    return {"workers": args.workers, "rows": [tokenise_size(mb, args, say) for mb in args.mb]}


def tokenise_size(mb: float, args: argparse.Namespace, say: Say) -> dict[str, Any]:
    """Times of both on so much text."""
    with tempfile.TemporaryDirectory(prefix="bench_data-", dir=args.folder) as name:
        folder = Path(name)
        Tokenizer.load(args.tokenizer).save(folder / "tokenizer.json")
        text = folder / "text.jsonl"
        documents = write_documents(text, read_passages(args.text), int(mb * 1e6))
        corpora = (folder / f"corpus-{number}" for number in count())
        sides: dict[str, Callable[[], Times]] = {
            "bare": lambda: bare_run(text, args.workers),
            "build": lambda: build_run(folder, next(corpora), args.workers),
        }
        times = alternate(sides, args.rounds, say, measure=lambda run: run())
    bare, build = times["bare"], times["build"]
    return {
        "name": f"{mb:,.0f} MB, {args.workers} workers",
        "documents": documents,
        **{name: [asdict(one) for one in every] for name, every in times.items()},
        "ratio": ratio_of([one.wall for one in bare], [one.wall for one in build]),
        "cpu_ratio": ratio_of([one.cpu for one in bare], [one.cpu for one in build]),
        "target": args.target,
    }


def bare_run(text: Path, workers: int) -> Times:
    """The times that a process says it encoded for."""
    words = [sys.executable, str(Path(__file__).parents[1] / "bench_data.py"), "bare", str(text)]
    return Times(**json.loads(finished(words, threads=workers).splitlines()[-1]))


def be_bare(file: Path) -> None:
    """Encode the documents of a file with the tokenizer beside it; print the time it took."""
    backend = Backend.from_file(str(file.parent / "tokenizer.json"))
    with open(file, encoding="utf-8") as f:
        texts = [json.loads(line)["text"] for line in f]

    def encode() -> None:
        for i in range(0, len(texts), BATCH):
            backend.encode_batch_fast(texts[i : i + BATCH], add_special_tokens=False)

    print(json.dumps(asdict(timed(encode))))


def build_run(folder: Path, out: Path, workers: int) -> Times:
    """The times of a whole build of what lies in `folder`."""
    begin = time.perf_counter()
    seen = watched(build_words(folder, out, workers, "plain"), threads=workers, poll_s=SELDOM_S)
    return Times(time.perf_counter() - begin, seen.cpu)


def build_words(folder: Path, out: Path, workers: int, recipe: str, *more: str) -> list[str]:
    """A command line of `mlm data build`."""
    settings = {
        "input": folder / "text.jsonl",
        "tokenizer": folder / "tokenizer.json",
        "out": out,
        "recipe": recipe,
        "split": "1/0/0",
        "executor.workers": workers,
    }
    command = [sys.executable, "-m", "mlm", "data", "build"]
    return [*command, *(f"{key}={value}" for key, value in settings.items()), *more]


def finished(words: Sequence[str], *, threads: int) -> str:
    """Standard output of a command that ends well."""
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        env=environment(threads),
        check=False,
    )
    if done.returncode:
        raise UserError(f"{' '.join(words[1:4])} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout


def environment(threads: int) -> dict[str, str]:
    """This process's, with this checkout's `mlm` and so many threads for the tokenizers' library."""
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    more = {"PYTHONPATH": os.pathsep.join(paths), "RAYON_NUM_THREADS": str(threads), "OMP_NUM_THREADS": "1"}
    return dict(os.environ) | more


def memory(args: argparse.Namespace, say: Say) -> dict[str, Any]:
    """Peaks of the command's process and of its largest worker, at each size of input."""
    rows, passages = list[dict[str, Any]](), read_passages(args.text)
    for mb in args.mb:
        say(f"{mb:,.0f} MB of text")
        with tempfile.TemporaryDirectory(prefix="bench_data-", dir=args.folder) as name:
            folder = Path(name)
            Tokenizer.load(args.tokenizer).save(folder / "tokenizer.json")
            write_evaluation(folder / "evaluation.jsonl", passages)
            documents = write_documents(folder / "text.jsonl", passages, int(mb * 1e6))
            against = f"decontaminate.against=[{folder / 'evaluation.jsonl'}]"
            words = build_words(folder, folder / "corpus", args.workers, "v1", against)
            begin = time.perf_counter()
            peaks = watched(words, threads=args.workers).peaks
            seconds = time.perf_counter() - begin
            receipt = json.loads((folder / "corpus" / "corpus.json").read_text(encoding="utf-8"))
        rows.append(
            {
                "name": f"{mb:,.0f} MB of text",
                "text_bytes": mb * 1e6,
                "documents": documents,
                "removed": receipt["removed"],
                "kept": receipt["splits"]["train"]["documents"],
                "seconds": seconds,
                "peaks": peaks,
            }
        )
    return {"workers": args.workers, "recipe": "v1", "flat": FLAT, "rows": rows}


def watched(words: Sequence[str], *, threads: int, poll_s: float = OFTEN_S) -> Seen:
    """Run a command that ends well, looking at it every `poll_s` seconds."""
    peaks = {who: {"resident": 0, "anonymous": 0} for who in ("main", "worker")}
    cpu = dict[int, float]()
    with tempfile.TemporaryFile() as log:
        with subprocess.Popen(words, stdout=log, stderr=log, env=environment(threads)) as child:
            while child.poll() is None:
                for pid in family(child.pid):
                    cpu[pid] = max(cpu.get(pid, 0.0), cpu_seconds(pid))
                    who = peaks["main" if pid == child.pid else "worker"]
                    for kind, size in sizes(pid).items():
                        who[kind] = max(who[kind], size)
                time.sleep(poll_s)
        log.seek(0)
        if child.returncode:
            tail = log.read().decode(errors="replace").strip()[-500:]
            raise UserError(f"{' '.join(words[1:4])} ended with {child.returncode}: {tail}")
    return Seen(peaks, sum(cpu.values()))


def family(pid: int) -> list[int]:
    """A process and all its descendants that are alive."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(word) for task in tasks for word in (task / "children").read_text().split()]
    except OSError:  # gone
        return [pid]
    return [pid, *(one for child in children for one in family(child))]


def sizes(pid: int) -> dict[str, int]:
    """Peak resident and present anonymous memory of a process in bytes; nothing of one that is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    found = {key: value for key, _, value in (line.partition(":") for line in lines)}
    names = {"resident": "VmHWM", "anonymous": "RssAnon"}
    return {kind: int(found[key].split()[0]) << 10 for kind, key in names.items() if key in found}


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, its children's not counted; 0 of one that is gone (man 5 proc)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime, stime
