"""Run spec of `mlm reproduce`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from mlm.config.fields import Bound, Forbid, InputPath, OutFolder

SEEDS = Bound(lambda x: 1 <= x <= 100, "from 1 to 100")
CORES = Bound(lambda x: 1 <= x <= 4096, "from 1 to 4096")

Scale = Literal["laptop", "node", "paper"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReproduceConfig:
    """The run spec of `mlm reproduce`: experiments of the papers."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    name: str | None = None
    """Experiment, or `all`. Null lists them."""
    scale: Scale = "laptop"
    """laptop: minutes on two cores. node: the same on 8 GPUs, with larger models. paper: nothing is trained;
    the commands for a cluster, with the plan's times and cost."""
    out: OutFolder = "runs/reproduce"
    """Folder of all experiments; a later one takes from it what an earlier one has trained already."""
    seeds: Annotated[int, SEEDS] = 3
    """Seeds of each training run that is compared, from 1 on."""
    corpus: str = "auto"
    """Text to train on: debian, documentation of Debian packages; plays, Shakespeare's; auto, debian where
    its packages can be had; or the folder of a corpus by `mlm data build`."""
    wikitext: InputPath | None = None
    """WikiText-103's wiki.test.tokens, or another file of its form, for v1-table3; null leaves it out."""
    lambada: InputPath | None = None
    """LAMBADA's passages, .jsonl with `text`, for v1-table3; null leaves it out."""
    glue: InputPath | None = None
    """Folder of GLUE with sst2/train.jsonl and sst2/validation.jsonl, for v1-table5; null leaves finetuning
    out."""
    peer: InputPath | None = None
    """Checkout of nanoGPT, for nanogpt-shakespeare."""
    cores: Annotated[int, CORES] | None = None
    """Cores that steps share; null: all that this process may use."""
