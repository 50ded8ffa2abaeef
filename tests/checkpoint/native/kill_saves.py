"""Kills saves at every change of a file and at random: `python -m tests.checkpoint.native.kill_saves DIR`.

One interpreter forks a child per round, so that torch is imported once. Prints a JSON list of what went
wrong and the number of rounds.
"""

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mlm.checkpoint.native.save_load import latest_checkpoint
from tests.checkpoint.native.helpers import load, save, weights

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir")


def kill_at_operation(number: int) -> None:
    """SIGKILL this process as it is about to do its `number`-th operation that changes a file or folder.

    At those that read, the disk is as it will be at the next change.
    """
    count = 0

    def hook(event: str, args: Any) -> None:
        nonlocal count
        if event in CHANGES or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def killed_save(root: Path, step: int, value: float, arm: Callable[[], None]) -> bool:
    """Save in a child that `arm` makes kill itself; whether it was killed before it was done."""
    child = os.fork()
    if child == 0:
        arm()
        save(root, step, weights(value), keep_last=1)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def problems_after(root: Path, old: float, new: float) -> list[str]:
    """Problems of `root` after a killed save of `new` over the checkpoint `old`."""
    try:
        found = latest_checkpoint(root)
        if found is None:
            return ["no checkpoint is left"]
        tensors = weights(0.0)
        load(found, tensors)
        values = {float(v) for tensor in tensors.values() for v in tensor.flatten()}
        if len(values) != 1 or not values <= {old, new}:
            return [f"{found.name} holds {values}"]
        save(root, 9, weights(9.0), keep_last=1)
        left = sorted(path.name for path in root.iterdir())
        return [] if left == ["latest", "step-00000009"] else [f"left behind: {left}"]
    except Exception as e:
        return [f"{type(e).__name__}: {e}"]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    problems, rounds = [], {"new step": 0, "same step": 0, "random": 0}
    for kind, step in (("new step", 2), ("same step", 1)):
        killed = True
        while killed:
            rounds[kind] += 1
            root = folder / f"{step}-{rounds[kind]}"
            save(root, 1, weights(1.0))
            number = rounds[kind]
            killed = killed_save(root, step, 2.0, lambda number=number: kill_at_operation(number))
            problems += [
                f"{kind}, operation {number}: {problem}" for problem in problems_after(root, 1.0, 2.0)
            ]
    for number in range(20):
        rounds["random"] += 1
        root, seconds = folder / f"r-{number}", random.uniform(0.0, 0.004)
        save(root, 1, weights(1.0))
        # From another thread of the child, at any instant of its save.
        kill = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL))
        killed_save(root, number % 2 + 1, 2.0, kill.start)
        problems += [f"after {seconds} s: {problem}" for problem in problems_after(root, 1.0, 2.0)]
    print(json.dumps({"problems": problems, "rounds": rounds}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
