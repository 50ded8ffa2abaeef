"""Training speed, MFU and memory: GPT-2 by micro-batch, each choice of kernels, presets and their peers.

What is measured is a line of settings, trained by `mlm` or by a peer: the same model of `transformers`,
compiled by layer, in a plain loop (autocast, its own loss, fused AdamW). In 8 bits torchao converts the
peer's linear layers, but the output layer.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

import torch
from bench.contenders import OPTIMIZER, adamw, imported
from bench.ranks import synchronise
from torch import nn

from gpu.child import Case
from gpu.facts import compiler_problem, measured_peak, sheet_peak
from gpu.shapes import freed, gpt2, init_on_device
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

WARM_UP, SAMPLES, STEPS = 3, 3, 4
"""Steps before the first that counts, and samples of so many steps, with a wait for the device after each."""
FIRST = {"124m": 16, "355m": 8, "774m": 4, "1.2b": 4, "2.5b": 2}
"""Smallest micro-batch size measured; each next one is twice as large."""
MOST = 512
GAIN = 1.01
"""A larger micro-batch is the better one if it is so many times as fast."""
Step = Callable[[Sequence[MicroBatch]], object]
BATCH = "train.global_batch_size={0} train.micro_batch_size={0}"
STACKS = {
    "GPT-2 124M, 8 sequences": f"model=gpt2_124m {BATCH.format(8)}",
    "GPT-2 124M, 32 sequences": f"model=gpt2_124m {BATCH.format(32)}",
    "Llama 3 8B, 16 layers": f"model=llama3_8b model.num_layers=16 data.seq_length=8192 {BATCH.format(1)}",
    "Llama 3 8B, 16 layers, fp8": (
        f"model=llama3_8b model.num_layers=16 data.seq_length=8192 precision=fp8 {BATCH.format(1)}"
    ),
    "Qwen3 30B-A3B, 6 layers": (
        f"model=qwen3_30b_a3b model.num_layers=6 data.seq_length=4096 {BATCH.format(2)}"
    ),
    "GPT-2 2.5B": f"model=gpt2_2_5b {BATCH.format(4)}",
    "GPT-2 2.5B, fp8": f"model=gpt2_2_5b precision=fp8 {BATCH.format(4)}",
    "GPT-2 1.2B, Muon": f"model=gpt2_1_2b optimizer=muon {BATCH.format(8)}",
}
"""Settings as shipped, of presets of which a GPU holds some layers."""
QUICK = {
    "tiny": f"model=llama_tiny data.seq_length=64 compile=false {BATCH.format(2)}",
    "tiny mixture": f"model=moe_tiny data.seq_length=64 compile=false {BATCH.format(2)}",
}
SWITCHES = (
    ("", 1),
    ("compile=false", 1),
    ("cuda_graphs=true", 1),
    ("", 4),
    ("fuse_accumulation=false", 4),
    ("recompute=budget recompute_budget=0.5", 1),
    ("attention=flash", 1),
    ("attention=cudnn", 1),
    ("precision=fp8", 1),
    ("precision.cast=use", 1),
    ("deterministic=true", 1),
)
"""Settings and micro-batches of the 1.2B step, the most valuable first: its time may end before the last."""


def run_stacks(case: Case) -> None:
    """A row each; one that fails is a problem and does not end the others."""
    for name, words in (QUICK if case.quick else STACKS).items():
        measure(case, "as shipped", words, {"model": name, "program": "mlm"})


def run_peers(case: Case) -> None:
    """The same of peers, which have no Muon."""
    for name, words in (QUICK if case.quick else STACKS).items():
        if "optimizer=" not in words:
            measure(case, "as shipped", words, {"model": name, "program": "transformers"})


def run_switches(case: Case) -> None:
    """Worth of each choice of kernels: the 1.2B step as shipped, and with one setting changed at a time."""
    can_compile = case.is_cuda and not compiler_problem()
    for words, count in SWITCHES[1:2] if case.quick else SWITCHES:
        if case.is_cuda and not can_compile and words != "compile=false":
            continue
        shape = gpt2("1.2b", quick=case.quick, batch_size=2 if case.quick else 8, micro_batches=count)
        if not words.startswith("compile="):
            words = f"compile=true {words}".strip()
        measure(
            case, "speed", f"{shape} {words}", {"model": "1.2b", "micro-batches": count, "settings": words}
        )
        torch.use_deterministic_algorithms(False)


def run_model(case: Case, name: str, *, dropouts: Sequence[float] = (0.0,), longer: bool = False) -> None:
    """Eager at every size that fits, then compiled at the best; with dropout and with S=2048 where asked."""
    sizes = sizes_of(case, name)
    for dropout in dropouts:
        best = measure_sizes(case, name, sizes, dropout=dropout, compiled=False)
        if best == 0:
            return
        if case.is_cuda and (problem := compiler_problem()):
            case.note(f"not compiled: {problem}")
        elif case.is_cuda:  # compiling for a CPU takes minutes
            measure_sizes(case, name, [best], dropout=dropout, compiled=True)
        sizes = [max(1, best // 2), best]  # masks take memory too
    if longer:
        measure_sizes(case, name, sizes_of(case, name)[:3], seq_length=2048, compiled=False)


def sizes_of(case: Case, name: str) -> list[int]:
    sizes = [FIRST[name]]
    while sizes[-1] < MOST:
        sizes.append(2 * sizes[-1])
    return [1, 2] if case.quick else sizes


def measure_sizes(
    case: Case,
    name: str,
    sizes: Sequence[int],
    *,
    compiled: bool,
    dropout: float = 0.0,
    seq_length: int = 1024,
) -> int:
    """A row for each size until memory is out; return the best size, 0 if none fits."""
    best, speed = 0, 0.0
    for size in sizes:
        words = gpt2(name, quick=case.quick, batch_size=size, seq_length=seq_length, dropout=dropout)
        labels = {
            "model": name,
            "S": seq_length,
            "micro-batch": size,
            "dropout": dropout,
            "compiled": compiled,
        }
        tokens_per_s = measure(case, "speed", f"{words} compile={str(compiled).lower()}", labels)
        if tokens_per_s is None:
            break
        if tokens_per_s > speed * GAIN:
            best, speed = size, tokens_per_s
    return best


def measure(case: Case, table: str, words: str, labels: dict[str, Any]) -> float | None:
    """Tokens/s under a line of settings; None if they cannot run, which is a row or a problem as well."""
    count = WARM_UP + SAMPLES * STEPS
    line = [*words.split(), "data=synthetic", f"dist.device={case.device}", f"train.steps={count}"]
    try:
        with freed(case.device):
            config, device = load_config("pretrain", line), device_of(case)
            step = (
                peer_step(config, device)
                if labels.get("program") == "transformers"
                else own_step(config, device)
            )
            return timed_row(case, table, config, step, labels)
    except Exception as error:
        if is_out_of_memory(error):
            case.row(table, **labels, result="out of memory")
        else:
            case.problem(
                f"{' '.join(map(str, labels.values()))}: {type(error).__name__}: {first_line(error)}"
            )
        return None


def own_step(config: PretrainConfig, device: torch.device) -> Step:
    """A step of `mlm`, with weights drawn on the device."""
    saved, trainer.init_parameters = trainer.init_parameters, init_on_device
    try:
        trained: trainer.Trainer[MicroBatch] = trainer.Trainer(config, ParallelContext(device=device))
    finally:
        trainer.init_parameters = saved
    return trained.train_step


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


def timed_row(case: Case, table: str, config: PretrainConfig, step: Step, labels: dict[str, Any]) -> float:
    """Time the steps, and report their median in a row; return tokens/s."""
    device, batch = device_of(case), config.train.global_batch_size
    seconds, host = list[float](), list[float]()
    with Loader(
        train_dataset(config, (WARM_UP + SAMPLES * STEPS) * batch),
        consumed_samples=0,
        global_batch_size=batch,
        micro_batch_size=config.train.micro_batch_size,
        rank=0,
        size=1,
        pin_memory=case.is_cuda,
    ) as loader:
        begin = time.perf_counter()
        for batches in islice(loader, WARM_UP):
            step(batches)
        synchronise(device)
        warm_up_s = time.perf_counter() - begin
        if case.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(SAMPLES):
            begin = time.perf_counter()
            for number, batches in enumerate(islice(loader, STEPS)):
                step(batches)
                if number == 0:  # the host's time: a device queues about a thousand launches
                    host.append(time.perf_counter() - begin)
            synchronise(device)
            seconds.append((time.perf_counter() - begin) / STEPS)
    tokens = batch * config.data.seq_length
    flops = tokens * flops_per_token(config.model, config.data.seq_length) / median(seconds)
    peaks = {"MFU, measured peak": measured_peak(case), "MFU, data sheet": sheet_peak(case)}
    case.row(
        table,
        **labels,
        result="ok",
        **{
            "tokens/s": tokens / median(seconds),
            "TFLOP/s": flops / 1e12,
            **{name: flops / peak if peak else "" for name, peak in peaks.items()},
            "step ms": 1e3 * median(seconds),
            "spread": (max(seconds) - min(seconds)) / median(seconds),
            "host ms": 1e3 * min(host),
            "memory GB": memory_bytes(device) / 1e9,
            "warm-up s": warm_up_s,
        },
    )
    return tokens / median(seconds)


def is_out_of_memory(error: Exception) -> bool:
    """True for PyTorch's error and for those of libraries and of the compiler that mean the same."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "ALLOC_FAILED" in text


def first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:300]


run_124m = partial(run_model, name="124m")
run_355m = partial(run_model, name="355m")
run_774m = partial(run_model, name="774m")
run_1_2b = partial(run_model, name="1.2b", dropouts=(0.0, 0.1))
run_2_5b = partial(run_model, name="2.5b", longer=True)
