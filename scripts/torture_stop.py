"""Signals to real runs in every phase: what they leave, and whether the same command then continues.

    python scripts/torture_stop.py "pretrain/pp=2/steps,saving/launcher TERM" "classify/*/*/rank TERM"

A cell is COMMAND/LAYOUT/PHASE/SIGNAL; commas separate alternatives, `*` stands for all. Each run pauses in a
phase until the signal has come. Its exit code, words, checkpoints and processes are checked; then it is
started again, and must end with the losses of a run that nothing disturbed.
Exit code: 0 nothing was found, 1 something was.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[1]
HUNG_S, KILL_AFTER_S, TWICE_S = 120.0, 30.0, 0.7
"""Limit of a command; from a queue's SIGTERM to its SIGKILL; between two Ctrl-C."""
SETTINGS = "train.global_batch_size=4 train.micro_batch_size=1 log.every=1 dist.device=cpu"
PRETRAIN = (
    "pretrain model=gpt2_tiny model.num_layers=2 model.hidden_size=16 model.num_heads=2 data.seq_length=64 "
    "data=indexed data.path=corpus train.steps=6 train.validate_every=2 train.validate_batches=3 "
    "schedule.warmup_steps=1 checkpoint.save_every=2 train.sample_prompts=[the,a] train.sample_tokens=4"
)
CLASSIFY = "finetune sst2 data.path=sst2 task.max_length=32 data.predict_tests=true train.epochs=2 ckpt=model"
COMMANDS = {"pretrain": (6, PRETRAIN), "classify": (12, CLASSIFY)}
"""Steps of a run, and its words."""
MATERIAL = {
    "tokens": "data tokenizer input=documents.jsonl vocab_size=300",
    "corpus": "data build data=documents.jsonl tokenizer=tokens recipe=plain split=0.8/0.1/0.1",
    "model": f"{PRETRAIN} {SETTINGS} dp=1",
}
LAYOUTS = {"dp=1": 1, "tp=2": 2, "pp=2": 2, "dp=2 zero=2": 2}
PHASES = {
    "importing": "torch:<module>:1",
    "rendezvous": "mlm.launch.rendezvous:call_roll:1",
    "first": "mlm.training.trainer:Trainer.train_step:1",
    "steps": "mlm.training.trainer:Trainer.train_step:4",
    "last": "mlm.training.trainer:Trainer.train_step:{steps}",
    "scoring": "mlm.training.pipelined:PipelinedModel.evaluate:1",
    "prompts": "mlm.cli.pretrain.samples:PromptSampler.logits:2",
    "saving": "mlm.checkpoint.native.save_load:save_checkpoint:1",
    "predicting": "mlm.finetune.scoring:Scorer.score_and_write:1",
}


