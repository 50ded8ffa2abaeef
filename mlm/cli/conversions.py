"""The commands on checkpoints: `mlm ckpt …`, `mlm reshard`, `mlm convert`, `mlm import` and `mlm export`."""

from typing import Any

from mlm.cli.command import Command
from mlm.cli.conversion_settings import (
    CkptDiffConfig,
    CkptInspectConfig,
    CkptPruneConfig,
    CkptRollbackConfig,
    CkptVerifyConfig,
    ConvertConfig,
    ExportDCPConfig,
    ExportGGUFConfig,
    ExportHFConfig,
    ExportMegatronConfig,
    ImportHFConfig,
    ImportMegatronConfig,
    ReshardConfig,
)
from mlm.util.errors import Problem
from mlm.util.results import folder_problem


def check_out_file(config: Any) -> list[Problem]:
    """Return the problem of an `out` that cannot become a file, before anything is read."""
    problem = folder_problem(config.out)
    return [] if problem is None else [problem]


MAINTENANCE = (
    Command(
        words=("ckpt", "inspect"),
        also=("checkpoint",),
        spec=CkptInspectConfig,
        target="mlm.cli.ckpt.inspect:run",
        local_check=check_out_file,
        positional=("ckpt",),
        summary="show a checkpoint: step, tokens, model, layout, tensors, files, configuration",
        about="Reads the manifest of a checkpoint, no tensor.",
        examples=(
            ("Describe the latest checkpoint of a run", "mlm ckpt inspect runs/shakespeare"),
            ("Every tensor of one", "mlm ckpt inspect runs/shakespeare/checkpoints/step-00000900 --tensors"),
        ),
    ),
    Command(
        words=("ckpt", "verify"),
        spec=CkptVerifyConfig,
        target="mlm.cli.ckpt.verify:run",
        local_check=check_out_file,
        positional=("ckpt",),
        summary="check that checkpoints are whole: every byte is read and compared with its digest",
        about="Reads every file of one checkpoint, or of all in a run. Ends with 0 if all are whole, else 1.",
        examples=(("Check every checkpoint of a run", "mlm ckpt verify runs/shakespeare"),),
    ),
    Command(
        words=("ckpt", "diff"),
        spec=CkptDiffConfig,
        target="mlm.cli.ckpt.diff:run",
        local_check=check_out_file,
        positional=("first", "second"),
        summary="compare two checkpoints: step, state, tensors",
        about=(
            "Compares two checkpoints tensor by tensor, whatever layouts wrote them. Ends with 0 if all "
            "tensors are equal bit for bit, 1 if not."
        ),
        examples=(
            ("Compare the latest checkpoints of two runs", "mlm ckpt diff runs/shakespeare runs/longer"),
        ),
    ),
    Command(
        words=("ckpt", "prune"),
        spec=CkptPruneConfig,
        target="mlm.cli.ckpt.prune:run",
        positional=("ckpt",),
        summary="delete old checkpoints of a run",
        about=(
            "Keeps the newest whole checkpoints, multiples of keep_every, and the one `latest` names, and "
            "clears up after killed saves. A damaged checkpoint never counts as kept (those that count are "
            "read to the last byte): it is deleted when keep_last whole ones are newer. Rejected while a run "
            "uses the folder."
        ),
        examples=(
            (
                "List the checkpoints that pruning would delete",
                "mlm ckpt prune runs/shakespeare keep_last=1 --dry-run",
            ),
            ("Every ten thousandth, and the last", "mlm ckpt prune runs/longer keep_last=1 keep_every=10000"),
        ),
    ),
    Command(
        words=("ckpt", "rollback"),
        spec=CkptRollbackConfig,
        target="mlm.cli.ckpt.rollback:run",
        positional=("ckpt", "step"),
        summary="continue a run from an earlier checkpoint; newer ones are set aside",
        about=(
            "Points `latest` at a checkpoint, by default the newest good one: whole, finite, and older than "
            "the steps that were not finite. Newer ones are renamed aside-step-…, not deleted; until "
            "training continues, the same command with a newer step goes forward again. Rejected while a "
            "run uses the folder; a run whose mirror is rolled back uploads no more."
        ),
        examples=(
            ("Back to the newest good checkpoint", "mlm ckpt rollback runs/shakespeare"),
            ("Back to that of step 900", "mlm ckpt rollback runs/shakespeare 900"),
            ("In the store that a run's checkpoint.mirror names", "mlm ckpt rollback s3://bucket/runs/a 900"),
        ),
    ),
)

