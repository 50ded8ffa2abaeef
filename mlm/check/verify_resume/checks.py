"""What must hold between the settings of `mlm verify-resume`."""

import re
from dataclasses import fields, replace

from mlm.check.parity.config import comparable
from mlm.check.verify_resume.config import ResumedLayout, VerifyResumeConfig
from mlm.launch.checks import data_parallel_size
from mlm.parallel.config import ParallelConfig
from mlm.train.checks import check_pretrain

LAYOUT_KEYS = tuple(f.name for f in fields(ResumedLayout))
REMEDY = "; use "


def check_verify_resume(config: VerifyResumeConfig) -> list[str]:
    """Faults of both halves that show without a look at this host's devices."""
    anywhere = replace(config.dist, device="auto", backend="auto")
    return faults_here(replace(config, dist=anywhere), local_devices=None)


def faults_here(config: VerifyResumeConfig, *, local_devices: int | None) -> list[str]:
    """Faults of both halves: those the pretraining runs would have, and what makes them incomparable.

    `local_devices` counts this host's GPUs, None on CPU. A fault of the second half alone names resumed.tp
    where one of the first names tp. No remedy is a launcher's: what is killed must be on this host.
    """
    config = comparable(config)
    first, second = (
        check_pretrain(half, world_size=None, local_devices=local_devices, elsewhere=False)
        for half in (config, config.resumed_run())
    )
    chosen = tuple(config.resumed.chosen)
    later = [_of_resumed(fault, chosen) for fault in second if fault not in first]
    return [*first, *later] or _mask_faults(config)


def same_layout(config: VerifyResumeConfig, *, local_devices: int | None) -> bool:
    """Whether the second half computes as the first does, so that its numbers must have the same bits."""

    def filled_in(parallel: ParallelConfig) -> ParallelConfig:
        dp = data_parallel_size(parallel, world_size=None, local_devices=local_devices)
        return replace(parallel, dp=dp)

    return filled_in(config.parallel) == filled_in(config.resumed_parallel())


def _of_resumed(fault: str, chosen: tuple[str, ...]) -> str:
    """The fault of a resumed layout under the names one types: `resumed.tp=3 does not divide …`.

    What is wrong names the settings that were chosen; a remedy may choose others.
    """
    why, mark, remedy = fault.partition(REMEDY)
    return _prefixed(why, chosen) + mark + _prefixed(remedy, LAYOUT_KEYS)


def _prefixed(text: str, keys: tuple[str, ...]) -> str:
    return re.sub(rf"(?<![\w.])({'|'.join(keys)})=", r"resumed.\1=", text) if keys else text


def _mask_faults(config: VerifyResumeConfig) -> list[str]:
    """Dropout masks inside tensor-parallel regions are each tp rank's own (mlm/parallel/random.py)."""
    first, second, model = config.parallel, config.resumed_parallel(), config.model
    faults = []
    if model.attention_dropout and first.tp != second.tp:
        faults.append(
            f"model.attention_dropout={model.attention_dropout:g} draws other masks at "
            f"resumed.tp={second.tp} than at tp={first.tp}, so that losses differ by right; use "
            f"model.attention_dropout=0 or resumed.tp={first.tp}"
        )
    cuts = [parallel.tp if parallel.sequence_parallel else 1 for parallel in (first, second)]
    if model.hidden_dropout and cuts[0] != cuts[1]:
        faults.append(
            f"model.hidden_dropout={model.hidden_dropout:g} draws other masks where the sequence is cut into "
            f"{cuts[1]} than into {cuts[0]} (sequence_parallel, tp), so that losses differ by right; use "
            "model.hidden_dropout=0, or the same sequence_parallel and tp in both halves"
        )
    return faults
