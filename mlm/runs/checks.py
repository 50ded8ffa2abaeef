"""Checks of the settings of a training run."""

import math
from collections.abc import Callable
from dataclasses import asdict
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from mlm.config.imports import OwnCodeError, imported, is_path
from mlm.config.plain_yaml import problem_of
from mlm.config.tree import leaves, out_of_range, values_of
from mlm.data import files_present as present
from mlm.data.blend_checks import blend_problems
from mlm.data.config import SOURCES, DataConfig
from mlm.launch.rules.checks import (
    Rule,
    devices_exist,
    loss_scale_can_fall,
    lr_falls,
    min_lr_problem,
    problems_of,
)
from mlm.launch.rules.layout import (
    SPLIT_RULES,
    TRAIN_RULES,
    Launch,
    LayoutValues,
    batch_quantum,
    num_replicas,
)
from mlm.launch.rules.nearest import layout_problems
from mlm.models.config import KINDS, ModelConfig
from mlm.models.family import (
    data_problem,
    family_of,
    model_problem,
    pretraining_problem,
)
from mlm.models.shape import parameters_by_name
from mlm.optim.config import STABLE_DECAYS, MuonConfig, OptimizerConfig
from mlm.optim.groups import parse_groups
from mlm.optim.user import check_decay, check_optimizer, layout_problem
from mlm.parallel.config import ParallelConfig
from mlm.runs.config import PretrainConfig
from mlm.util.errors import Problem, escape_controls, format_value
from mlm.util.ownership import CHECKPOINTS

MOST_PROMPTS = 64
MOST_PADDING = 1 << 16  # rows that a saved model.vocab_multiple may add to the token table


def check_pretrain(
    config: PretrainConfig, *, world_size: int | None, local_devices: int | None
) -> list[Problem]:
    """Problems of a run; `world_size` is None without a launcher, `local_devices` None on CPU."""
    return pretraining_problems(config, Launch(world_size, local_devices))


def pretraining_problems(config: PretrainConfig, launch: Launch) -> list[Problem]:
    problems = problems_of(config, launch, TRAIN_RULES, PRETRAIN_RULES)
    return [*problems, *blend_problems(config.data)]


def saved_problems(config: PretrainConfig) -> list[Problem]:
    """Problems of a checkpoint's configuration, which is untrusted."""
    problems, model, values = list(out_of_range(config).values()), config.model, values_of(config)
    for key, leaf in leaves(PretrainConfig).items():
        value = values[key]
        if why := problem_of(value):
            problems.append(Problem((key,), f"{key}: {why}"))
        if leaf.shipped and value not in leaf.shipped and not is_path(value):
            problem = f"{key}={value[:40]!r} is neither shipped nor an import path"
            problems.append(Problem((key,), problem))
    if model.vocab_multiple > MOST_PADDING:
        problem = f"model.vocab_multiple={model.vocab_multiple} must be {MOST_PADDING} at most"
        problems.append(Problem(("model.vocab_multiple",), problem))
    if not problems and not model.options.get("head_dim") and model.hidden_size % model.num_heads:
        problem = f"model.num_heads={model.num_heads} does not divide model.hidden_size={model.hidden_size}"
        problems.append(Problem(("model.num_heads", "model.hidden_size"), problem))
    return [*problems, *filter(None, [model_problem(model)])]


def optimizer_works(config: Any, _: Launch) -> Problem | None:
    return _user_code_problem(check_optimizer, config.optimizer)


