"""The commands that rewrite checkpoints: `mlm convert`, `reshard`, `import …` and `export …`."""

from mlm.cli.command import Command, check_out_file
from mlm.cli.convert.settings import (
    ExportGGUFConfig,
    ExportHFConfig,
    ImportHFConfig,
    ReshardConfig,
)
from mlm.convert.config import ConvertConfig
from mlm.data.files_present import HUB_NAME
from mlm.util.errors import Problem


def _check_hub_names(config: ExportHFConfig) -> list[Problem]:
    names = {"push": config.push, "base": config.base}
    return [
        Problem.at(key, name, "no name of a repository of the Hub", f"use {key}=OWNER/NAME")
        for key, name in names.items()
        if name is not None and not (HUB_NAME.fullmatch(name) and (key == "base" or "/" in name))
    ]


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
        preflight="mlm.convert.conversion:preflight",
        positional=("source", "out"),
        other_names=("import_megatron", "import_torchtitan", "export_megatron", "export_dcp"),
        summary="convert checkpoints between mlm, transformers, Megatron-LM and torchtitan",
        about="""Reads a checkpoint of any of these and writes it as any other, a tensor at a time, without
            running what is in it: pickles are read as data. Of Megatron-LM torch_dist and files of ranks are
            read. Every parameter and the settings of the model are compared with the source before the folder
            gets its name. Interrupted, the same command continues.""",
        examples="""
            # A model of transformers for Megatron-LM
            mlm convert models/llama ckpt/llama to=torch_dist
            # And back
            mlm convert ckpt/llama models/llama-back to=hf
            # A run of mlm for torchtitan
            mlm convert runs/llama dcp/llama to=torchtitan
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
            ours are compared on the same tokens (needs the extra mlm[hf]). Adapters that
            `peft` wrote become a run that names their base.""",
        examples="""
            # Import a GPT-2 of the Hub
            mlm import hf openai-community/gpt2 out=runs/gpt2
            # From a folder
            mlm import hf models/gpt2 out=runs/gpt2
        """,
    ),
    Command(
        name="export hf",
        spec=ExportHFConfig,
        target="mlm.cli.convert.run:run_export_hf",
        local_check=_check_hub_names,
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
        summary="export a Llama or its kin as a GGUF file for llama.cpp",
        about="""Writes weights and tokenizer as one file, by the package gguf (the extra mlm[gguf]). Adapters
            are added to the weights of their base.""",
        examples="""
            # Eight bits a weight
            mlm export gguf runs/laptop_chat out=model.gguf type=q8_0
        """,
    ),
)
