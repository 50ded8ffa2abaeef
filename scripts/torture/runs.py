"""The training runs that are tortured, and what their checkpoints must hold.

A GPT-2 of 4,560 parameters saves after each of its six steps and keeps two checkpoints. Its undisturbed run
is the reference: at every step, each tensor of any checkpoint of that layout must have the same bytes.
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file

from mlm.checkpoint.native.folders import CHECKPOINTS, checkpoints
from mlm.checkpoint.native.format import read_manifest
from mlm.cli import reshard
from mlm.cli.compose.arguments import find_command
from mlm.cli.compose.composition import load_config
from mlm.cli.entry import report
from mlm.cli.reshard import ReshardConfig
from mlm.launch.start import run_job
from mlm.runs.config import PretrainConfig
from mlm.training.preflight import preflight
from mlm.util.errors import ConfigError
from torture.children import LOAD, PLAIN, RESHARD, SAVE, Job, Manner, announced, start

STEPS, HALF, KEEP = 6, 3, 2
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "1 rank": (1, []),
    "tp=2": (2, ["tp=2"]),
    "dp=2 zero=2": (2, ["dp=2", "zero=2"]),
}
"""Name → ranks, settings."""
WORDS = [
    *("model=gpt2_tiny", "model.num_layers=1", "model.hidden_size=16", "model.num_heads=2"),
    *("model.max_positions=8", "model.vocab_size=60", "data=synthetic", f"train.steps={STEPS}"),
    *("train.global_batch_size=2", "train.micro_batch_size=1", "train.validate_every=0"),
    *("checkpoint.save_every=1", f"checkpoint.keep_last={KEEP}", "schedule=constant", "optimizer.lr=1e-2"),
    *("dist.device=cpu", "dist.timeout_s=60", "dist.peak_tflops=1", "log.every=1"),
]

Content = dict[str, str]
"""Digest of each tensor's bytes, and of the counters."""


def config_of(layout: str) -> PretrainConfig:
    """The run spec of a layout; `out` is to be replaced."""
    config: PretrainConfig = load_config("pretrain", [*WORDS, *LAYOUTS[layout][1], "out=unset"])
    return config


def content(path: Path) -> Content:
    """Content of a checkpoint, assembled by the safetensors library from the chunks in the manifest."""
    manifest = read_manifest(path)
    files = {name: load_file(path / name) for name in manifest.files}
    found = {}
    for name, entry in manifest.tensors.items():
        whole = torch.empty(entry.shape, dtype=entry.dtype)
        for chunk in entry.chunks:
            begin, size = chunk.region
            place = tuple(slice(b, b + n) for b, n in zip(begin, size, strict=True))
            whole[place] = files[chunk.file][name]
        found[name] = xxhash.xxh3_128_hexdigest(whole.numpy().tobytes())
    counters = ("step", "consumed_samples", "applied_steps", "scaler")
    return {**found, "counters": repr([manifest.state.get(key) for key in counters])}


@dataclass
class Reference:
    """The undisturbed run of a layout."""

    layout: str
    config: PretrainConfig
    contents: dict[int, Content]
    """Step → what its checkpoint holds."""
    half: Path
    """A run directory that stopped halfway, to be copied."""
    save_s: float
    load_s: float
    reshard_s: float
    """Seconds that a save takes, and a load, and a reshard, about."""

    @property
    def ranks(self) -> int:
        return LAYOUTS[self.layout][0]

    def pretrain(self, out: Path, *, steps: int = STEPS, manner: Manner = PLAIN) -> Job:
        """Start `mlm pretrain out=…`, without its command line."""
        config = replace(self.config, out=str(out), train=replace(self.config.train, steps=steps))
        log = out.with_suffix(".log")
        return start(
            lambda _: as_command("pretrain", lambda: _pretrain(config)), log, ranks=self.ranks, manner=manner
        )

    def copy_half(self, out: Path) -> Path:
        """A run that stopped after step HALF, with its newest two checkpoints."""
        shutil.copytree(self.half, out)
        return out


def as_command(name: str, work: Callable[[], int]) -> int:
    """The exit code that the command line makes of it."""
    command, _ = find_command([name])
    return report(command, work)


def _pretrain(config: PretrainConfig) -> int:
    if problems := preflight(config):
        raise ConfigError(problems)
    return run_job("mlm.cli.pretrain.run:run", config, out=Path(config.out))


def start_reshard(source: Path, out: Path, *, tp: int, manner: Manner = PLAIN) -> Job:
    """Start `mlm reshard`, without its command line."""
    config = ReshardConfig(ckpt=str(source), out=str(out), tp=tp)

    def work(pipe: int) -> int:
        if problems := reshard.preflight(config):
            raise ConfigError(problems)
        announced(reshard.run, RESHARD, pipe)(config)
        return 0

    return start(
        lambda pipe: as_command("reshard", lambda: work(pipe)), out.with_suffix(".log"), manner=manner
    )


def make_reference(layout: str, folder: Path) -> Reference:
    """Run a layout undisturbed, to the end and halfway. Raises RuntimeError if that fails."""
    made = Reference(layout, config_of(layout), {}, folder / "half", 0.0, 0.0, 0.0)
    kept = replace(made.config, checkpoint=replace(made.config.checkpoint, keep_last=STEPS))
    times = []
    folder.mkdir()
    for out, config, steps in ((folder / "whole", kept, STEPS), (made.half, made.config, HALF)):
        job = replace(made, config=config).pretrain(out, steps=steps)
        times += [seconds_between(job, LOAD), seconds_between(job, SAVE)]
        if code := job.end():
            raise RuntimeError(f"the undisturbed run of {layout} ended with {code}:\n{job.said()}")
    paths = checkpoints(folder / "whole" / CHECKPOINTS)
    contents = {step: content(path) for step, path in paths.items()}
    assert list(contents) == list(range(1, STEPS + 1))
    resumed = made.pretrain(made.copy_half(folder / "resumed"))
    load_s = seconds_between(resumed, LOAD)
    resumed.end()
    cut = start_reshard(made.half, folder / "cut", tp=2)
    reshard_s = seconds_between(cut, RESHARD)
    cut.end()
    return replace(made, contents=contents, save_s=max(times[1::2]), load_s=load_s, reshard_s=reshard_s)


def seconds_between(job: Job, letter: str) -> float:
    """Seconds from the first begin to the first end of what `letter` means."""
    job.wait_for(letter)
    begin = time.perf_counter()
    job.wait_for(letter.lower())
    return time.perf_counter() - begin


def describe(reference: Reference) -> dict[str, Any]:
    """For the record."""
    times = {name: round(getattr(reference, name), 4) for name in ("save_s", "load_s", "reshard_s")}
    return {"ranks": reference.ranks, **times}