CONVERSION = (
    Command(
        words=("reshard",),
        spec=ReshardConfig,
        target="mlm.cli.reshard:run",
        preflight="mlm.cli.reshard:preflight",
        positional=("ckpt",),
        summary="rewrite a checkpoint for another layout, weights and optimizer state",
        about=(
            "Reshards a checkpoint for tp, pp and vp, in one process and a memory that its largest tensor "
            "bounds: each rank of that layout then reads one file. Training needs no such step: any layout "
            "loads any checkpoint. The source is verified on the way."
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
        words=("convert",),
        spec=ConvertConfig,
        target="mlm.cli.convert:run",
        preflight="mlm.cli.convert:preflight",
        positional=("source", "out"),
        summary="convert checkpoints between mlm, transformers, Megatron-LM and torchtitan",
        about=(
            "Reads a checkpoint of any of these and writes it as any other, a tensor at a time, without "
            "running what is in it. Every parameter and the logits of 64 tokens are compared with the source "
            "before the folder gets its name. Interrupted, the same command continues."
        ),
        examples=(
            ("A model of transformers for Megatron-LM", "mlm convert models/llama ckpt/llama to=torch_dist"),
            ("And back", "mlm convert ckpt/llama models/llama-back to=hf"),
            (
                "A checkpoint of torchtitan, which records no model",
                "mlm convert outputs/step-1000 runs/llama config=models/llama",
            ),
        ),
    ),
    Command(
        words=("import", "hf"),
        spec=ImportHFConfig,
        target="mlm.cli.import_hf:run",
        preflight="mlm.cli.import_hf:preflight",
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
        spec=ImportMegatronConfig,
        target="mlm.cli.convert:run",
        preflight="mlm.cli.convert:preflight",
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
    ),
    Command(
        words=("export", "megatron"),
        spec=ExportMegatronConfig,
        target="mlm.cli.convert:run",
        preflight="mlm.cli.convert:preflight",
        positional=("ckpt",),
        summary="export a checkpoint for Megatron-LM, as torch_dist or as classic rank files",
        about="Writes weights under Megatron Core's names, and the arguments of the model. Reads them again.",
        examples=(
            ("Export a run's latest checkpoint", "mlm export megatron runs/shakespeare out=for_megatron"),
        ),
    ),
    Command(
        words=("export", "dcp"),
        spec=ExportDCPConfig,
        target="mlm.cli.convert:run",
        preflight="mlm.cli.convert:preflight",
        positional=("ckpt",),
        summary="export a checkpoint as a folder that torch.distributed.checkpoint loads",
        about="Writes weights under torchtitan's or Megatron Core's names. Reads them again.",
        examples=(("Export a Llama for torchtitan", "mlm export dcp runs/llama out=for_torchtitan"),),
    ),
    Command(
        words=("export", "hf"),
        spec=ExportHFConfig,
        target="mlm.cli.export_hf:run",
        preflight="mlm.cli.export_hf:preflight",
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
    Command(
        words=("export", "gguf"),
        spec=ExportGGUFConfig,
        target="mlm.convert.gguf.export:run",
        local_check=check_out_file,
        preflight="mlm.convert.gguf.export:preflight",
        positional=("ckpt",),
        summary="export a Llama, Mistral or Qwen as a GGUF file for llama.cpp",
        about=(
            "Writes weights and tokenizer as one file, by the package gguf (the extra mlm[gguf]). Adapters "
            "are added to the weights of their base."
        ),
        examples=(("Eight bits a weight", "mlm export gguf runs/laptop_chat out=model.gguf type=q8_0"),),
    ),
)