def _check_patterns(optimizer: OptimizerConfig, model: ModelConfig) -> None:
    """Raise OwnCodeError for patterns that fit no parameter of the model, built on the meta device."""
    named = {f"optimizer.groups: {names}": names for names, _ in parse_groups(optimizer.groups)}
    default = MuonConfig().matrices
    if optimizer.kind == "muon" and (model.kind not in KINDS or optimizer.muon.matrices != default):
        named[f"optimizer.muon.matrices={optimizer.muon.matrices}"] = optimizer.muon.matrices
    if not named or model_problem(model) is not None:
        return
    dims = {name: p.dim() for name, p in parameters_by_name(model).items()}
    for text, pattern in named.items():
        least = 2 if text.startswith("optimizer.muon") else 1
        names = [name for name in dims if dims[name] >= least]
        if not any(fnmatchcase(name, pattern) for name in names):
            noun = "matrix" if least > 1 else "parameter"
            problem = f"no {noun} of model.kind={model.kind} has such a name"
            fix = f"write a pattern of its names, such as {', '.join(names[1:4])}"
            raise OwnCodeError(f"{text}: {problem}; {fix}")


def optimizer_fits_layout(config: Any, _: Launch) -> Problem | None:
    """The problem of a layout that would change the updates of the user's optimizer."""
    try:
        return layout_problem(config.optimizer, config.parallel)
    except OwnCodeError:
        return None  # reported by `optimizer_works`


def _user_code_problem(check: Callable[..., object], *arguments: object) -> Problem | None:
    try:
        check(*arguments)
    except OwnCodeError as error:
        return error.problems[0]
    return None


def _warmup_ends(config: PretrainConfig, _: Launch) -> Problem | None:
    schedule, steps = config.schedule, config.train.steps
    warmup, cooldown = schedule.warmup_end(steps), schedule.cooldown_start(steps)
    if schedule.decay in STABLE_DECAYS:
        if cooldown >= min(warmup, steps):
            return min_lr_problem(config) if cooldown < steps else None
        return Problem(
            ("schedule.cooldown", "schedule.warmup_steps", "train.steps"),
            f"the last {steps - cooldown} of train.steps={steps} cool down, and warm-up takes {warmup} steps",
            f"use schedule.cooldown={max(0, steps - warmup)} or fewer",
        )
    if cooldown < steps:  # by a preset such as schedule=wsd
        return Problem(
            ("schedule.decay", "schedule.cooldown_share"),
            f"schedule.decay={schedule.decay}: falls to the end of the run, and a cooldown is set",
            f"use schedule.decay={' or '.join(STABLE_DECAYS)}, or schedule.cooldown_share=0",
        )
    end = schedule.decay_end(steps)
    if warmup < end:
        return None
    key = "train.steps" if schedule.decay_steps is None else "schedule.decay_steps"
    return Problem(
        ("schedule.warmup_steps", "schedule.decay_steps", "train.steps"),
        f"schedule.warmup_steps={warmup} must be below {key}={end}, where the decay ends",
        f"use schedule.warmup_steps={end - 1} or fewer",
    )


def _ramp_divides(config: PretrainConfig, launch: Launch) -> Problem | None:
    train = config.train
    if train.ramp_batch is None:
        return None
    start, increment, _ = train.ramp_batch
    batch_size, key = train.global_batch_size, "train.ramp_batch"
    quantum = batch_quantum(LayoutValues(values_of(config)), launch)
    if start % quantum or increment % quantum:
        problem = f"its sizes must be multiples of {quantum} samples, a micro-batch of each rank"
    elif start > batch_size or (batch_size - start) % increment:
        problem = f"{start} does not grow to train.global_batch_size={batch_size} by steps of {increment}"
    else:
        return None
    typed = f"{key}={format_value(train.ramp_batch)}"
    fix = f"use {key}={format_value((quantum, quantum, train.ramp_batch[2]))}"
    return Problem((key, "train.global_batch_size", "dp"), f"{typed}: {problem}", fix)


def _attention_serves(config: PretrainConfig, _: Launch) -> Problem | None:
    kind, dtype = config.attention, config.precision.dtype
    if kind not in ("flash", "cudnn"):
        return None
    if dtype in ("fp32", "fp64", "tf32"):
        return Problem(
            ("attention", "precision.dtype"),
            f"attention={kind} needs half precision, not precision.dtype={dtype}",
            "use attention=auto or precision=bf16",
        )
    model, resets = config.model, config.data.reset_attention
    family = family_of(model.kind)
    if kind == "cudnn" or (family.causal and not resets):
        return None
    why = "data.reset_attention=true" if resets else "the padding of this model"
    if not family.packs:
        return Problem(
            ("attention", "data.reset_attention"),
            f"attention=flash takes no mask, which {why} needs in a model.kind={model.kind}",
            "use attention=auto",
        )
    if model.attention_dropout > 0:
        return Problem(
            ("attention", "model.attention_dropout"),
            f"attention=flash has no dropout (model.attention_dropout={model.attention_dropout:g}) for "
            f"sequences of several lengths, which {why} makes",
            "use attention=auto or model.attention_dropout=0",
        )
    return None


