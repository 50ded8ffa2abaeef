"""After a kill or a fault: is everything there that was published, is it right, does training go on?"""

import logging
import os
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mlm.checkpoint.native.folders import CHECKPOINTS, checkpoints, latest_checkpoint, latest_name
from mlm.checkpoint.native.verify import verify_checkpoint
from mlm.util.errors import UserError
from torture.runs import HALF, KEEP, STEPS, Reference, content

LEFTOVER = (".saving-", ".replaced-", ".latest-")


FINDINGS = {"checkpoints_lost": "lost", "silent_corruptions": "silent", "other_findings": "other"}
"""Name in the record → field of Findings."""


@dataclass
class Findings:
    """Problems found, a line each; all empty if none."""

    lost: list[str] = field(default_factory=list)
    """Checkpoints that were published, kept by policy and untouched by the fault, and cannot be loaded."""
    silent: list[str] = field(default_factory=list)
    """Checkpoints that pass for whole, or training that goes on, with content that is not right."""
    other: list[str] = field(default_factory=list)
    """Anything else that should be otherwise: a message that names nothing, a run that does not go on."""

    def all(self) -> list[str]:
        """Every line."""
        return [f"{name}: {line}" for name in FINDINGS.values() for line in getattr(self, name)]


@dataclass
class Trial:
    """One round: a run directory of its own, and what was found."""

    reference: Reference
    out: Path
    rng: random.Random
    first: int = 1
    """The oldest step that it ever had a checkpoint of."""
    haste: float = 1.0
    """Factor on the time before a kill."""
    found: Findings = field(default_factory=Findings)
    note: str = ""
    """Actions taken, for the record."""

    @property
    def root(self) -> Path:
        return self.out / CHECKPOINTS

    def begin_halfway(self) -> None:
        """Let it be a run that stopped after step HALF."""
        self.reference.copy_half(self.out)
        self.first = HALF - KEEP + 1

    def published(self) -> set[int]:
        """The steps that `latest` and the policy promise now, of a run that saves each step."""
        name = latest_name(self.root)
        if name is None:
            return set()
        newest = int(name.removeprefix("step-"))
        return set(range(max(newest - KEEP + 1, self.first), newest + 1))

    def must_hold(self, steps: Iterable[int]) -> None:
        """Each of these steps must be there, whole, and right."""
        found = checkpoints(self.root)
        for step in steps:
            if step not in found:
                self.found.lost.append(f"step {step} is gone")
            elif problems := verify_checkpoint(found[step]).problems:
                self.found.lost.append(f"step {step}: {problems[0].file}: {problems[0].why}")

    def all_that_is_whole_is_right(self) -> None:
        """Check that checkpoints which pass verification have the content of the undisturbed run."""
        for step, path in checkpoints(self.root).items():
            if verify_checkpoint(path).whole and content(path) != self.reference.contents.get(step):
                self.found.silent.append(f"step {step} passes for whole and holds something else")

    def newest_is_whole(self) -> None:
        """Check that the checkpoint a run would start from is whole."""
        with quiet():
            try:
                newest = latest_checkpoint(self.root)
            except UserError as error:
                self.found.lost.append(f"no checkpoint can be loaded: {error}")
                return
        if newest is not None and not verify_checkpoint(newest).whole:
            self.found.other.append(f"{newest.name} would be loaded and is not whole")

    def after_kill(self) -> None:
        """All that holds after a kill: nothing is lost, nothing wrong passes, training ends the same."""
        self.must_hold(self.published())
        self.newest_is_whole()
        self.all_that_is_whole_is_right()
        self.goes_on()

    def goes_on(self, naming: str | None = None) -> None:
        """The same command again ends where the undisturbed run did; its output has `naming`."""
        job = self.reference.pretrain(self.out)
        if code := job.end():
            self.found.other.append(f"the run does not go on: exit code {code}: {last_line(job.said())}")
            return
        self.ends_right()
        if naming is not None and naming not in job.said():
            self.found.other.append(f"the run goes on without a word about {naming}")
        if left := [path.name for path in self.root.iterdir() if path.name.startswith(LEFTOVER)]:
            self.found.other.append(f"left behind: {', '.join(left)}")

    def ends_right(self) -> None:
        """The final checkpoint is that of the undisturbed run, bit for bit."""
        final = checkpoints(self.root).get(STEPS)
        if final is None:
            self.found.lost.append("the final checkpoint is not there")
        elif not verify_checkpoint(final).whole:
            self.found.lost.append("the final checkpoint is not whole")
        elif content(final) != self.reference.contents[STEPS]:
            self.found.silent.append("training ended with other weights")


def last_line(text: str) -> str:
    """The last line that says something."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "silent")


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings on the terminal."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def run_folder_writable_by_all(out: Path) -> None:
    """Let a child that gave up root write there."""
    for path in (out, *out.rglob("*")):
        os.chmod(path, 0o777 if path.is_dir() else 0o666)
