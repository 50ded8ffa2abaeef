"""The commands `mlm reshard`, `mlm import` and `mlm export`."""

from mlm.config.command import Command
from mlm.convert.config import ExportHFConfig, ImportHFConfig, ImportMegatronConfig, ReshardConfig

COMMANDS = (
    Command(
        words=("reshard",),
        config="reshard",
        spec=ReshardConfig,
        target="mlm.convert.reshard:run",
        preflight="mlm.convert.reshard:preflight",
        positional=("ckpt",),
        summary="rewrite a checkpoint for another layout, weights and optimizer state",
        about=(
            "Reshards a checkpoint for tp, pp and vp, in one process and a memory that its largest tensor "
            "bounds: each rank of that layout then reads one file. Training needs no such step: any layout "
            "loads any checkpoint. The source is verified on the way; killed, the same command continues."
        ),
        examples=(
            (
                "Split a checkpoint for tp=4 pp=2",
                "mlm reshard --tp 4 --pp 2 ckpt=runs/shakespeare out=runs/resharded",
            ),
            (
                "Weights alone, in one file, to give away",
                "mlm reshard runs/shakespeare out=runs/weights --weights-only",
            ),
        ),
    ),
    Command(
        words=("import", "hf"),
        also=("convert",),
        config="import_hf",
        spec=ImportHFConfig,
        target="mlm.convert.import_hf:run",
        preflight="mlm.convert.import_hf:preflight",
        positional=("source",),
        summary="import a Hugging Face GPT-2, BERT, Llama, Mistral or Qwen as a checkpoint",
        about=(
            "Reads config.json, safetensors and the tokenizer of a folder or a Hub id, and writes a "
            "checkpoint of weights: any layout trains, scores or samples it. The logits of `transformers` "
            "and ours are compared on the same tokens (needs the extra mlm[hf])."
        ),
        examples=(
            ("Import a GPT-2 of the Hub", "mlm import hf openai-community/gpt2 out=runs/gpt2"),
            ("From a folder", "mlm import hf models/gpt2 out=runs/gpt2"),
        ),
    ),
    Command(
        words=("import", "megatron"),
        config="import_megatron",
        spec=ImportMegatronConfig,
        target="mlm.convert.import_megatron:run",
        preflight="mlm.convert.import_megatron:preflight",
        positional=("source",),
        summary="import a Megatron-LM GPT-2 or BERT (mp_rank_XX/model_optim_rng.pt) as a checkpoint",
        about=(
            "Merges the tensor and pipeline parts of a classic Megatron-LM checkpoint into one of weights: "
            "any layout trains, scores or samples it. The optimizer's state is left out. Its files are "
            "pickles: torch's weights-only reader reads them, and what is not data in them is never run."
        ),
        examples=(
            (
                "Import the newest iteration of a Megatron-LM run",
                "mlm import megatron checkpoints/gpt2_345m out=runs/gpt2_345m tokenizer=gpt2",
            ),
        ),
    ),
    Command(
        words=("export", "hf"),
        config="export_hf",
        spec=ExportHFConfig,
        target="mlm.convert.export_hf:run",
        preflight="mlm.convert.export_hf:preflight",
        positional=("ckpt",),
        summary="export a checkpoint as a folder that transformers loads",
        about=(
            "Writes config.json, safetensors (several with an index where one would be too large) and the "
            "tokenizer, loads them with `transformers` and compares logits (needs the extra mlm[hf])."
        ),
        examples=(
            (
                "Export a run's latest checkpoint for `transformers`",
                "mlm export hf ckpt=runs/shakespeare out=exported",
            ),
        ),
    ),
)
