"""`mlm import megatron`: a Megatron-LM checkpoint, of either format, as ours."""

from dataclasses import asdict, dataclass
from typing import Annotated

from mlm.cli.command import Command
from mlm.cli.convert import run as convert
from mlm.config.fields import POSITIVE, InputPath, OutFolder
from mlm.convert.config import ConvertConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportMegatronConfig:
    """The run spec of `mlm import megatron`: a Megatron-LM checkpoint, of either format, as ours."""

    source: InputPath
    """Its folder (its newest iteration is taken), or an iter_… or release folder in it."""
    out: OutFolder
    """Run directory to write: out/checkpoints/step-00000000 and the tokenizer."""
    vocab_size: Annotated[int, POSITIVE] | None = None
    """Tokens of its tokenizer, without padding; null takes the tokenizer's, else GPT-2's or BERT's
    (50257; 30522 or 28996) where it fits."""
    num_heads: Annotated[int, POSITIVE] | None = None
    """Attention heads, for checkpoints of 2019, which do not record it; null takes theirs."""
    tokenizer: InputPath | None = None
    """tokenizer.json, or a folder with it, vocab.json and merges.txt, or vocab.txt, to put beside the
    checkpoint."""


def preflight(config: ImportMegatronConfig) -> list[str]:
    """Return what is wrong with the settings, the source and `out`; no tensor is read."""
    from mlm.convert import conversion

    return conversion.preflight(ConvertConfig(**asdict(config)), only=("torch_dist", "torch"))


def run(config: ImportMegatronConfig) -> None:
    """Import the checkpoint and print a table. Raises UserError; what is whole is kept then."""
    convert(ConvertConfig(**asdict(config)))


IMPORT_MEGATRON = Command(
    words=("import", "megatron"),
    spec=ImportMegatronConfig,
    target="mlm.cli.import_megatron:run",
    preflight="mlm.cli.import_megatron:preflight",
    positional=("source",),
    summary="import a Megatron-LM GPT-2, BERT or Llama (torch_dist or rank files) as a checkpoint",
    about=(
        "Makes one checkpoint of weights of a distributed (torch_dist) or classic (mp_rank_XX) one: "
        "any layout trains, scores or samples it. Adam's moments are taken where they are stored whole. "
        "Its files are pickles, read as data: what is no data is never run."
    ),
    examples=(
        (
            "Import the newest iteration of a Megatron-LM run",
            "mlm import megatron checkpoints/gpt2_345m out=runs/gpt2_345m tokenizer=gpt2",
        ),
    ),
)
