"""Settings of other programs that are no key here under another name: converted, automatic, or not offered.

A plain other name of a key stands beside its field (`Also` in fields.py). The table here is for the rest,
mostly flags of Megatron-LM: a value in another unit, one flag for several values, and capabilities that are
always on or not offered.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from mlm.config.tree import leaves, other_names

Typed = Mapping[str, str]
"""Values of a command line by plain name: `num_layers`, `model.num_layers`."""
Answer = Callable[[str, Typed], str]
"""answer(value, typed) -> what to write in place of the setting."""

A_RUN = "train.steps"
"""Key of the commands that an entry without keys is for."""
LAYERS = ("model.num_layers", "num_layers")
STAGES = ("pp", "pipeline_model_parallel_size")
BATCH = ("train.global_batch_size", "global_batch_size")
BETAS = {"adam_beta1": 0.9, "adam_beta2": 0.999}  # those of optimizer.betas where one is not typed


@dataclass(frozen=True)
class Elsewhere:
    """An answer to settings of another program."""

    names: tuple[str, ...]
    """Lower case, with underscores."""
    answer: str | Answer
    keys: tuple[str, ...] = ()
    """Keys that it concerns."""
    everywhere: bool = False
    """True if it holds for commands that do not train, too."""

    def of(self, value: str, typed: Typed) -> str:
        """The answer for one value."""
        return self.answer if isinstance(self.answer, str) else self.answer(value, typed)


def plain(name: str) -> str:
    """A setting's name as the tables have it: `--Clip-Grad` as clip_grad."""
    return name.lstrip("-+~").lower().replace("-", "_")


def elsewhere(cls: type, name: str) -> Elsewhere | None:
    """The entry for a name that is no key of this type of run spec; None if there is none."""
    return _table(cls).get(plain(name).rpartition(".")[2])


def keys_meant(cls: type, name: str) -> tuple[str, ...]:
    """Keys of a run spec that another program's name stands for, the likeliest first."""
    found = elsewhere(cls, name)
    return found.keys if found else other_names(cls).get(plain(name).rpartition(".")[2], ())


@cache
def _table(cls: type) -> dict[str, Elsewhere]:
    known = leaves(cls)
    return {
        name: entry
        for entry in TABLE
        if entry.everywhere or all(key in known for key in entry.keys or (A_RUN,))
        for name in entry.names
    }


def _number(typed: Typed, names: tuple[str, ...]) -> int | None:
    """The whole number typed under one of these names."""
    value = next((typed[name] for name in names if name in typed), "")
    return int(value) if value.isdecimal() else None


def _chunks(value: str, typed: Typed) -> str:
    layers, stages = _number(typed, LAYERS), _number(typed, STAGES)
    if value.isdecimal() and int(value) and layers and stages and layers % (stages * int(value)) == 0:
        return f"use vp={layers // (stages * int(value))}, a number of chunks"
    return f"use vp = model.num_layers / (pp * {value}), a number of chunks"


def _steps(value: str, typed: Typed) -> str:
    batch = _number(typed, BATCH)
    if value.isdecimal() and batch and int(value) % batch == 0:
        return f"use train.steps={int(value) // batch}"
    return f"use train.steps = {value} / train.global_batch_size"


def _warmup_of_samples(value: str, typed: Typed) -> str:
    return _steps(value, typed).replace("train.steps", "schedule.warmup_steps")


def _betas(value: str, typed: Typed) -> str:
    first, second = (typed.get(name, str(default)) for name, default in BETAS.items())
    return f"use 'optimizer.betas=[{first},{second}]'"


def _seconds(value: str, typed: Typed) -> str:
    try:
        return f"use dist.timeout_s={float(value) * 60:g} (seconds)"
    except ValueError:
        return "use dist.timeout_s=… (seconds)"


def corrected_blend(words: list[str]) -> str | None:
    """Megatron-LM's `0.3 wiki 0.7 web` as [0.3 wiki,0.7 web]; None for other lists."""
    if len(words) < 2 or len(words) % 2 or not all(_is_number(word) for word in words[::2]):
        return None
    if any(_is_number(word) for word in words[1::2]):
        return None
    pairs = zip(words[::2], words[1::2], strict=True)
    return f"[{','.join(f'{weight} {path}' for weight, path in pairs)}]"


def _corpora(value: str, typed: Typed) -> str:
    blend = corrected_blend(value.split())
    return f"use 'data.blend={blend}'" if blend else f"use data.path={value}"


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


