"""Training speed with the settings as shipped: presets of which a GPU holds some layers, and their peers.

A peer is the same model of `transformers`, compiled by layer, in a plain loop: autocast, its own loss, fused
AdamW. In 8 bits torchao converts its linear layers, but the output layer.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from bench.contenders import OPTIMIZER, adamw, imported
from torch import nn

from gpu.child import Case
from gpu.facts import measured_peak, sheet_peak
from gpu.shapes import freed, init_on_device
from gpu.speed import first_line
from gpu.waits import device_of
from mlm.cli.compose.composition import load_config
from mlm.convert.huggingface.families import mapping_of
from mlm.convert.huggingface.mapping import TokenIds
from mlm.data.sampler import Loader, MicroBatch
from mlm.models.shape import flops_per_token
from mlm.parallel.mesh import ParallelContext
from mlm.runs.config import PretrainConfig
from mlm.runs.corpora import train_dataset
from mlm.tracking.peak import memory_bytes
from mlm.training import trainer

WARM_UP, STEPS = 3, 8
Step = Callable[[Sequence[MicroBatch]], object]
SIZES = "train.global_batch_size={0} train.micro_batch_size={0}"


@dataclass(frozen=True)
class Stack:
    name: str
    words: str


STACKS = (
    Stack("GPT-2 124M, 8 sequences", f"model=gpt2_124m {SIZES.format(8)}"),
    Stack("GPT-2 124M, 32 sequences", f"model=gpt2_124m {SIZES.format(32)}"),
    Stack(
        "Llama 3 8B, 16 layers", f"model=llama3_8b model.num_layers=16 data.seq_length=8192 {SIZES.format(1)}"
    ),
    Stack(
        "Llama 3 8B, 16 layers, fp8",
        f"model=llama3_8b model.num_layers=16 data.seq_length=8192 precision=fp8 {SIZES.format(1)}",
    ),
    Stack(
        "Qwen3 30B-A3B, 6 layers",
        f"model=qwen3_30b_a3b model.num_layers=6 data.seq_length=4096 {SIZES.format(2)}",
    ),
    Stack("GPT-2 2.5B", f"model=gpt2_2_5b {SIZES.format(4)}"),
    Stack("GPT-2 2.5B, fp8", f"model=gpt2_2_5b precision=fp8 {SIZES.format(4)}"),
    Stack("GPT-2 1.2B, Muon", f"model=gpt2_1_2b optimizer=muon {SIZES.format(8)}"),
)
QUICK = (
    Stack("tiny", f"model=llama_tiny data.seq_length=64 compile=false {SIZES.format(2)}"),
    Stack("tiny mixture", f"model=moe_tiny data.seq_length=64 compile=false {SIZES.format(2)}"),
)


def run(case: Case) -> None:
    """A row each; one that fails is a problem and does not end the others."""
    trainer.init_parameters = init_on_device
    for stack in QUICK if case.quick else STACKS:
        measure(case, stack, "mlm")


def run_peers(case: Case) -> None:
    """The same of peers, which have no Muon."""
    for stack in QUICK if case.quick else STACKS:
        if "optimizer=" not in stack.words:
            measure(case, stack, "transformers")


def measure(case: Case, stack: Stack, program: str) -> None:
    words = [
        *stack.words.split(),
        "data=synthetic",
        f"dist.device={case.device}",
        f"train.steps={WARM_UP + STEPS}",
    ]
    try:
        with freed(case.device):
            config, device = load_config("pretrain", words), device_of(case)
            if program == "mlm":
                trained: trainer.Trainer[MicroBatch] = trainer.Trainer(config, ParallelContext(device=device))
                report(case, stack, program, config, trained.train_step, bool(trained.settled.cuda_graphs))
                del trained
            else:
                report(case, stack, program, config, peer_step(config, device), False)
    except Exception as error:
        case.problem(f"{stack.name}, {program}: {type(error).__name__}: {first_line(error)}")


def peer_step(config: PretrainConfig, device: torch.device) -> Step:
    """A step of the model by `transformers`. Raises UserError without it or torchao."""
    transformers, mapping = imported("transformers"), mapping_of(config.model)
    assert mapping is not None
    known = mapping.write(config.model, TokenIds(eod=0, bos=0))
    settings = {key: value for key, value in known.items() if key not in ("architectures", "dtype")}
    with device:
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**settings, use_cache=False), attn_implementation="sdpa"
        )
    if config.precision.dtype == "fp8":
        convert = imported("torchao.float8").convert_to_float8_training
        convert(model, module_filter_fn=lambda module, name: "lm_head" not in name)
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    for layer in layers if config.compile is not False else ():
        layer.compile()
    parameters = list(model.train().parameters())
    optimizer, is_half = adamw(parameters), config.precision.dtype != "fp32"

    def step(batches: Sequence[MicroBatch]) -> None:
        optimizer.zero_grad()
        for batch in batches:
            tokens = batch.tokens.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=is_half):
                loss = model(input_ids=tokens, labels=tokens).loss / len(batches)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER.clip_grad_norm)
        optimizer.step()

    return step


def report(
    case: Case, stack: Stack, program: str, config: PretrainConfig, step: Step, has_graphs: bool
) -> None:
    device, batch = device_of(case), config.train.global_batch_size
    times: list[float] = []
    with Loader(
        train_dataset(config, (WARM_UP + STEPS) * batch),
        consumed_samples=0,
        global_batch_size=batch,
        micro_batch_size=config.train.micro_batch_size,
        rank=0,
        size=1,
        pin_memory=case.is_cuda,
    ) as loader:
        for batches in loader:
            begin = time.perf_counter()
            step(batches)
            if case.is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
    seconds = median(times[WARM_UP:])
    tokens = batch * config.data.seq_length
    flops = tokens * flops_per_token(config.model, config.data.seq_length) / seconds
    peaks = {"MFU, measured peak": measured_peak(case), "MFU, data sheet": sheet_peak(case)}
    case.row(
        "as shipped",
        model=stack.name,
        program=program,
        precision=config.precision.dtype,
        graphs=has_graphs,
        **{
            "step ms": 1e3 * seconds,
            "tokens/s": tokens / seconds,
            "TFLOP/s": flops / 1e12,
            **{name: flops / peak if peak else "" for name, peak in peaks.items()},
            "memory GB": memory_bytes(device) / 1e9,
            "first step s": times[0],
        },
    )