COVERED: dict[str, dict[str, tuple[Any, ...]]] = {
    "fuse_accumulation": {
        "zero": (0,),
        "recompute": ("selective", "none", "budget"),
        "precision.dtype": ("bf16", "fp32", "fp64", "fp16", "tf32"),
    },
    "cuda_graphs": {
        "model.options.num_experts": (0, None),  # the host reads the row counts of experts
        "compile": (True, None),
        **dict.fromkeys(("tp", "cp", "pp", "vp"), (1,)),
        "pipeline": ("1f1b",),
        "zero": (0,),
        "recompute": ("selective", "none", "budget"),
        "fuse_accumulation": (False, None),
        "deterministic": (False,),
    },
    "cuda_graphs=stack": {  # kernels' generators, tensors that move, inputs that differ by pass
        "model.attention_dropout": (0,),
        "precision.dtype": ("bf16", "fp32", "fp64", "fp16", "tf32"),
        "lora.rank": (0,),
        "data.reset_attention": (False,),
        "data.reset_positions": (False,),
    },
    "exact": {  # all sums are made in one order
        "model.kind": ("gpt2", "llama", "bert", "roberta"),
        "model.head": ("language_model",),
        "model.options.balance": (None, "none", "bias", "sequence", "global_batch"),
        "model.options.kv_lora_rank": (None, 0),
        "model.options.logit_softcap": (None, 0),
        "lora.quantize": ("none",),
        "lora.dora": (False,),
        "optimizer.kind": ("adamw", "muon"),
        "tp_overlap": (None, 1),
        "recompute": ("none", "selective", "full"),
        "compile": (None, False),
        "cuda_graphs": (None, False),
        "fuse_accumulation": (None, False),
        "precision.dtype": ("bf16", "fp32", "fp64", "fp16", "tf32"),
        "train.ramp_batch": (None,),
        "train.sample_prompts": ((),),
        "data.reset_attention": (False,),
        "data.reset_positions": (False,),
    },
    "recompute=budget": {  # a graph of the compiler holds a whole layer
        "model.options.num_experts": (0, None),
        "compile": (True,),
        "cp": (1,),
        "pipeline": ("1f1b", "gpipe"),
    },
    "lora.quantize=nf4": {"zero": (0,), "compile": (False, None)},  # both take plain weights
}
"""Values of other keys that work with a switch (at a value); the first is the fix."""
OFF = {"exact": 0, "recompute": "full", "lora.quantize": "none"}


def conflict(switch: str, config: Any, _: object = None) -> Problem | None:
    """The problem of the first value that conflicts with a switch that is on."""
    values = values_of(config)
    values |= {f"model.options.{key}": value for key, value in (values.get("model.options") or {}).items()}
    key, _, on = switch.partition("=")
    if not (values.get(key) == on if on else values.get(key)):
        return None
    for other, covered in COVERED[switch].items():
        if other in values and values[other] not in covered:
            typed = (
                f"{key}={format_value(values[key])} does not go with {other}={format_value(values[other])}"
            )
            fix = f"use {key}={format_value(OFF.get(key, False))} or {other}={format_value(covered[0])}"
            return Problem((key, other), typed, fix)
    return None


SWITCH_RULES: tuple[Rule, ...] = tuple(partial(conflict, switch) for switch in COVERED)