class Job:
    """A command in a process group of its own, which pauses `at` a call."""

    def __init__(self, line: str, place: Path, root: Path, at: str = "::0", pause_s: float = 1.0) -> None:
        self.marks, self.log = place / "marks", place / "said"
        self.marks.mkdir(parents=True)
        environ = os.environ | {"PAUSE_AT": at, "PAUSE_MARKS": str(self.marks), "OMP_NUM_THREADS": "1"}
        environ |= {"PYTHONPATH": f"{REPO / 'scripts' / 'torture'}:{REPO}", "PAUSE_S": str(pause_s)}
        words = [sys.executable, "-m", "mlm", *line.split()]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                words, env=environ, cwd=root, stdout=log, stderr=log, process_group=0
            )

    def pids(self) -> list[int]:
        wanted, living = f"PAUSE_MARKS={self.marks}\0".encode(), []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                if wanted in (path / "environ").read_bytes():  # empty of a zombie
                    living.append(int(path.name))
        return living

    def paused(self) -> list[int]:
        return sorted(int(path.name) for path in self.marks.iterdir())

    def wait_for_pause(self, ranks: int) -> bool:
        """Wait until the ranks have reached the phase; False if the job ends, or hangs, before one has."""
        end = time.monotonic() + HUNG_S
        while len(self.paused()) < ranks and time.monotonic() < end and self.process.poll() is None:
            time.sleep(0.02)
        return bool(self.paused()) and self.process.poll() is None

    def send(self, number: int, pids: Sequence[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait(self, limit_s: float = HUNG_S) -> int | None:
        """Its exit code as a shell shows it; None if it takes longer."""
        with suppress(subprocess.TimeoutExpired):
            code = self.process.wait(limit_s)
            return 128 - code if code < 0 else code
        return None


RECEIVERS: dict[str, Callable[[Job], list[int]]] = {
    "launcher": lambda job: [job.process.pid],
    "rank": lambda job: job.paused()[-1:],
    "all": Job.pids,
    "group": lambda job: [-job.process.pid],
    "twice": lambda job: [-job.process.pid],
    "queue": Job.pids,
}
"""Who receives a signal. `twice`: the group, as a user types again; `queue`: all, and SIGKILL later."""
SIGNALS = [f"{who} {name}" for who in RECEIVERS for name in ("INT", "TERM", "HUP", "USR1", "KILL")]


def disturb(job: Job, who: str, number: int, ranks: int) -> int | None:
    """Send the signal once the ranks pause; return the exit code, None if it hung or the phase never came."""
    if not job.wait_for_pause(ranks):
        return None
    for pause in (0.0, TWICE_S)[: 1 + (who == "twice")]:
        time.sleep(pause)
        job.send(number, RECEIVERS[who](job))
    if (code := job.wait(KILL_AFTER_S if who == "queue" else HUNG_S)) is None and who == "queue":
        job.send(signal.SIGKILL, job.pids())
        code = job.wait()
    time.sleep(0.5)  # for what it started to end
    return code


def run(line: str, place: Path, root: Path) -> None:
    """Run a command that nothing disturbs. Raises RuntimeError if it fails."""
    if (job := Job(line, place, root)).wait():
        raise RuntimeError(f"{line}: {job.log.read_text()}")


def numbers_of(out: Path) -> dict[str, Any]:
    """Losses of each step and validation of a run, its texts and scores."""
    numbers: dict[str, Any] = {}
    for line in map(json.loads, (out / "metrics.jsonl").read_bytes().splitlines()):
        if line["kind"] not in ("run", "saved"):
            values = {k: v for k, v in line.items() if "loss" in k or k in ("grad_norm", "text", "scores")}
            numbers[f"{line['kind']} {line.get('step')} {line.get('prompt')} {line.get('split')}"] = values
    result = out / "result.json"
    return numbers | ({"scores": json.loads(result.read_bytes())["scores"]} if result.exists() else {})


def false_words(said: str, saved: list[int]) -> list[str]:
    """Promises that the checkpoints break, and words that no user should see."""
    found = re.findall(r"Traceback|Exception ignored|leaked|Fatal Python", said)[:1]
    promised = re.findall(r"finishing (?:the batch of validation after )?step (\d+)", said)[-1:]
    promised = re.findall(r"after step (\d+), saved", said) + promised * ("stopped at once" not in said)
    found += [f"promised step {step}" for step in set(promised) if saved[-1:] != [int(step)]]
    if (saved and "no checkpoint was saved" in said) or (not saved and "checkpoint is intact" in said):
        found.append("a false word on checkpoints")
    return found


def judge(cell: Sequence[str], root: Path, place: Path) -> tuple[list[str], str]:
    """Run a cell; return what was found, and what to print of it."""
    command, layout, phase, how = cell
    out, (steps, words) = place / "out", COMMANDS[command]
    undisturbed = root / f"{command}-{layout.split()[0]}"
    line = f"{words} {SETTINGS} {layout} out="
    if not undisturbed.exists():
        run(f"{line}{undisturbed}", root / "undisturbed" / undisturbed.name, root)
    line += str(out)
    job, (who, name) = Job(line, place, root, PHASES[phase].format(steps=steps)), how.split()
    number = getattr(signal, f"SIG{name}")
    code, left = disturb(job, who, number, LAYOUTS[layout]), job.pids()
    job.send(signal.SIGKILL, left)
    if code is None and not (left and job.paused()):
        return [], "has no such phase"
    saved = sorted(int(path.parent.name[5:]) for path in out.glob("checkpoints/step-*/manifest.json"))
    said = "".join(path.read_text(errors="replace") for path in (job.log, *out.glob("logs/*")))
    found = false_words(said, saved) + ([f"{len(left)} processes left"] if left else [])
    codes = {0 if name == "USR1" else 128 + number} | ({0} if saved[-1:] == [steps] else set())
    codes |= {137} if who == "queue" else {1} if how == "rank KILL" else set()
    if code not in codes:
        found.append(f"exit code {code}, not {codes}")
    try:
        run(line, place / "again", root)
        theirs, ours = numbers_of(undisturbed), numbers_of(out)
        found += [f"{key} differs" for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)][:3]
    except RuntimeError as error:
        found.append(f"again: {error}")
    lines = [line for line in said.splitlines() if "mlm: " in line or "stopped by" in line]
    return found, f"{code}, steps {saved}: {'; '.join(found) or 'fine'} | {' | '.join(lines[-3:])}"


def write_rows(root: Path) -> None:
    draw, vocabulary = random.Random(0), ["the", "cat", "dog", "sea", "sat", "ran", "on", "mat", "who"]

    def text(least: int = 2, most: int = 7) -> str:
        return " ".join(draw.choices(vocabulary, k=draw.randint(least, most)))

    rows: dict[str, list[Any]] = {"documents": [{"text": text(30, 60)} for _ in range(200)]}
    for part in ("train", "validation", "test"):
        numbers = range(24 if part == "train" else 8)
        rows[f"sst2/{part}"] = [{"sentence": text(), "label": n % 2, "idx": n} for n in numbers]
    for name, lines in rows.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def main() -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts behind itself
    root, count, number = Path(tempfile.mkdtemp(prefix="torture-")), 0, 0
    write_rows(root)
    for name, line in MATERIAL.items():
        run(f"{line} out={name}", root / "made" / name, root)
    known: tuple[Iterable[str], ...] = (COMMANDS, LAYOUTS, PHASES, SIGNALS)
    for cell in sys.argv[1:]:
        pairs = zip(cell.split("/"), known, strict=True)
        for parts in product(*([*names] if part == "*" else part.split(",") for part, names in pairs)):
            number += 1
            found, outcome = judge(parts, root, root / f"cell-{number}")
            count += bool(found)
            print(f"{number} {'/'.join(parts)}: {outcome}", flush=True)
    print(f"{count} with findings; the runs stay in {root}")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
