"""The commands that look after checkpoints: see command.py. They run in this process, on files."""

from mlm.config.command import Command
from mlm.checkpoints.checks import check_numbers, check_out_file

CHECKPOINTS = (
    Command(
        words=("reshard",),
        config="reshard",
        target="mlm.convert.reshard:run",
        local_check=check_numbers,
        preflight="mlm.convert.reshard:preflight",
        positional=("ckpt",),
        summary="write a checkpoint again as another layout would, weights and optimizer state",
        about=(
            "Cuts a checkpoint anew for tp, pp and vp, in one process and a memory that its largest tensor "
            "bounds: each rank of that layout then reads one file. Training needs no such step: any layout "
            "loads any checkpoint. The source is verified on the way; killed, the same command goes on."
        ),
        examples=(
            ("For 4 x 2 ranks", "mlm reshard --tp 4 --pp 2 ckpt=runs/shakespeare out=runs/resharded"),
            (
                "Weights alone, in one file, to give away",
                "mlm reshard runs/shakespeare out=runs/weights --weights-only",
            ),
        ),
    ),
    Command(
        words=("ckpt", "inspect"),
        config="ckpt_inspect",
        target="mlm.checkpoints.inspect:run",
        local_check=check_out_file,
        positional=("ckpt",),
        summary="what is in a checkpoint: step, tokens, model, layout, tensors, files, configuration",
        about="Reads the manifest of a checkpoint, no tensor.",
        examples=(
            ("The latest of a run", "mlm ckpt inspect runs/shakespeare"),
            ("Every tensor of one", "mlm ckpt inspect runs/shakespeare/checkpoints/step-00000900 --tensors"),
        ),
    ),
    Command(
        words=("ckpt", "verify"),
        config="ckpt_verify",
        target="mlm.checkpoints.verify:run",
        local_check=check_out_file,
        positional=("ckpt",),
        summary="whether checkpoints are whole: every byte is read and compared with its digest",
        about="Reads every file of one checkpoint, or of all in a run. Ends with 0 if all are whole, else 1.",
        examples=(("All of a run", "mlm ckpt verify runs/shakespeare"),),
    ),
    Command(
        words=("ckpt", "diff"),
        config="ckpt_diff",
        target="mlm.checkpoints.diff:run",
        local_check=check_out_file,
        positional=("first", "second"),
        summary="how two checkpoints differ: settings, counters, tensors",
        about=(
            "Compares two checkpoints tensor by tensor, whatever layouts wrote them. Ends with 0 if all "
            "tensors are equal bit for bit, 1 if not."
        ),
        examples=(("Two runs", "mlm ckpt diff runs/shakespeare runs/longer"),),
    ),
    Command(
        words=("ckpt", "prune"),
        config="ckpt_prune",
        target="mlm.checkpoints.prune:run",
        local_check=check_numbers,
        positional=("ckpt",),
        summary="delete old checkpoints of a run",
        about=(
            "Keeps the newest whole checkpoints, multiples of keep_every, and the one `latest` names, and "
            "clears up after killed saves. A damaged checkpoint never counts as kept: it goes when keep_last "
            "whole ones are newer. Refused while a run uses the folder."
        ),
        examples=(
            ("What would go", "mlm ckpt prune runs/shakespeare keep_last=1 --dry-run"),
            ("Every ten thousandth, and the last", "mlm ckpt prune runs/longer keep_last=1 keep_every=10000"),
            ("Every byte of the two it keeps is read first", "mlm ckpt prune runs/shakespeare --verify"),
        ),
    ),
    Command(
        words=("import", "hf"),
        config="import_hf",
        target="mlm.convert.import_hf:run",
        preflight="mlm.convert.import_hf:preflight",
        positional=("source",),
        summary="a Hugging Face GPT-2 or BERT as a checkpoint",
        about=(
            "Reads config.json, safetensors and the tokenizer of a folder or a Hub id, and writes a "
            "checkpoint of weights: any layout trains, scores or samples it. The logits of `transformers` "
            "and ours are compared on the same tokens (needs the extra mlm[hf])."
        ),
        examples=(
            ("From the Hub", "mlm import hf openai-community/gpt2 out=runs/gpt2"),
            ("From a folder", "mlm import hf models/gpt2 out=runs/gpt2"),
        ),
    ),
    Command(
        words=("import", "megatron"),
        config="import_megatron",
        target="mlm.convert.import_megatron:run",
        preflight="mlm.convert.import_megatron:preflight",
        positional=("source",),
        summary="a Megatron-LM GPT-2 or BERT (mp_rank_XX/model_optim_rng.pt) as a checkpoint",
        about=(
            "Merges the tensor and pipeline parts of a classic Megatron-LM checkpoint into one of weights: "
            "any layout trains, scores or samples it. The optimizer's state is left out. Its files are "
            "pickles: torch's weights-only reader reads them, and what is not data in them is never run."
        ),
        examples=(
            (
                "Its newest iteration",
                "mlm import megatron checkpoints/gpt2_345m out=runs/gpt2_345m tokenizer=gpt2",
            ),
        ),
    ),
    Command(
        words=("export", "hf"),
        config="export_hf",
        target="mlm.convert.export_hf:run",
        preflight="mlm.convert.export_hf:preflight",
        positional=("ckpt",),
        summary="a checkpoint as a folder that transformers loads",
        about=(
            "Writes config.json, safetensors (several with an index where one would be too large) and the "
            "tokenizer, loads them with `transformers` and compares logits (needs the extra mlm[hf])."
        ),
        examples=(("A run's latest checkpoint", "mlm export hf ckpt=runs/shakespeare out=exported"),),
    ),
)
