"""Settings of `mlm reshard`, `import …` and `export …`; mlm/convert/config.py has `convert`'s."""

from dataclasses import dataclass
from typing import Annotated, Literal

from mlm.config.fields import POSITIVE, CheckpointPath, InputPath, OnlyIf, OutFolder, ResultFile
from mlm.parallel.config import PipelineSize, TensorSize, VirtualSize


@dataclass(frozen=True, kw_only=True, slots=True)
class ReshardConfig:
    """The run spec of `mlm reshard`: write a checkpoint again as another layout would."""

    ckpt: CheckpointPath
    """Checkpoint (step-…) or run directory (its latest checkpoint; of a finetuned run the best) to read."""
    out: OutFolder
    """Run directory to write: out/checkpoints/step-… and the tokenizer."""
    tp: TensorSize = 1
    """Tensor-parallel size, t: every stage becomes t files."""
    pp: PipelineSize = 1
    """Pipeline-parallel size, p."""
    vp: VirtualSize = 1
    """Virtual stages (chunks) per pipeline rank, v."""
    weights_only: bool = False
    """Leave the optimizer's moments out: a third of the size, to start runs from or to give away."""
    ema: bool = False
    """Write the moving average of the weights (ema.decay) in their place, alone: to evaluate, export or
    start from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportHFConfig:
    """The run spec of `mlm import hf`: a Hugging Face model as a checkpoint to train, score or sample."""

    source: InputPath
    """Folder with config.json and model.safetensors, or the id of a model on the Hugging Face Hub."""
    out: OutFolder
    """Run directory to write: out/checkpoints/step-00000000 and the tokenizer."""
    base: CheckpointPath | None = None
    """Base model of adapters in a folder of peft: a checkpoint, run directory, model folder or Hub id; null
    takes the one that the folder names."""
    revision: str | None = None
    """Branch, tag or commit on the Hub; null takes the default branch."""
    verify: bool = True
    """Compare logits with `transformers` on the same tokens, and write nothing if they differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportHFConfig:
    """The run spec of `mlm export hf`: a checkpoint as a folder that `transformers` loads."""

    ckpt: CheckpointPath
    """Checkpoint (step-…) or run directory (its latest checkpoint; of a finetuned run the best)."""
    out: OutFolder
    """Folder to write: config.json, model.safetensors (or several and their index), the tokenizer."""
    merge: bool = False
    """Add adapters to the weights of their base; false writes the adapters alone, as peft loads them."""
    max_file_gb: Annotated[float, POSITIVE] = 5.0
    """Largest .safetensors file, in 10^9 bytes; a larger model is split into several."""
    verify: bool = True
    """Compare logits with `transformers` on the same tokens, and write nothing if they differ."""
    push: str | None = None
    """Repository of the Hugging Face Hub to upload the folder to, too: OWNER/NAME; a new one is private."""
    public: Annotated[bool, OnlyIf("push")] = False
    """Let everybody read a new repository of `push`, or take one that everybody reads."""
    base: Annotated[str | None, OnlyIf("merge", "False")] = None
    """Name of the adapters' base on the Hub, OWNER/NAME; null takes the name or folder that they were trained
    on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportGGUFConfig:
    """The run spec of `mlm export gguf`: a Llama or its kin as a file for llama.cpp."""

    ckpt: CheckpointPath
    """Checkpoint (step-…) or run directory (its latest checkpoint; of a finetuned run the best)."""
    out: ResultFile
    """File to write, such as model.gguf, with the tokenizer in it."""
    type: Literal["f32", "f16", "bf16", "q8_0"] = "f16"
    """Numbers of matrices: q8_0 is 8 bits and a scale for 32 of them. Vectors are float32."""
    verify: bool = True
    """Compare tokens and logits in llama.cpp before the file is named, where mlm[gguf-check] is installed."""
