"""`mlm replay`: the step of an incident once more, on one process."""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from mlm.checkpoint.native.folders import CHECKPOINTS, find_saves
from mlm.checkpoint.native.run_state import LINEAGE, Lineage, Save
from mlm.config.build import from_dict
from mlm.data.sampler import MicroBatch, first_of_step
from mlm.launch.process import run_rank
from mlm.launch.rules.checks import problems_of
from mlm.launch.rules.layout import TRAIN_RULES, Launch
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.runs.checks import USER_CODE_RULES, saved_problems
from mlm.runs.config import PretrainConfig
from mlm.runs.corpora import train_dataset
from mlm.training.identity import PLACES, recorded_changes
from mlm.training.incidents.config import ReplayConfig, ReplayRun
from mlm.training.incidents.numbers import StepNumbers, decode, shared_numbers
from mlm.training.incidents.probe import Places, StepProbe, describe_places
from mlm.training.incidents.watcher import FILE, FORMAT, SUSPECT_HARDWARE
from mlm.training.memory import reuse_large_blocks
from mlm.training.observer import Observer, Observers
from mlm.training.resume import load_first_whole
from mlm.training.trainer import Trainer
from mlm.util.errors import ConfigError, CorruptFileError, UserError
from mlm.util.files import parse_json, read_bounded

MAX_BYTES = 1 << 22
REMEDY = "name a folder of out/incidents"