OF_LLAMA = "a part of Llama, Mistral and Qwen (model=llama3_8b, …)"
NOT_OFFERED = "not offered"
OWN_CONFIG = "write your settings to DIR/experiment/NAME.yaml and type --config-dir DIR experiment=NAME"
AUTOMATIC = "leave it out: automatic"
ALWAYS = "leave it out: always on"
TABLE = (
    Elsewhere(("dry_run",), "--check checks the settings, and starts nothing", everywhere=True),
    Elsewhere(("print_config",), "--cfg job prints what would run, and stops", everywhere=True),
    Elsewhere(
        ("config", "config_file"),
        OWN_CONFIG,
        everywhere=True,
    ),
    # parallelism
    Elsewhere(("num_layers_per_virtual_pipeline_stage",), _chunks, ("vp",)),
    Elsewhere(("use_distributed_optimizer",), "use zero=2, which shards reduced gradients too", ("zero",)),
    Elsewhere(("world_size",), "leave it out: the launcher knows it; dp is what tp * cp * pp leave", ("dp",)),
    Elsewhere(
        ("expert_model_parallel_size", "num_experts"),
        f"{NOT_OFFERED}: there is no expert parallelism",
    ),
    Elsewhere(("cp",), f"{NOT_OFFERED}: plans have no context parallelism", ("gpus",)),
    Elsewhere(("overlap_grad_reduce",), f"{ALWAYS}: gradients are reduced while backward runs"),
    Elsewhere(("overlap_param_gather",), f"{NOT_OFFERED}: zero=2 gathers weights after the step"),
    Elsewhere(("recompute_activations",), "use recompute=selective", ("recompute",)),
    Elsewhere(
        ("recompute_method", "recompute_num_layers"),
        f"{NOT_OFFERED}: recompute=full recomputes every layer",
        ("recompute",),
    ),
    Elsewhere(("distributed_timeout_minutes",), _seconds, ("dist.timeout_s",)),
    # precision
    Elsewhere(("bf16",), "use precision=bf16", ("precision.dtype",)),
    Elsewhere(("fp16",), "use precision=fp16", ("precision.dtype",)),
    Elsewhere(
        ("loss_scale",),
        f"{NOT_OFFERED}: precision=fp16 scales the loss dynamically, from precision.initial_loss_scale on",
        ("precision.initial_loss_scale",),
    ),
    Elsewhere(
        ("accumulate_allreduce_grads_in_fp32",),
        f"{ALWAYS}: gradients, moments and master weights are float32",
    ),
    # data
    Elsewhere(
        ("tokenizer_type", "vocab_file", "merge_file", "tokenizer_model"),
        "use data.tokenizer=FILE, and model.vocab_size; a corpus of `mlm data build` holds its tokenizer",
        ("data.tokenizer",),
    ),
    Elsewhere(
        ("split",),
        "data is split when it is built: data.validation=PREFIX names the validation part",
        ("data.validation",),
    ),
    Elsewhere(("data_path", "train_data_path"), _corpora, ("data.path", "data.blend", "data.train")),
    Elsewhere(("valid_data_path",), "use data.validation=PREFIX", ("data.validation",)),
    Elsewhere(("num_workers", "dataloader_type"), AUTOMATIC),
    Elsewhere(("reset_position_ids",), "use data.reset_positions=true", ("data.reset_positions",)),
    Elsewhere(("reset_attention_mask",), "use data.reset_attention=true", ("data.reset_attention",)),
    Elsewhere(("eod_mask_loss",), "use data.mask_eod_loss=true", ("data.mask_eod_loss",)),
    # model
    Elsewhere(
        ("transformer_impl",),
        f"{AUTOMATIC}: `attention` and `compile` choose the kernels",
    ),
    Elsewhere(
        ("untie_embeddings_and_output_weights",),
        f"{OF_LLAMA}, unless model.options.tied=true; elsewhere it is the token embedding",
    ),
    Elsewhere(("swiglu",), f"{OF_LLAMA}: model.activation=silu"),
    Elsewhere(
        ("position_embedding_type", "use_rotary_position_embeddings"),
        f"{OF_LLAMA}: model.options.rope_theta, …; elsewhere positions are learned",
    ),
    Elsewhere(("kv_channels",), f"{OF_LLAMA}: model.options.head_dim"),
    Elsewhere(
        ("group_query_attention", "num_query_groups"),
        f"{OF_LLAMA}: model.options.num_kv_heads",
    ),
    Elsewhere(("normalization", "disable_bias_linear"), f"{OF_LLAMA}, which has RMSNorm and no biases"),
    Elsewhere(("make_vocab_size_divisible_by",), "use model.vocab_multiple", ("model.vocab_multiple",)),
    # optimizer and length
    Elsewhere(("adam_beta1", "adam_beta2"), _betas, ("optimizer.betas",)),
    Elsewhere(("lr_warmup_samples",), _warmup_of_samples, ("schedule.warmup_steps",)),
    Elsewhere(("train_samples",), _steps, ("train.steps",)),
    Elsewhere(
        ("rampup_batch_size",),
        f"{NOT_OFFERED}: train.global_batch_size is constant; a resumed run may have another",
        ("train.global_batch_size",),
    ),
    Elsewhere(
        ("exit_duration_in_mins", "exit_signal_handler"),
        f"{AUTOMATIC}: a signal, or SLURM's time limit, saves and stops",
    ),
    Elsewhere(("exit_interval",), f"{NOT_OFFERED}: train.steps ends a run, a signal saves and stops"),
    # checkpoints
    Elsewhere(("finetune",), "use ckpt=RUN and another out=…: training begins at step 0", ("ckpt",)),
    Elsewhere(
        ("use_checkpoint_args",),
        "leave it out: ckpt=RUN without model=… takes the checkpoint's model, resume=RUN all its settings",
        ("ckpt",),
    ),
    Elsewhere(("async_save",), "use checkpoint.asynchronous (true by default)", ("checkpoint.asynchronous",)),
    Elsewhere(("ckpt_format", "use_dist_ckpt"), "leave it out: there is one format"),
    # reports
    Elsewhere(("tensorboard_dir",), "use log.tensorboard=true (written below out)", ("log.tensorboard",)),
    Elsewhere(("log_throughput",), ALWAYS),
)
"""In the order of the pages that list them."""