def _exact_divides(config: PretrainConfig, launch: Launch) -> Problem | None:
    """The problem of sizes that the parts of exact=N do not divide."""
    exact, model, train, options = config.exact, config.model, config.train, config.model.options or {}
    if not exact or conflict("exact", config):
        return None
    (parts, shares), length = exact_parts(config), config.data.seq_length
    dp = num_replicas(config.parallel.replica, config.parallel.dp, launch)
    elements = train.micro_batch_size * length // shares * model.ffn_size // parts
    parallel, experts = config.parallel, int(options.get("num_experts") or 0)
    # Elements of the gates: per token, or per score.
    scores = 1 if options.get("z_loss") or options.get("shared_gate") else experts
    gates = train.micro_batch_size * length // (parts * shares) * scores
    # All rows of an expert in a micro-batch must be on one rank.
    expert_ranks = parallel.cp * (parallel.tp if parallel.expert_tp == 1 else 1) if experts else 1
    multiple = parallel.cp * PART_TOKENS * (2 if model.attention_dropout else 1)
    cp_fix = f"a divisor of {shares}"
    if shares == 1:
        cp_fix = f"1 (or a multiple of {multiple} for data.seq_length)" if model.kind in CAUSAL else "1"
    for key, value, is_fit, fix in (
        ("dist.device", config.dist.device, config.dist.device != "cuda", "cpu"),
        ("tp", config.parallel.tp, parts % config.parallel.tp == 0, f"a divisor of {parts}"),
        ("ep", parallel.ep, parallel.ep % expert_ranks == 0, f"a multiple of {expert_ranks}"),
        ("model.options.bias", "true", not (experts and options.get("bias")), "false"),
        ("cp", parallel.cp, shares % parallel.cp == 0, cp_fix),
        ("dp", dp, exact % dp == 0, f"a divisor of {exact}"),
        ("data.seq_length", length, length % parts == 0, f"a multiple of {parts}"),
        # Shares must hold whole SIMD vectors: a remainder is computed with another last bit.
        (
            "model.hidden_size",
            model.hidden_size,
            model.hidden_size % (16 * exact) == 0,
            f"a multiple of {16 * exact}",
        ),
        # So must the padded vocabulary's rows of each rank, for its biases.
        (
            "model.vocab_multiple",
            model.vocab_multiple,
            model.padded_vocab_size(parts) % (16 * exact) == 0,
            f"a multiple of {16 * exact // parts}",
        ),
        (
            "train.micro_batch_size",
            train.micro_batch_size,
            not (elements % 1024 or gates % 32),
            "a larger power of two",
        ),
    ):
        if not is_fit:
            problem = f"exact={exact} does not go with {key}={value}"
            return Problem(("exact", key), problem, f"use {fix} for it, or exact=0")
    return None


CAUSAL = ("gpt2", "llama")
PART_TOKENS = 128
"""Least tokens of a sequence part over cp, doubled with attention dropout: smaller parts make matrix products
and unfused attention slow."""


def exact_parts(config: PretrainConfig) -> tuple[int, int]:
    """Parts in which exact=N sums over tp and over cp: divisors of N, of heads and MLP, and of tokens.

    Bidirectional models have one part over cp.
    """
    model, exact = config.model, config.exact
    tokens = PART_TOKENS * (2 if model.attention_dropout else 1)
    shares = math.gcd(exact * tokens, config.data.seq_length) // tokens if model.kind in CAUSAL else 1
    kv_heads = int((model.options or {}).get("num_kv_heads") or model.num_heads)
    width = int((model.options or {}).get("expert_ffn_size") or model.ffn_size)
    return math.gcd(exact, model.num_heads, kv_heads, model.ffn_size, width), max(1, shares)


def context_problem(cp: int, model: ModelConfig, data: DataConfig) -> Problem | None:
    """The problem of a model, or of packed documents, that cp cannot split."""
    if cp == 1:
        return None
    if not family_of(model.kind).splits_sequences:
        why = f"model.kind={model.kind} has no attention over sequences that ranks split"
        return Problem(("cp", "model.kind"), f"cp={cp}: {why}", "use cp=1")
    if data.reset_attention:
        why = "data.reset_attention=true keeps documents apart, which attention over cp ranks does not"
        return Problem(("cp", "data.reset_attention"), f"cp={cp}: {why}", "use cp=1")
    return None


