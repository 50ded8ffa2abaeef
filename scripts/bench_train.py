"""Training speed and memory of `mlm`, `transformers`, nanoGPT and others, and of its layouts.

    python scripts/bench_train.py --shape tune
    python scripts/bench_train.py --family llama --shape 4x256 6x384
    python scripts/bench_train.py --family mixtral --shape 4x256
    python scripts/bench_train.py --shape report --contenders mlm mlm-mkl transformers --out results.json
    python scripts/bench_train.py --peers nanogpt=PATH --shape report --dtype fp32 bf16 --contenders all
    python scripts/bench_train.py --contenders mlm nanogpt-stock transformers-stock --peers nanogpt=PATH
    python scripts/bench_train.py --shape custom 4,512,8,512,8192,8 --contenders tp=2 pp=2,micro_batches=8

The same weights and tokens for all; losses and gradients are compared before anything is timed. Allocator
settings and optimizer are the same too, but for -stock, where each program has those it starts with.
A step is zero_grad, forward, backward, clip, optimizer step; compiling and preparing data come before. All
contenders take turns, a step at a time: ABC, CBA, ABC, … A fixed matrix product between any two steps shows
whether the machine changed. Wall and processor time are compared: with --threads 1 the latter is a result on
a busy machine too. scripts/results/README.md describes how to read and repeat results.

A contender of key=value,… is a layout of `mlm`, in processes that share the threads; `mlm
parity` compares its numbers. `micro_batches=N` splits the batch of a replica.

Exit code: 0 a result, 1 a run with doubts, 2 a mistake.
"""

import argparse
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch
from bench.compare import Plan, run_shape
from bench.harness import Bench, Result, Say, positive
from bench.layouts import parse_layout
from bench.llama import LlamaShape, MixtralShape
from bench.machine import PEERS, commit_of, gpu_facts
from bench.report import tables_of
from bench.shapes import Shape, shapes_of
from bench.spec import Spec
from bench.stats import MIN_PAIRS

from mlm.util.errors import UserError
from mlm.util.files import digest_file

