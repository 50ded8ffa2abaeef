"""Training speed, MFU and memory: GPT-2 by micro-batch, each choice of kernels, presets and their peers.

What is measured is a line of settings, trained by `mlm` or by a peer: the same model of `transformers`,
compiled by layer, in a plain loop (autocast, its own loss, fused AdamW). In 8 bits torchao converts the
peer's linear layers, but the output layer. nanoGPT, compiled whole, is timed where its checkout is in
build/nanogpt.
"""

import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from bench.contenders import OPTIMIZER, adamw, imported, load_source, transformers_model
from bench.machine import synchronise
from torch import nn

from gpu.child import Case
from gpu.facts import compiler_problem
from gpu.shapes import freed, gpt2, init_on_device, loader_of
from gpu.waits import device_of
from mlm.cli.compose.composition import load_config
from mlm.data.sampler import MicroBatch
from mlm.models.shape import flops_per_token
from mlm.parallel.mesh import ParallelContext
from mlm.runs.config import PretrainConfig
from mlm.tracking.peak import memory_bytes, table_peak
from mlm.training import trainer

WARM_UP, SAMPLES, STEPS = 3, 3, 4
"""Steps before the first that counts, and samples of so many steps, with a wait for the device after each."""
FIRST = {"124m": 16, "355m": 8, "774m": 4, "1.2b": 4, "2.5b": 2}
"""Smallest micro-batch size measured; each next one is twice as large."""
MOST = 512
GAIN = 1.01
"""A larger micro-batch is the better one if it is so many times as fast."""
Step = Callable[[Sequence[MicroBatch]], object]
NANOGPT = Path(__file__).resolve().parents[2] / "build/nanogpt/model.py"
BATCH = r"train.global_batch_size=\1 train.micro_batch_size=\1"
SETTINGS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
STACKS, QUICK = (
    {name: re.sub(r"\bbatch=(\d+)", BATCH, words) for name, words in SETTINGS[kind].items()}
    for kind in ("stacks", "quick")
)


def run_stacks(case: Case) -> None:
    """A row each; one that fails is a problem and does not end the others."""
    for name, words in (QUICK if case.quick else STACKS).items():
        measure(case, "as shipped", words, {"model": name, "program": "mlm"})


def run_graphs(case: Case) -> None:
    """GPT-2 124M at 8 and 32 sequences by each form of graphs, and by nanoGPT."""
    for size in (2,) if case.quick else (8, 32):
        words = gpt2("124m", quick=case.quick, batch_size=size)
        for settings in SETTINGS["graphs"][: 1 if case.quick else None]:
            labels = {"sequences": size, "program": "mlm", "settings": settings}
            compiled = str(not case.quick).lower()
            measure(case, "graphs", f"{words} precision=bf16 compile={compiled} {settings}", labels)
        if NANOGPT.exists():
            labels = {"sequences": size, "program": "nanogpt", "settings": "compiled whole"}
            measure(case, "graphs", f"{words} precision=bf16", labels)
        else:
            case.note(f"nanoGPT is not compared: no {NANOGPT}")


def run_peers(case: Case) -> None:
    """The same of peers, which have no Muon."""
    for name, words in (QUICK if case.quick else STACKS).items():
        if "optimizer=" not in words:
            measure(case, "as shipped", words, {"model": name, "program": "transformers"})


def run_switches(case: Case) -> None:
    """Worth of each choice of kernels: the 1.2B step as shipped, and with one setting changed at a time."""
    can_compile = case.is_cuda and not compiler_problem()
    for words, count in SETTINGS["switches"][1:2] if case.quick else SETTINGS["switches"]:
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
            build = {"transformers": peer_step, "nanogpt": nanogpt_step}.get(
                labels.get("program", ""), own_step
            )
            return timed_row(case, table, config, build(config, device), labels)
    except Exception as error:
        text = str(error)
        # of PyTorch, of libraries and of the compiler
        is_out_of_memory = "out of memory" in text or "ALLOC_FAILED" in text
        if is_out_of_memory or isinstance(error, torch.OutOfMemoryError):
            case.row(table, **labels, result="out of memory")
        else:
            line = next((line.strip() for line in text.splitlines() if line.strip()), "")[:300]
            case.problem(f"{' '.join(map(str, labels.values()))}: {type(error).__name__}: {line}")
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
    with device:
        model = transformers_model(config.model)
    if config.precision.dtype == "fp8":
        convert = imported("torchao.float8").convert_to_float8_training
        convert(model, module_filter_fn=lambda module, name: "lm_head" not in name)
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    for layer in layers if config.compile is not False else ():
        layer.compile()
    return plain_step(model, config, device, lambda tokens: model(input_ids=tokens, labels=tokens).loss)


def nanogpt_step(config: PretrainConfig, device: torch.device) -> Step:
    """A step of the model by nanoGPT, compiled whole as its own script does."""
    source, shape = load_source(NANOGPT, "nanogpt_model"), config.model
    sizes = {"block_size": shape.max_positions, "vocab_size": shape.vocab_size, "n_layer": shape.num_layers}
    sizes |= {"n_head": shape.num_heads, "n_embd": shape.hidden_size}
    with device:
        model = source.GPT(source.GPTConfig(**sizes, dropout=shape.hidden_dropout, bias=True))
    if device.type == "cuda":
        model.compile()
    return plain_step(model, config, device, lambda tokens: model(tokens, tokens)[1])


def plain_step(
    model: nn.Module,
    config: PretrainConfig,
    device: torch.device,
    loss_of: Callable[[torch.Tensor], torch.Tensor],
) -> Step:
    """A step of a module in a plain loop: autocast, its own loss, fused AdamW."""
    parameters = list(model.train().parameters())
    optimizer, is_half = adamw(parameters), config.precision.dtype != "fp32"

    def step(batches: Sequence[MicroBatch]) -> None:
        optimizer.zero_grad()
        for batch in batches:
            tokens = batch.tokens.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=is_half):
                loss = loss_of(tokens) / len(batches)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER.clip_grad_norm)
        optimizer.step()

    return step


def timed_row(case: Case, table: str, config: PretrainConfig, step: Step, labels: dict[str, Any]) -> float:
    """Time the steps, and report their median in a row; return tokens/s."""
    device, batch = device_of(case), config.train.global_batch_size
    seconds, host = list[float](), list[float]()
    with loader_of(config, WARM_UP + SAMPLES * STEPS, pin_memory=case.is_cuda) as loader:
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
    products = [row for row in case.known("facts", "products") if row["unit"] == "bf16"]
    measured = max((row["best TFLOP/s"] * 1e12 for row in products), default=None)
    sheet = table_peak(torch.cuda.get_device_name(), "bf16") if case.is_cuda else None
    peaks = {"MFU, measured peak": measured, "MFU, data sheet": sheet and sheet.flops}
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


run_124m = partial(run_model, name="124m")
run_355m = partial(run_model, name="355m")
run_774m = partial(run_model, name="774m")
run_1_2b = partial(run_model, name="1.2b", dropouts=(0.0, 0.1))
run_2_5b = partial(run_model, name="2.5b", longer=True)