def _prompts_can_be_continued(config: PretrainConfig, _: Launch) -> Problem | None:
    prompts, key = config.train.sample_prompts, "train.sample_prompts"
    if not prompts:
        return None
    if not family_of(config.model.kind).causal:
        why = f"model.kind={config.model.kind} does not read from left to right"
        return Problem((key, "model.kind"), f"{key}: {why}", f"remove {key}")
    if len(prompts) > MOST_PROMPTS:
        return Problem((key,), f"{key}: {len(prompts)} prompts; {MOST_PROMPTS} is the limit", "choose some")
    for number, prompt in enumerate(prompts, start=1):
        if not prompt or problem_of(prompt) or any("\ud800" <= c <= "\udfff" for c in prompt):
            why = f"prompt {number} ({escape_controls(prompt[:40])}) is empty, or no text of a configuration"
            return Problem((key,), f"{key}: {why}", "use UTF-8 without control characters and ${")
    return None


def _adapters_have_a_base(config: PretrainConfig, _: Launch) -> Problem | None:
    if not config.lora.rank or config.ckpt is not None:
        return None
    problem = f"lora.rank={config.lora.rank}: adapters are trained beside the weights of a trained model"
    return Problem(("lora.rank", "ckpt"), problem, "set ckpt=… to one, or lora.rank=0")


def _average_is_of_whole_weights(config: PretrainConfig, _: Launch) -> Problem | None:
    if not (config.ema.decay and config.lora.rank):
        return None
    problem = f"ema.decay={config.ema.decay}: adapters have no average of their own"
    return Problem(("ema.decay", "lora.rank"), problem, "use ema.decay=0, or lora.rank=0")


def _first_weights_exist(config: PretrainConfig, _: Launch) -> Problem | None:
    """The problem of a missing `ckpt`. A run that has saved reads it only as the base of adapters."""
    is_resumed = config.checkpoint.from_mirror or has_saved(config.out)
    return None if is_resumed and not config.lora.rank else present.checkpoint(config.ckpt)


def has_saved(out: str) -> bool:
    return any(Path(out, CHECKPOINTS).glob("step-*"))


USER_CODE_RULES = (
    optimizer_works,
    lambda config, _: _user_code_problem(_check_patterns, config.optimizer, config.model),
    optimizer_fits_layout,
    lambda config, _: _user_code_problem(check_decay, config.schedule),
    lambda config, _: _user_code_problem(imported, "data.kind", config.data.kind, SOURCES.shipped, Callable),
)
"""Conditions of the user's code, except a model's family."""
SETTINGS_RULES = (
    _warmup_ends,
    _ramp_divides,
    lr_falls,
    loss_scale_can_fall,
    lambda config, _: model_problem(config.model),
    *USER_CODE_RULES,
    lambda config, _: pretraining_problem(config),
    lambda config, _: data_problem(config),
    _attention_serves,
    *SWITCH_RULES,
    _exact_divides,
    lambda config, _: context_problem(config.parallel.cp, config.model, config.data),
    _prompts_can_be_continued,
)
"""Conditions of the settings alone."""
PRETRAIN_RULES = (
    devices_exist,
    *SETTINGS_RULES,
    lambda config, _: present.corpus(config.data),
    lambda config, _: present.corpus_extras(config.data),
    _first_weights_exist,
    _adapters_have_a_base,
    _average_is_of_whole_weights,
)


def split_problems(model: ModelConfig, parallel: ParallelConfig) -> list[str]:
    """Problems of splitting a trained model's layers over tp, or of assigning them to pp and vp stages."""
    values = {f"model.{key}": value for key, value in asdict(model).items()} | asdict(parallel)
    names = {f"model.{key}": f"the checkpoint's {key}" for key in asdict(model)}
    return list(layout_problems(values, Launch(None, None), SPLIT_RULES, names=names))
