"""`mlm plan dry-run`: run a step of any rank of any layout here, on tensors without numbers."""

import logging
from pathlib import Path

from rich.console import Console

from mlm.plan.config import PlanDryRunConfig
from mlm.plan.dry_run_rank import DryRun, dry_run
from mlm.plan.dry_run_report import record, show
from mlm.util.errors import UserError
from mlm.util.results import target_name, write_result
from mlm.util.terminal import Screen


def run(config: PlanDryRunConfig, console: Console | None = None) -> DryRun:
    """Run the rank's step, print what it counted, write `out` where it is given.

    Raises UserError if `out` cannot be written.
    """
    console = console or Screen()
    for name in ("torch.distributed", "torch.nn.parallel"):  # advice for real groups
        logging.getLogger(name).setLevel(logging.ERROR)
    found = dry_run(config, config.rank)
    show(found, config, console)
    if config.out is not None:
        write(found, config)
        console.print(f"written to {target_name(config.out)}", soft_wrap=True, highlight=False, markup=False)
    return found


def write(found: DryRun, config: PlanDryRunConfig) -> None:
    """Write the record. Raises UserError."""
    assert config.out is not None
    try:
        Path(config.out).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"out={config.out}: {error.strerror} ({error.filename}): free space there, or set another out"
        ) from error
    write_result(config.out, record(found, config))
