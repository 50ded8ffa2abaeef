"""One bit flipped in one file of a run or its corpus, then every command that reads it.

A command may fail with a line, or warn and do what an undamaged one does; a result that differs without a
word is a silent corruption.
"""

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mlm.checkpoint.native.folders import checkpoints
from mlm.config.cli import main
from torture.children import start
from torture.runs import content

STEPS, HALF = 4, 2
RUN, CORPUS = Path("run"), Path("corpus")
MODEL = [
    *("model=gpt2_tiny", "model.num_layers=1", "model.hidden_size=16", "model.num_heads=2"),
    *("model.max_positions=16", "model.vocab_size=384"),
]
TRAIN = [
    *("pretrain", *MODEL, f"data.path={CORPUS}", f"out={RUN}", "train.global_batch_size=2"),
    *("train.micro_batch_size=2", "train.validate_every=0", "checkpoint.save_every=1"),
    *("checkpoint.keep_last=2", "schedule=constant", "optimizer.lr=1e-2", "dist.device=cpu", "log.every=1"),
]
SENTENCES = ("The river bends to the south.", "A lamp burns in the tower.", "No one has seen the fox.")


@dataclass(frozen=True)
class Command:
    """A command that reads what was damaged."""

    words: list[str]
    result: Callable[[Path], object]
    """A value equal for equal results, of the folder it ran in."""


def last_content(place: Path) -> object:
    """Tensors and counters of the newest checkpoint of the run."""
    return content(checkpoints(place / RUN / "checkpoints")[STEPS])


def losses(place: Path) -> object:
    """The numbers that `mlm eval loss` writes."""
    found = json.loads((place / "loss.json").read_text())
    return {key: found[key] for key in ("loss", "tokens") if key in found}


def exported(place: Path) -> object:
    """Bytes of each exported file."""
    return {path.name: path.read_bytes() for path in sorted((place / "exported").iterdir())}


COMMANDS = {
    "resume as typed": Command([*TRAIN, f"train.steps={STEPS}"], last_content),
    "resume by the saved settings": Command(
        ["pretrain", f"resume={RUN}", f"train.steps={STEPS}"],
        last_content,
    ),
    "generate": Command(
        [
            *("generate", f"ckpt={RUN}", "prompt=The river", "max_new_tokens=8", "temperature=0"),
            *("out=text.jsonl", "dist.device=cpu"),
        ],
        lambda place: (place / "text.jsonl").read_text(),
    ),
    "eval loss": Command(
        ["eval", "loss", f"ckpt={RUN}", f"path={CORPUS}/validation", "out=loss.json", "dist.device=cpu"],
        losses,
    ),
    "export": Command(["export", "hf", f"ckpt={RUN}", "out=exported", "verify=false"], exported),
}


@dataclass
class Flip:
    """One flipped bit and what came of it."""

    file: str
    bit: int
    """Number of the bit in the file."""
    verdicts: dict[str, str] = field(default_factory=dict)
    """Command → "rejected", "told", "equal", or what is wrong with it."""
    wrong: list[str] = field(default_factory=list)
    """A line for each command that differed in silence or ended in a traceback."""


@dataclass(frozen=True)
class Outcome:
    """Output and results of a command."""

    code: int
    said: str
    result: object


def execute(name: str, place: Path) -> Outcome:
    """Run a command in a forked child, in the folder `place`."""
    command, log = COMMANDS[name], place / "said.log"
    log.unlink(missing_ok=True)

    def work(_: int) -> int:
        os.chdir(place)
        return main(command.words)

    job = start(work, log)
    code = job.end()
    try:
        result = command.result(place) if code == 0 else None
    except (OSError, ValueError, KeyError) as error:
        result = f"no result: {error}"
    return Outcome(code, job.said(), result)


