"""What `mlm parity` is told: all that a pretraining run is told, and how much of it to compare."""

from dataclasses import dataclass, replace

from mlm.config.schema import ParallelConfig, PretrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityConfig(PretrainConfig):
    """The run spec of `mlm parity`: the first steps of a pretraining run, on its layout and on one rank."""

    out: str
    """Folder for parity.json, which holds every number compared."""
    ckpt: str | None = None
    """Checkpoint or run directory to take weights from, instead of the initial ones."""
    steps: int = 3
    """Optimizer steps compared. Two show the effect of a wrong update; more show nothing new."""

    def with_corpus(self) -> "ParityConfig":
        """Reading the corpus where one is named: random tokens are only what is there without."""
        if self.data.path is None and self.data.train is None:
            return self
        return replace(self, data=replace(self.data, kind="indexed"))

    def on_one_process(self) -> "ParityConfig":
        """The same run without any parallelism, recomputation or compilation."""
        return replace(self, parallel=ParallelConfig(dp=1), compile=False)
