"""Hold the ranks of a rehearsed job in one phase until a file appears. Python imports it by this name.

REHEARSAL_FOLDER   holds `held-RANK`, which each held rank writes, and `released`, for which they wait
REHEARSAL_HOLD     the phase, a key of PLACES, `starting` or `importing`; `training:3` holds the third call
REHEARSAL_STEP_S   seconds added to each step, so that a run lasts long enough to be disturbed

Only the first attempt of a job is held and slowed: what is requeued runs through.
"""

import importlib.abc
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PLACES = {
    "rendezvous": ("mlm.launch.process", "rendezvous_store"),
    "loading": ("mlm.cli.pretrain.run", "resume"),
    "training": ("mlm.training.trainer", "Trainer.forward_backward"),
    "saving": ("mlm.training.saver", "Saver._write"),
    "validating": ("mlm.training.trainer", "Trainer.validate"),
}
LONGEST_S = 120.0
FOLDER = os.environ.get("REHEARSAL_FOLDER")
PHASE, _, CALL = os.environ.get("REHEARSAL_HOLD", "").partition(":")
STEP_S = float(os.environ.get("REHEARSAL_STEP_S", "0"))
RANK = os.environ.get("SLURM_PROCID", os.environ.get("RANK", "0"))


def hold() -> None:
    """Wait for the file, and note that this rank does."""
    folder, end = Path(str(FOLDER)), time.monotonic() + LONGEST_S
    (folder / f"held-{RANK}").touch()
    while not (folder / "released").exists() and time.monotonic() < end:
        time.sleep(0.05)


def changed(work: Callable[..., Any], before: Callable[[int], None]) -> Callable[..., Any]:
    """A function that calls `before` with the number of the call, then `work`."""
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        before(calls)
        return work(*args, **kwargs)

    return call


def change(module: Any, path: str, before: Callable[[int], None]) -> None:
    """Replace the function at `path` of a module."""
    *owners, name = path.split(".")
    owner = module
    for part in owners:
        owner = getattr(owner, part)
    setattr(owner, name, changed(getattr(owner, name), before))


def before_call(phase: str) -> Callable[[int], None]:
    """Hold in the call that REHEARSAL_HOLD names; one rank alone is late for the rendezvous."""

    def before(call: int) -> None:
        if call != int(CALL or 1):
            return
        if phase == "rendezvous" and RANK == "0":
            (Path(str(FOLDER)) / "held-0").touch()
            return
        hold()

    return before


class Finder(importlib.abc.MetaPathFinder):
    """Changes functions of modules when these are imported."""

    def __init__(self, changes: dict[str, list[tuple[str, Callable[[int], None]]]]) -> None:
        self._changes = changes
        self._has_held = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The module's own spec, with a loader that changes it afterwards."""
        if name == "torch" and PHASE == "importing" and not self._has_held:
            self._has_held = True
            hold()
        if not (changes := self._changes.pop(name, None)):
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            for place, before in changes:
                change(module, place, before)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def main() -> None:
    """Arrange it, in a rank of the first attempt."""
    is_rank = "mlm" in sys.orig_argv and "pretrain" in sys.orig_argv
    is_launcher = "torch.distributed.run" in sys.orig_argv
    if not is_rank or is_launcher or int(os.environ.get("SLURM_RESTART_COUNT") or 0):
        return
    changes: dict[str, list[tuple[str, Callable[[int], None]]]] = {}
    if PHASE in PLACES:
        module, place = PLACES[PHASE]
        changes.setdefault(module, []).append((place, before_call(PHASE)))
    if STEP_S:
        module, place = PLACES["training"]
        changes.setdefault(module, []).append((place, lambda call: time.sleep(STEP_S)))
    if changes or PHASE == "importing":
        sys.meta_path.insert(0, Finder(changes))
    if PHASE == "starting":
        hold()


if FOLDER:
    main()