def make_template(place: Path) -> None:
    """A corpus, a tokenizer, and a run on it that stopped halfway. Raises RuntimeError if that fails."""
    rng = random.Random(0)
    (place / "text").mkdir(parents=True)
    with open(place / "text" / "all.jsonl", "w", encoding="utf-8") as f:
        for _ in range(60):
            text = " ".join(rng.choice(SENTENCES) for _ in range(12))
            f.write(json.dumps({"text": f"{rng.random()} {text}"}) + "\n")
    for words in (
        ["data", "tokenizer", "input=text", "vocab_size=300", "out=tokenizer.json"],
        [
            *("data", "build", "input=text", "tokenizer=tokenizer.json", f"out={CORPUS}", "recipe=plain"),
            *("split=0.8,0.2,0", "executor.workers=1"),
        ],
        [*TRAIN, f"train.steps={HALF}"],
    ):
        job = start(lambda _, words=words: (os.chdir(place), main(words))[1], place / "making.log")
        if code := job.end():
            raise RuntimeError(f"mlm {' '.join(words)} ended with {code}:\n{job.said()}")


def targets(template: Path) -> list[str]:
    """Every file of the run and the corpus, relative to the template."""
    found = [path for root in (RUN, CORPUS) for path in (template / root).rglob("*")]
    return sorted(str(path.relative_to(template)) for path in found if path.is_file() and path.stat().st_size)


def references(template: Path, folder: Path) -> dict[str, Outcome]:
    """Result of each command on the undamaged run."""
    found = {}
    for name in COMMANDS:
        place = folder / name.replace(" ", "-")
        shutil.copytree(template, place)
        found[name] = execute(name, place)
        if found[name].code or found[name].result is None:
            raise RuntimeError(f"{name}, undamaged, ended with {found[name].code}:\n{found[name].said}")
    return found


def flip_one(template: Path, place: Path, file: str, rng: random.Random) -> Flip:
    """A copy of the template with one bit of one file flipped."""
    shutil.copytree(template, place)
    damaged = bytearray((place / file).read_bytes())
    bit = rng.randrange(8 * len(damaged))
    damaged[bit // 8] ^= 1 << bit % 8
    (place / file).write_bytes(damaged)
    return Flip(file, bit)


def judge(flip: Flip, name: str, outcome: Outcome, reference: Outcome) -> None:
    """Enter what a command made of a damaged file."""
    if "Traceback (most recent call last)" in outcome.said:
        verdict = "traceback"
    elif outcome.code:
        verdict = "rejected" if outcome.code in (1, 2) else f"exit code {outcome.code}"
    elif outcome.result == reference.result:
        verdict = "equal"
    else:
        verdict = "told" if told(flip.file, outcome.said, reference.said) else "SILENTLY DIFFERENT"
    flip.verdicts[name] = verdict
    if verdict not in ("rejected", "told", "equal"):
        last = next((line for line in reversed(outcome.said.splitlines()) if line.strip()), "silent")
        flip.wrong.append(f"{flip.file}, bit {flip.bit}: {name}: {verdict}: {last[:200]}")


def told(file: str, said: str, usual: str) -> bool:
    """True if a line that an undamaged run does not print names the file or a key of the settings."""
    known = {re.sub(r"\d", "", line) for line in usual.splitlines()}
    new = [line for line in said.splitlines() if re.sub(r"\d", "", line) not in known]
    words = [Path(file).name]
    if file.endswith("config.yaml"):
        words += setting_names()
    return any(word in line for line in new for word in words)


def setting_names() -> list[str]:
    """Keys of a saved run that a changed digit or letter may concern."""
    from mlm.config.tree import leaves
    from mlm.training.config import PretrainConfig

    return [key for key in leaves(PretrainConfig) if "." in key]


def one_flip(template: Path, usual: dict[str, Outcome], folder: Path, file: str, rng: random.Random) -> Flip:
    """Flip one bit of a file and run every command, each on a copy of its own."""
    begin = folder / "damaged"
    flip = flip_one(template, begin, file, rng)
    for name, reference in usual.items():
        place = folder / "trial"
        shutil.copytree(begin, place)
        judge(flip, name, execute(name, place), reference)
        shutil.rmtree(place)
    shutil.rmtree(begin)
    return flip