def run(config: ReplayConfig) -> None:
    """Replay the step of an incident. Raises UserError, also for a record that has no step to replay."""
    folder, record = read_incident(config.incident)
    if record.get("exact") is None:
        raise UserError(
            f"incident={config.incident}: {', '.join(record.get('kinds', ()))} is no incident of one step; "
            "read its README.md"
        )
    if record.get("finetuning"):
        raise UserError(
            f"incident={config.incident}: is of finetuning, whose rows `mlm replay` does not read; its "
            "README.md names the row"
        )
    try:
        saved = from_dict(PretrainConfig, dict(record["config"]))
        if problems := saved_problems(saved):
            raise ValueError(problems[0])
        # fields that `replay` reads later
        int(record["step"]), recorded_numbers(record), find_starts(record)
        decode(record["memory"], saved.incident.window)
    except CorruptFileError as error:
        raise CorruptFileError(f"{folder}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(f"{folder}: its record is damaged ({error}); take another incident") from error
    recompute = saved.parallel.recompute
    settings: dict[str, Any] = {field.name: getattr(saved, field.name) for field in fields(PretrainConfig)}
    settings |= {
        "out": str(folder.parent.parent),
        "parallel": ParallelConfig(dp=1, recompute="none" if recompute == "budget" else recompute),
        "dist": config.dist,
        "compile": False,
        "cuda_graphs": False,
        "profile": False,
    }
    spec = ReplayRun(**settings, folder=str(folder), second_precision=config.precision)
    if problems := problems_of(spec, Launch(None, None), TRAIN_RULES, USER_CODE_RULES):
        raise ConfigError(problems)
    run_rank("mlm.training.incidents.replay:replay", spec)


def read_incident(path: str) -> tuple[Path, dict[str, Any]]:
    """Return the folder of an incident and its record. Raises UserError, CorruptFileError."""
    folder = Path(path)
    if folder.is_file():
        folder = folder.parent
    file = folder / FILE
    try:
        record = parse_json(read_bounded(file, MAX_BYTES, REMEDY))
    except FileNotFoundError:
        raise UserError(f"incident={path}: holds no {FILE}; {REMEDY}") from None
    except OSError as error:
        raise UserError(f"incident={path}: {error.strerror} ({error.filename}); {REMEDY}") from None
    except ValueError as error:
        raise CorruptFileError(f"{file}: is damaged ({error}); take another incident") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise CorruptFileError(f"{file}: is no incident of this version; take another")
    return folder, record


class SkipSteps(Observer):
    """Skips the updates that the run skipped."""

    def __init__(self, steps: Sequence[int], trainer: Trainer) -> None:
        self.steps, self.trainer = steps, trainer

    def before_update(self, parts: object, grad_norm: object) -> bool:
        return self.trainer.step + 1 in self.steps


def replay(config: ReplayRun, ctx: ParallelContext) -> None:
    """Compute the step and print its numbers and places. Raises UserError."""
    if ctx.device.type == "cpu":
        reuse_large_blocks()
    _, record = read_incident(config.folder)
    step = int(record["step"])
    trainer: Trainer[MicroBatch] = Trainer(config, ctx)
    state = decode(record["memory"], config.incident.window)
    # the newest whole save that the incident descends from; None for initial weights
    root, (saves, may_begin) = Path(config.out, CHECKPOINTS), find_starts(record)
    start = load_first_whole(trainer, list(map(str, find_saves(root, saves))))
    reads_corpus = config.data.kind == "indexed" and step > 1
    if start is None and (config.ckpt is not None or not may_begin or reads_corpus):
        raise UserError(
            f"incident at step {step}: no checkpoint is left in {root} that it descends from and that had "
            "its settings; keep more with checkpoint.keep_every"
        )
    print(f"step {step} of {config.out}, replayed from {start or 'initial weights'}")

    # Train up to the step, without excluded samples and skipped updates.
    trainer.excluded_samples, train = state.ranges, config.train
    needed = first_of_step(
        trainer.consumed_samples,
        step - trainer.step,
        train.global_batch_size,
        state.ranges,
        train.ramp_batch,
    )
    with trainer.batches(train_dataset(trainer.config, needed, trainer.history)) as batches_of_steps:
        trainer.observers = Observers([SkipSteps(state.steps, trainer)])
        while trainer.step < step - 1:
            trainer.train_step(next(batches_of_steps))
        batches = next(batches_of_steps)
    for line in compare_with_record(record, *compute(trainer, batches)):
        print(line)

    if config.second_precision.dtype != config.precision.dtype:
        second = replace(config, precision=config.second_precision, compile=False)
        second_trainer: Trainer[MicroBatch] = Trainer(second, ctx)
        with torch.no_grad():
            for target, source in zip(second_trainer.shards, trainer.shards, strict=True):
                target.parameter.copy_(source.parameter)
        numbers, places = compute(second_trainer, batches)
        print(f"precision={second.precision.dtype}: {numbers}")
        for line in describe_places(places):
            print(f"  {line}")


def find_starts(record: dict[str, Any]) -> tuple[list[Save], bool]:
    """Return the saves that a replay may start from, newest first; and True if initial weights serve too.

    These are the incident's ancestors since a resumed run last changed a setting. Raises KeyError, TypeError,
    ValueError.
    """
    ancestors = Lineage.of(record).ancestors
    if len(ancestors) != len(record[LINEAGE]["ancestors"]):
        raise ValueError("no ancestors")
    changed = [int(change["step"]) for change in recorded_changes(record) if change["key"] not in PLACES]
    return [save for save in ancestors[::-1] if save.step >= max(changed, default=0)], not changed


def compute(trainer: Trainer, batches: Sequence[Any]) -> tuple[StepNumbers, Places]:
    parts, places = StepProbe(trainer).run(batches)
    return shared_numbers(trainer, parts, trainer.gradient_norm()), places


def compare_with_record(record: dict[str, Any], replayed: StepNumbers, places: Places) -> list[str]:
    """Return recorded and replayed numbers, with the places if the replay reproduces the incident.

    That is if numbers are equal up to rounding, or not finite in both.
    """
    recorded = recorded_numbers(record)
    pairs = [(recorded.loss, replayed.loss), (recorded.norm, replayed.norm)]
    is_equal, is_number = all(a.hex() == b.hex() for a, b in pairs), not any(math.isnan(a) for a, _ in pairs)
    same = "equal bit for bit" if is_number else "not a number again"
    lines = [f"then: {recorded}", f"now:  {replayed} ({same if is_equal else 'not equal bit for bit'})"]
    # Numbers of another layout or precision may differ by a tenth.
    if all(math.isclose(a, b, rel_tol=0.1) if math.isfinite(a) else not math.isfinite(b) for a, b in pairs):
        return [*lines, *describe_places(places)]
    is_transient = "second_pass" in record
    advice = SUSPECT_HARDWARE if is_transient else "suspect the hardware, or versions that changed"
    return [*lines, f"the data do not reproduce it: no sample is to blame; {advice}"]


def recorded_numbers(record: dict[str, Any]) -> StepNumbers:
    """Return loss and gradient norm of the incident. Raises KeyError, TypeError, ValueError."""
    return StepNumbers(*(float.fromhex(record["exact"][key]) for key in ("loss", "grad_norm")))
