"""`mlm` in this process, with doubles for what starts ranks: no torch, no processes."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mlm.cli import main
from mlm.cli import run as cli_run
from mlm.launch.rules.layout import Launch


@dataclass
class Launched:
    """Record of what the command line asked for, instead of doing it."""

    facts: Launch = field(default_factory=lambda: Launch(world_size=None, local_devices=None))
    preflight: list[str] = field(default_factory=list)
    run: Callable[[], int] = lambda: 0
    targets: list[str] = field(default_factory=list)
    configs: list[Any] = field(default_factory=list)
    outs: list[Path | None] = field(default_factory=list)

    @property
    def config(self) -> Any:
        (only,) = self.configs
        return only

    def resolve(self, target: str) -> Any:
        """Stands for mlm.cli.entry.resolve."""
        name = target.partition(":")[2]
        known: dict[str, Any] = {
            "launch_facts": lambda dist: self.facts,
            "run_job": lambda target, config, *, out: self._note(target, config, out),
            "preflight": lambda config: self.preflight,
            "model_of_ckpt": lambda ckpt, out: None,
            "lines": lambda config, facts: [],  # of a forecast
        }
        return known.get(name, lambda config: self._note(target, config, None))

    def _note(self, target: str, config: Any, out: Path | None) -> int:
        self.targets.append(target)
        self.configs.append(config)
        self.outs.append(out)
        return self.run()


@dataclass
class Cli:
    launched: Launched
    capsys: pytest.CaptureFixture[str]
    out: str = ""
    err: str = ""

    def __call__(self, line: str) -> int:
        """Type `mlm LINE`; the exit code. Output is in `out` and `err`."""
        code = main(shlex.split(line))
        self.out, self.err = self.capsys.readouterr()
        return code


def make_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """A command line in an empty folder, as no rank of any launcher."""
    launched = Launched()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli_run, "resolve", launched.resolve)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    return Cli(launched, capsys)


def write(path: Path, text: str) -> None:
    """A file of the user's, in folders made for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
