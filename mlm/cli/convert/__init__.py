"""The commands that rewrite checkpoints: `mlm convert`, `reshard`, `import …` and `export …`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from mlm.cli.command import Command, check_out_file
from mlm.config.fields import POSITIVE, CheckpointPath, InputPath, OnlyIf, OutFolder, ResultFile
from mlm.convert.config import ConvertConfig, DType
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportHFConfig:
    """The run spec of `mlm import hf`: a Hugging Face model as a checkpoint to train, score or sample."""

    source: InputPath
    """Folder with config.json and model.safetensors, or the id of a model on the Hugging Face Hub."""
    out: OutFolder
    """Run directory to write: out/checkpoints/step-00000000 and the tokenizer."""
    base: CheckpointPath | None = None
    """Of a folder of peft's, the model that its adapters were trained on: a checkpoint, run directory, model
    folder or Hub id; null takes the one that it names."""
    revision: str | None = None
    """Branch, tag or commit on the Hub; null takes the default branch."""
    verify: bool = True
    """Compare logits with those of `transformers` on the same tokens, and refuse where they differ."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportMegatronConfig:
    """The run spec of `mlm export megatron`: a checkpoint that Megatron-LM starts from."""

    ckpt: CheckpointPath
    """Checkpoint (step-…) or run directory (its latest checkpoint; of a finetuned run the best)."""
    out: OutFolder
    """Folder to write, for --load: release/ and latest_checkpointed_iteration.txt."""
    format: Literal["torch_dist", "torch"] = "torch_dist"
    """torch_dist loads at any layout; torch is the classic one, of a file per rank."""
    tp: Annotated[TensorSize, OnlyIf("format", "torch")] = 1
    """Tensor-parallel size of format=torch."""
    pp: Annotated[PipelineSize, OnlyIf("format", "torch")] = 1
    """Pipeline-parallel size of format=torch."""
    dtype: DType = "float32"
    """Numbers to write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportDCPConfig:
    """The run spec of `mlm export dcp`: a folder that torch.distributed.checkpoint loads."""

    ckpt: CheckpointPath
    """Checkpoint (step-…) or run directory (its latest checkpoint; of a finetuned run the best)."""
    out: OutFolder
    """Folder to write: .metadata, __0_0.distcp, …"""
    names: Literal["torchtitan", "megatron"] = "torchtitan"
    """Names and order of rows: torchtitan's (of Llama 3 and Qwen 3), or Megatron Core's."""
    dtype: DType = "float32"
    """Numbers to write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportHFConfig:
    """The run spec of `mlm export hf`: a checkpoint as a folder that `transformers` loads."""

    ckpt: CheckpointPath
    """Checkpoint (step-…) or run directory (its latest checkpoint; of a finetuned run the best)."""
    out: OutFolder
    """Folder to write: config.json, model.safetensors (or several and their index), the tokenizer."""
    merge: bool = False
    """Of a run with adapters, add them to the weights of their base; else the adapters alone are written, as
    peft loads them."""
    max_file_gb: Annotated[float, POSITIVE] = 5.0
    """Largest .safetensors file, in 10^9 bytes; a larger model is split into several."""
    verify: bool = True
    """Compare logits with those of `transformers` on the same tokens, and refuse where they differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportGGUFConfig:
    """The run spec of `mlm export gguf`: a Llama, Mistral or Qwen as a file for llama.cpp."""

    ckpt: CheckpointPath
    """Checkpoint (step-…) or run directory (its latest checkpoint; of a finetuned run the best)."""
    out: ResultFile
    """File to write, such as model.gguf, with the tokenizer in it."""
    type: Literal["f32", "f16", "bf16", "q8_0"] = "f16"
    """Numbers of matrices: q8_0 is 8 bits and a scale for 32 of them. Vectors are float32."""
    verify: bool = True
    """Compare tokens and logits in llama.cpp before the file is named, where mlm[gguf-check] is installed."""


COMMANDS = (
    Command(
        name="reshard",
        spec=ReshardConfig,
        target="mlm.cli.convert.reshard:run",
        preflight="mlm.cli.convert.reshard:preflight",
        positional=("ckpt",),
        summary="rewrite a checkpoint for another layout, weights and optimizer state",
        about="""Reshards a checkpoint for tp, pp and vp, in one process and a memory that its largest tensor
            bounds: each rank of that layout then reads one file. Training needs no such step: any layout
            loads any checkpoint. The source is verified on the way.""",
        examples="""
            # Split a checkpoint for tp=4 pp=2
            mlm reshard --tp 4 --pp 2 ckpt=runs/shakespeare out=runs/resharded
            # Weights alone, in one file, to give away
            mlm reshard runs/shakespeare out=runs/weights --weights-only
        """,
    ),
    Command(
        name="convert",
        spec=ConvertConfig,
        target="mlm.cli.convert.run:run",
        preflight="mlm.cli.convert.run:preflight",
        positional=("source", "out"),
        summary="convert checkpoints between mlm, transformers, Megatron-LM and torchtitan",
        about="""Reads a checkpoint of any of these and writes it as any other, a tensor at a time, without
            running what is in it. Every parameter and the settings of the model are compared with the
            source before the folder gets its name. Interrupted, the same command continues.""",
        examples="""
            # A model of transformers for Megatron-LM
            mlm convert models/llama ckpt/llama to=torch_dist
            # And back
            mlm convert ckpt/llama models/llama-back to=hf
            # A checkpoint of torchtitan, which records no model
            mlm convert outputs/step-1000 runs/llama config=models/llama
        """,
    ),
    Command(
        name="import hf",
        spec=ImportHFConfig,
        target="mlm.cli.convert.run:run_import_hf",
        preflight="mlm.cli.convert.run:preflight_import_hf",
        positional=("source",),
        summary="import a Hugging Face GPT-2, BERT, Llama, Mistral or Qwen as a checkpoint",
        about="""Reads config.json, safetensors and the tokenizer of a folder or a Hub id, and writes a
            checkpoint of weights: any layout trains, scores or samples it. The logits of `transformers` and
            ours are compared on the same tokens (needs the extra mlm[hf]).""",
        examples="""
            # Import a GPT-2 of the Hub
            mlm import hf openai-community/gpt2 out=runs/gpt2
            # From a folder
            mlm import hf models/gpt2 out=runs/gpt2
        """,
    ),
    Command(
        name="import megatron",
        spec=ImportMegatronConfig,
        target="mlm.cli.convert.run:run",
        preflight="mlm.cli.convert.run:preflight",
        positional=("source",),
        summary="import a Megatron-LM GPT-2, BERT or Llama (torch_dist or rank files) as a checkpoint",
        about="""Makes one checkpoint of weights of a distributed (torch_dist) or classic (mp_rank_XX) one:
            any layout trains, scores or samples it. Adam's moments are taken where they are stored whole. Its
            files are pickles, read as data: what is no data is never run.""",
        examples="""
            # Import the newest iteration of a Megatron-LM run
            mlm import megatron checkpoints/gpt2_345m out=runs/gpt2_345m tokenizer=gpt2
        """,
    ),
    Command(
        name="export megatron",
        spec=ExportMegatronConfig,
        target="mlm.cli.convert.run:run",
        preflight="mlm.cli.convert.run:preflight",
        positional=("ckpt",),
        summary="export a checkpoint for Megatron-LM, as torch_dist or as classic rank files",
        about="Writes weights under Megatron Core's names, and the arguments of the model. Reads them again.",
        examples="""
            # Export a run's latest checkpoint
            mlm export megatron runs/shakespeare out=for_megatron
        """,
    ),
    Command(
        name="export dcp",
        spec=ExportDCPConfig,
        target="mlm.cli.convert.run:run",
        preflight="mlm.cli.convert.run:preflight",
        positional=("ckpt",),
        summary="export a checkpoint as a folder that torch.distributed.checkpoint loads",
        about="Writes weights under torchtitan's or Megatron Core's names. Reads them again.",
        examples="""
            # Export a Llama for torchtitan
            mlm export dcp runs/llama out=for_torchtitan
        """,
    ),
    Command(
        name="export hf",
        spec=ExportHFConfig,
        target="mlm.cli.convert.run:run_export_hf",
        preflight="mlm.cli.convert.run:preflight_export_hf",
        positional=("ckpt",),
        summary="export a checkpoint as a folder that transformers loads",
        about="""Writes config.json, safetensors (several with an index where one would be too large) and the
            tokenizer, loads them with `transformers` and compares logits (needs the extra mlm[hf]).""",
        examples="""
            # Export a run's latest checkpoint for `transformers`
            mlm export hf ckpt=runs/shakespeare out=exported
        """,
    ),
    Command(
        name="export gguf",
        spec=ExportGGUFConfig,
        target="mlm.cli.convert.run:run_export_gguf",
        local_check=check_out_file,
        preflight="mlm.cli.convert.run:preflight_export_gguf",
        positional=("ckpt",),
        summary="export a Llama, Mistral or Qwen as a GGUF file for llama.cpp",
        about="""Writes weights and tokenizer as one file, by the package gguf (the extra mlm[gguf]). Adapters
            are added to the weights of their base.""",
        examples="""
            # Eight bits a weight
            mlm export gguf runs/laptop_chat out=model.gguf type=q8_0
        """,
    ),
)