CONTENDERS = {
    "mlm": "as `mlm pretrain` runs it",
    "transformers": "GPT2LMHeadModel (LlamaForCausalLM, …) as its configuration has it, sdpa attention",
    "nanogpt": "needs --peers nanogpt=PATH",
    "megatron": "Megatron Core's Mixtral (--family mixtral) as far as a CPU runs it",
}
VARIANTS = {
    "compiled": "mlm: each layer (compile=true); transformers, nanogpt: the model",
    "graphs": "mlm: each compiled layer replayed as a CUDA graph (cuda_graphs=true)",
    "stock": "as its README starts it: its own optimizer, the allocator as the system sets it",
    "erf": "nanogpt: its exact GELU, as it comes; else the tanh form, which all others compute",
    "mkl": "float32 products by torch.mm's library, so that the library's gain shows apart",
    "fp32": "in place of the first --dtype",
    "bf16": "the same; peers under torch.autocast, as nanogpt's users must add on a CPU",
}
DTYPES = {"fp32", "bf16"}
VARIANTS_OF = {
    "mlm": {"compiled", "graphs", "mkl", *DTYPES},
    "transformers": {"compiled", "stock", *DTYPES},
    "nanogpt": {"compiled", "stock", "erf", *DTYPES},
    "megatron": set(),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    shapes = "tune, tiny, report or some of it (on a CPU 2x64 4x256 6x384 12x768)"
    add("--shape", nargs="+", default=["tune"], metavar="WORD", help=f"{shapes}, or custom L,H,N,S,V,B")
    families = "of the model; llama and mixtral have the contenders mlm and transformers"
    add("--family", choices=("gpt2", "llama", "mixtral"), default="gpt2", help=families)
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    dtypes = "of activations; master weights are float32. Two: every contender in both"
    add("--dtype", nargs="+", choices=("fp32", "bf16"), default=["fp32"], help=dtypes)
    names = "NAME[-VARIANT…], layouts, or all: whatever can run here. The first of a dtype is its reference"
    add("--contenders", nargs="+", default=["mlm", "transformers"], help=names)
    add("--peers", nargs="+", default=[], metavar="NAME=PATH", help=f"checkouts: {', '.join(PEERS)}")
    add("--pairs", type=positive, default=MIN_PAIRS, help="pairs kept per comparison (default %(default)s)")
    add("--attempts", type=positive, help="rounds at most, dropped pairs included (default 3 * pairs)")
    add("--seconds", type=float, default=10.0, help="rounds continue at least this long (%(default)s s)")
    threads = len(os.sched_getaffinity(0))
    add("--threads", type=positive, default=threads, help="CPU threads of each contender")
    add("--no-memory", action="store_true", help="do not measure peak memory")
    add("--seed", type=int, default=1234, help="of weights and tokens")


def measure(args: argparse.Namespace, say: Say) -> Result:
    """Benchmark every shape asked for. Raises UserError."""
    peers = parse_peers(args.peers)
    plan = make_plan(args, peers)
    shapes: list[Shape] = list(shapes_of(args.shape, args.device))
    if args.family != "gpt2":
        kind = MixtralShape if args.family == "mixtral" else LlamaShape
        shapes = [kind.of(shape) for shape in shapes]
    spec = Spec(shapes[0], args.device, args.dtype[0], args.threads, args.seed, peers)
    spec.prepare_process()
    settings = {key: getattr(args, key) for key in ("device", "dtype", "seed", "family")}
    described = {}
    for name, folder in peers.items():  # where the checkout has no history, by the digest of its model
        model, has_history = Path(folder, PEERS[name]), Path(folder, ".git").exists()
        described[name] = commit_of(Path(folder)) if has_history else f"{model.name} {digest_file(model)}"
    return {
        "peers": described,
        "settings": settings | (gpu_facts() if args.device == "cuda" else {}),
        "shapes": [run_shape(replace(spec, shape=shape), plan, say) for shape in shapes],
    }


def parse_peers(words: list[str]) -> dict[str, str]:
    """NAME=PATH words as a dictionary. Raises UserError."""
    peers = {}
    for word in words:
        name, _, path = word.partition("=")
        if name not in PEERS or not path:
            raise UserError(f"--peers {word!r}: give NAME=PATH with NAME one of {', '.join(PEERS)}")
        if not Path(path).is_dir():
            raise UserError(f"--peers {word}: no such folder; give the path of a checkout")
        if not Path(path, PEERS[name]).is_file():
            raise UserError(f"--peers {word}: it has no {PEERS[name]}; give the path of a checkout")
        peers[name] = str(Path(path).resolve())
    return peers


def make_plan(args: argparse.Namespace, peers: dict[str, str]) -> Plan:
    """Who competes, from the options. Raises UserError."""
    names = list(args.contenders)
    if names == ["all"]:  # those whose checkouts and compiler are there, in all variants but the second dtype
        compiled = ("", "-compiled") if has_compiler(args.device) else ("",)
        programs = ["transformers", *peers]
        replayed = ("mlm-graphs",) if compiled[1:] and args.device == "cuda" else ()
        names = ["mlm", *(f"mlm{c}" for c in compiled[1:]), *replayed, "mlm-mkl"]
        names += [f"{name}{c}{stock}" for name in programs for c in compiled for stock in ("", "-stock")]
    names += [peer for peer in peers if not any(name.startswith(peer) for name in names)]
    for dtype in args.dtype[1:]:
        names += [f"{name}-{dtype}" for name in names if has_dtype(name, dtype)]
    names = list(dict.fromkeys(names))
    for name in names:
        check_contender(name, args, peers)
    return Plan(
        contenders=tuple(names),
        pairs=args.pairs,
        limit=args.attempts or 3 * args.pairs,
        seconds=args.seconds,
        memory=not args.no_memory,
    )


def has_dtype(name: str, dtype: str) -> bool:
    """True if a contender computes in another dtype too: its name holds none, and is no layout's."""
    base, *variants = name.split("-")
    return "=" not in name and not {"mkl", *DTYPES} & {*variants} and dtype in VARIANTS_OF.get(base, ())


def has_compiler(device: str) -> bool:
    if device == "cuda":
        from torch.utils._triton import has_triton  # loads the compiler

        return has_triton()
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def check_contender(name: str, args: argparse.Namespace, peers: dict[str, str]) -> None:
    """Raise UserError for a contender that is not there."""
    if "=" in name:
        parse_layout(name)
        return
    base, *variants = name.split("-")
    if base not in CONTENDERS:
        raise UserError(f"--contenders {name!r} is unknown: use a layout, or some of {', '.join(CONTENDERS)}")
    if unknown := [word for word in variants if word not in VARIANTS_OF[base]]:
        known = ", ".join(sorted(VARIANTS_OF[base]))
        raise UserError(f"--contenders {name}: {base} has no variant {unknown[0]!r}: use some of {known}")
    if args.family != "gpt2" and base in PEERS:
        raise UserError(f"--family {args.family}: {base} is compared as GPT-2; use mlm or transformers")
    if base in PEERS and base not in peers:
        raise UserError(f"--contenders {name} needs --peers {base}=PATH, the path of a checkout")
    if base == "megatron" and (args.family != "mixtral" or args.device != "cpu"):
        raise UserError(
            f"--contenders {name}: its Mixtral on a CPU is built; use --family mixtral --device cpu"
        )
    if "graphs" in variants and args.device != "cuda":
        raise UserError(f"--contenders {name}: a CPU has no graphs to replay; use --device cuda")
    if {"compiled", "graphs"} & {*variants} and not has_compiler(args.device):
        raise UserError(f"--contenders {name} needs a compiler for torch.compile: install g++, or set CXX")


BENCH = Bench(
    name="bench_train",
    doc=__doc__,
    epilog="\n".join(
        f"{title}:\n" + "\n".join(f"  {name:14} {words}" for name, words in known.items())
        for title, known in (("contenders", CONTENDERS), ("variants", VARIANTS))
    ),
    add_options=add_options,
    measure=measure,
    tables=lambda result: (part for shape in result["shapes"] for part in tables_of(shape)),
    is_success=lambda result: not any(shape["doubts"] for shape in result["shapes"]),
    packages=("torch", "transformers"),
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
