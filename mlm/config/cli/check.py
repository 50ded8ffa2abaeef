"""Checks that start nothing: `--check`, and the problems of what `--cfg job` has printed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlm.config.cli.commands import Command
from mlm.config.suggest import divisors
from mlm.parallel.layout_checks import RANKS_PER_NODE
from mlm.util.errors import Absent, Problem


@dataclass(frozen=True)
class Check:
    """Extent of a check: no process is started, no file is read or written."""

    gpus: int | None = None
    """GPUs to assume; None takes as many as the layout needs."""
    reports_absent: bool = True
    """False leaves out what is not there: devices, files, values that are still to be given."""

    def problems(self, command: Command, config: Any) -> Sequence[str]:
        """Problems of a command that runs on ranks, on GPUs that are assumed to be there."""
        assert command.check is not None
        if self.gpus is not None:
            return command.check(config, world_size=self.gpus, local_devices=RANKS_PER_NODE)
        one = replace(config, parallel=replace(config.parallel, dp=config.parallel.dp or 1))
        gpus = None if config.dist.device == "cpu" else max(ranks(config), RANKS_PER_NODE)
        return command.check(one, world_size=None, local_devices=gpus)

    def reported(self, problems: Iterable[Problem]) -> list[Problem]:
        """The problems that this check reports."""
        return [each for each in problems if self.reports_absent or not isinstance(each, Absent)]


def ranks(config: Any) -> int:
    """Ranks of a layout: tp * cp * pp * dp, with one replica where dp is left to the launcher."""
    layout = config.parallel
    return int(layout.replica * (layout.dp or 1))


def verdict(config: Any, check: Check, *, on_ranks: bool) -> str:
    """The line that `--check` prints of settings without problems."""
    if not on_ranks:
        return "no problems; would run in this process"
    layout, size = config.parallel, check.gpus or ranks(config)
    over_context = f" × cp={layout.cp}" if layout.cp > 1 else ""
    sizes = f"tp={layout.tp}{over_context} × pp={layout.pp} × dp={size // layout.replica}"
    line = f"would start {size} ranks: {sizes}{needs(config, size)}"
    if layout.dp is None and check.gpus is None:
        line += f"; dp takes what tp{' * cp' if layout.cp > 1 else ''} * pp leave: --check=N checks N GPUs"
    return line


def needs(config: Any, size: int) -> str:
    """Nodes and GPUs for a number of ranks; nothing where the CPU of one host will do."""
    each = max(number for number in divisors(size) if number <= RANKS_PER_NODE)
    if config.dist.device == "cpu" or (config.dist.device == "auto" and size == each):
        return ""
    nodes, gpus = size // each, f"{each} GPU{'s' * (each > 1)}"
    return f"; needs {nodes} nodes of {gpus}" if nodes > 1 else f"; needs {gpus} on one node"
