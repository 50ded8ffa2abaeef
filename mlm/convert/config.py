"""Settings of a conversion."""

from dataclasses import dataclass
from typing import Annotated, Literal

from mlm.config.fields import POSITIVE, InputPath, OnlyIf, OutFolder

DType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertConfig:
    """The run spec of `mlm convert`: a checkpoint of any format as one of any other."""

    source: InputPath
    """A run or checkpoint of mlm, a model folder of transformers, a Megatron-LM checkpoint (torch_dist or a
    file per rank), or a folder of torch.distributed.checkpoint with torchtitan's names."""
    out: OutFolder
    """Folder to write, a new one."""
    to: Literal["native", "hf", "torch_dist", "torchtitan"] = "native"
    """Format: native (a run of mlm), hf (transformers), torch_dist (Megatron-LM's), torchtitan (DCP with its
    names)."""
    dtype: DType = "float32"
    """Numbers to write; native is float32."""
    config: InputPath | None = None
    """Model of a source that does not record it (torchtitan's): a folder with config.json of transformers, or
    a run of mlm; null takes the source's own."""
    vocab_size: Annotated[int, POSITIVE] | None = None
    """Tokens of a Megatron-LM source, without padding; null takes the recorded, or a published size."""
    num_heads: Annotated[int, POSITIVE] | None = None
    """Attention heads, for Megatron-LM's checkpoints of 2019, which do not record it; null takes theirs."""
    tokenizer: InputPath | None = None
    """tokenizer.json, or a folder with it, vocab.json and merges.txt, or vocab.txt, to put into native and hf
    where the source has none."""
    max_file_gb: Annotated[float, POSITIVE, OnlyIf("to", "hf", "torchtitan")] = 5.0
    """Largest file of hf and DCP folders, in 10^9 bytes; a larger tensor has its own."""
    verify: bool = True
    """Compare every parameter and the settings of the model with the source; refuse where they differ."""
