"""Fit of a checkpoint to the tensors that are wanted, and which region of which file goes into which."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mlm.checkpoint.native.format import JSON, Manifest
from mlm.checkpoint.native.slices import Region, Shard
from mlm.util.errors import UserError

LISTED = 3  # problems that a message lists


@dataclass(frozen=True)
class Reading:
    """The part `region` of the stored `chunk` of tensor `name` goes into `target`, a view of that shape."""

    name: str
    dtype: torch.dtype
    chunk: Region
    region: Region
    target: Tensor


def plan_reading(manifest: Manifest, wanted: Mapping[str, Shard]) -> dict[str, list[Reading]]:
    """Return what to read of each file. The chunks tile each tensor, so every wanted element is read once."""
    readings: defaultdict[str, list[Reading]] = defaultdict(list)
    for name, shard in wanted.items():
        if name not in manifest.tensors or not shard.tensor.numel():
            continue
        entry, covered = manifest.tensors[name], 0
        for chunk in entry.overlapping(shard.region):
            if region := shard.region.intersect(chunk.region):
                target = shard.tensor.detach()[region.within(shard.region)]
                readings[chunk.file].append(Reading(name, entry.dtype, chunk.region, region, target))
                covered += region.volume
        assert covered == shard.tensor.numel(), f"{name}: {covered} of {shard.tensor.numel()} elements found"
    return dict(readings)


def check_fit(
    path: Path,
    manifest: Manifest,
    wanted: Mapping[str, Shard],
    unwanted: list[str],
    allow_missing: Callable[[str], bool] | None,
    cast: bool,
    config: Mapping[str, JSON],
) -> None:
    """Raise one UserError that lists the first few names, shapes and dtypes that differ."""
    problems = [f"{name} is not in it" for name in _missing(manifest, wanted, allow_missing)]
    problems += [f"{name} is in it, not here" for name in unwanted]
    problems += _shape_problems(manifest, wanted)
    what, remedy = "another model", "Set model=… as it was trained, or ckpt=… to another checkpoint"
    if not problems:
        problems = _dtype_problems(manifest, wanted, cast)
        what, remedy = "another precision", "Set precision=… as it was trained"
    if problems:
        listed = "; ".join(problems[:LISTED]) + (
            f"; and {len(problems) - LISTED} more" if problems[LISTED:] else ""
        )
        settings = "".join(f"; {line}" for line in _differing(config, manifest.state.get("config")))
        raise UserError(f"{path}: checkpoint of {what}: {listed}{settings}. {remedy}")


def _missing(
    manifest: Manifest, wanted: Mapping[str, Shard], allow_missing: Callable[[str], bool] | None
) -> list[str]:
    lacking = [name for name in wanted if name not in manifest.tensors]
    return [name for name in lacking if not (allow_missing and allow_missing(name))]


def _shape_problems(manifest: Manifest, wanted: Mapping[str, Shard]) -> list[str]:
    return [
        f"{name} has shape {list(shard.global_shape)} here, {list(manifest.tensors[name].shape)} there"
        for name, shard in wanted.items()
        if name in manifest.tensors and manifest.tensors[name].shape != tuple(shard.global_shape)
    ]


def _dtype_problems(manifest: Manifest, wanted: Mapping[str, Shard], cast: bool) -> list[str]:
    problems = []
    for name, shard in wanted.items():
        if name in manifest.tensors:
            here, there = shard.tensor.dtype, manifest.tensors[name].dtype
            convertible = cast and here.is_floating_point and there.is_floating_point
            if here != there and not convertible:
                problems.append(f"{name} is {here} here, {there} there")
    return problems


def _differing(here: Mapping[str, JSON], there: JSON) -> Iterator[str]:
    """The settings below `model` in which two configs differ."""
    mine, theirs = here.get("model"), there.get("model") if isinstance(there, dict) else None
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        for key in mine:
            if key in theirs and mine[key] != theirs[key]:
                yield f"model.{key} is {mine[key]} here, {theirs[key]} there"
