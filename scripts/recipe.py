"""Recipes on the plays of Shakespeare: Muon against AdamW, cooldowns against cosine, muP against none, and
what balances a mixture of experts.

    python scripts/recipe.py optimizers --corpus demo/corpus/ --work runs/recipe --out optimizers.json
    python scripts/recipe.py cooldown   --corpus demo/corpus/ --work runs/recipe --out cooldown.json
    python scripts/recipe.py width      --corpus demo/corpus/ --work runs/recipe --out width.json
    python scripts/recipe.py experts    --corpus demo/corpus/ --work runs/recipe --out experts.json

Each run is an `mlm pretrain` of a GPT-2 (experts: of a Llama) in a process of its own, one after the other;
one that is complete in `--work` is not repeated. `make demo` writes the corpus. A plot goes beside the result
(.png).
"""

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

SEQ, SAMPLES = 128, 8
SIZES = {"4x128": (4, 128, 4), "4x256": (4, 256, 8)}
"""Layers, width and heads."""
RATES = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
"""Learning rates of a sweep, the same for all."""
SEEDS = (1, 2, 3)
OPTIMIZERS = {"adamw": ("optimizer=adamw_demo",), "muon": ("optimizer=muon",)}
"""Both decay by 0.1, with betas of 0.9 and 0.95."""
MIXTURE = ("model.options.expert_ffn_size=200",)
"""Of eight experts, two a token: as wide together as the dense model's MLP."""
MIXTURES = {
    "no balance": ("moe_demo", (*MIXTURE, "model.options.balance=none")),
    "loss": ("moe_demo", (*MIXTURE, "model.options.balance=global_batch")),
    "bias": ("moe_demo", (*MIXTURE, "model.options.balance=bias")),
    "dense": ("llama_demo", ("model.ffn_hidden_size=400",)),
}
"""Model and settings; the loss's coefficient is 0.01, the bias's step 0.001."""
WIDTHS = {
    "128": (128, ()),
    "512 with muP": (512, ("model.mup_base_width=128",)),
    "512 without": (512, ()),
}
"""Width and settings."""
Curve = list[tuple[int, float]]
"""Step and validation loss."""


class Runs:
    """Runs of `mlm pretrain` below a folder; `before` are words before each command, such as `nice`."""

    def __init__(self, corpus: str, work: Path, before: str) -> None:
        self.corpus, self.work, self.before = corpus, work, shlex.split(before)

    def train(
        self,
        name: str,
        shape: tuple[int, int, int],
        steps: int,
        settings: Iterable[str],
        *,
        model: str = "gpt2_tiny",
        given: bool = True,
    ) -> dict[str, Any]:
        """Train, unless that is done, and return the validation losses and the median seconds of a step."""
        layers, width, heads = shape
        out = self.work / name
        words = [
            *(f"model={model}", f"model.num_layers={layers}", f"model.hidden_size={width}"),
            *(f"model.num_heads={heads}", "model.vocab_size=4096", f"model.max_positions={SEQ}"),
            *(f"data.path={self.corpus}", f"data.seq_length={SEQ}", f"train.global_batch_size={SAMPLES}"),
            *(f"train.micro_batch_size={SAMPLES}", "train.validate_every=25"),
            *("train.validate_batches=10", "checkpoint.save_every=0", "log.every=10", "log.live=off"),
        ]
        length = [f"train.steps={steps}"] if given else []  # else that of its cooldown
        return self.run(out, [*words, *length, *settings], steps)

    def run(self, out: Path, words: Sequence[str], steps: int) -> dict[str, Any]:
        if not reached(out, steps):
            command = [*self.before, "mlm", "pretrain", *words, f"out={out}"]
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            subprocess.run(command, check=True, env={**os.environ, "PATH": path}, capture_output=True)
        times = [r["step_time_s"] for r in records(out) if r.get("kind") == "step" and r["step"] > 1]
        return {"curve": curve_of(out), "seconds": sorted(times)[len(times) // 2]}


def records(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def curve_of(out: Path) -> Curve:
    found = {r["step"]: r["loss"] for r in records(out) if r.get("kind") == "validation"}
    return sorted((step, math.inf if loss is None else loss) for step, loss in found.items())


def reached(out: Path, steps: int) -> bool:
    curve = curve_of(out)
    return bool(curve) and curve[-1][0] >= steps


def first_at(curve: Curve, loss: float) -> float:
    """The step, between validations, at which a curve is at a loss first; infinity if it never is."""
    for (step, high), (later, low) in pairwise(curve):
        if low <= loss:
            return step + (later - step) * max(0.0, (high - loss) / (high - low))
    return math.inf


def optimizers(runs: Runs, steps: int, sizes: Sequence[str], rates: Sequence[float]) -> dict[str, Any]:
    """Muon against AdamW: a sweep of learning rates by one seed, then the best of each by all seeds."""
    result: dict[str, Any] = {"steps": steps, "tokens_a_step": SEQ * SAMPLES, "sizes": {}}
    for size in sizes:
        found: dict[str, Any] = {}
        for name, settings in OPTIMIZERS.items():
            schedule = ("schedule.min_lr=0", "schedule.warmup=0.05", *settings)
            sweep = {
                rate: runs.train(
                    f"{size}-{name}-{rate:g}-1",
                    SIZES[size],
                    steps,
                    (*schedule, f"optimizer.lr={rate:g}", "seed=1"),
                )
                for rate in rates
            }
            best = min(sweep, key=lambda rate: sweep[rate]["curve"][-1][1])
            seeds = [
                runs.train(
                    f"{size}-{name}-{best:g}-{seed}",
                    SIZES[size],
                    steps,
                    (*schedule, f"optimizer.lr={best:g}", f"seed={seed}"),
                )
                for seed in SEEDS
            ]
            found[name] = {
                "sweep": {f"{rate:g}": run["curve"][-1][1] for rate, run in sweep.items()},
                "best_lr": best,
                "at_the_end": [run["curve"][-1][1] for run in seeds],
                "curves": [run["curve"] for run in seeds],
                "step_s": mean(run["seconds"] for run in seeds),
            }
        target = max(found["adamw"]["at_the_end"])
        for each in found.values():
            each["steps_to_worst_adamw"] = [first_at(curve, target) for curve in each["curves"]]
        result["sizes"][size] = found
    return result


def cooldown(runs: Runs, steps: int, sizes: Sequence[str]) -> dict[str, Any]:
    """Warm-up, stable, cooldown against cosine: three lengths from one stable run, a cosine run for each."""
    size, stable, lengths = sizes[0], steps * 4 // 5, [steps // 4, steps // 2, steps]
    curves: dict[str, Any] = {"stable": [], "wsd": {}, "cosine": {}}
    for seed in SEEDS:
        common = ("optimizer=muon", "optimizer.lr=8e-3", "schedule.min_lr=0", f"seed={seed}")
        saves = (f"checkpoint.save_every={steps // 20}", "checkpoint.keep_last=99")
        name = f"{size}-stable-{seed}"
        settings = (*common, "schedule=stable", "schedule.warmup_steps=15", *saves)
        curves["stable"].append(runs.train(name, SIZES[size], stable, settings)["curve"])
        for length in lengths:
            start = length * 4 // 5
            ckpt = runs.work / name / "checkpoints" / f"step-{start:08d}"
            settings = (
                *common,
                "schedule=wsd",
                f"checkpoint.from_run={ckpt}",
                f"schedule.cooldown={length - start}",
            )
            cosine = (*common, "schedule=cosine")
            for kind, each, given in (("wsd", settings, False), ("cosine", cosine, True)):
                words = (*each, "schedule.warmup_steps=15")
                run = runs.train(f"{size}-{kind}-{length}-{seed}", SIZES[size], length, words, given=given)
                curves[kind].setdefault(str(length), []).append(run["curve"])
    ends = {
        kind: {n: [curve[-1][1] for curve in each] for n, each in curves[kind].items()}
        for kind in ("wsd", "cosine")
    }
    return {"size": size, "at_the_end": ends, "curves": curves}


def width(runs: Runs, steps: int, rates: Sequence[float], seeds: int) -> dict[str, Any]:
    """The best learning rate by width, with muP of base 128 and without: that of the seeds' mean loss."""
    common = ("optimizer=adamw_demo", "schedule.min_lr=0", "schedule.warmup=0.1", "precision=bf16")
    losses: dict[str, dict[str, list[float]]] = {name: {f"{rate:g}": [] for rate in rates} for name in WIDTHS}
    for seed, name, rate in product(SEEDS[:seeds], WIDTHS, rates):
        hidden, settings = WIDTHS[name]
        run = runs.train(
            f"width-{name.replace(' ', '-')}-{rate:g}-{seed}",
            (2, hidden, hidden // 32),
            steps,
            (*common, f"optimizer.lr={rate:g}", f"seed={seed}", *settings),
        )
        losses[name][f"{rate:g}"].append(run["curve"][-1][1])
    best = {name: min(each, key=lambda rate: mean(each[rate])) for name, each in losses.items()}
    return {"steps": steps, "widths": {name: {"losses": losses[name], "best": best[name]} for name in WIDTHS}}


def experts(runs: Runs, steps: int, seeds: int) -> dict[str, Any]:
    """Mixtures of experts by what balances them, and a dense model of as many parameters a token."""
    models: dict[str, Any] = {name: {"curves": [], "at_the_end": []} for name in MIXTURES}
    for seed, (name, found) in product(SEEDS[:seeds], models.items()):
        model, settings = MIXTURES[name]
        common = ("optimizer=adamw_demo", "optimizer.lr=2e-3", "schedule.min_lr=0", f"seed={seed}")
        out = f"experts-{name.replace(' ', '-')}-{seed}"
        run = runs.train(out, SIZES["4x128"], steps, (*common, *settings), model=model)
        found["curves"].append(run["curve"])
        found["at_the_end"].append(run["curve"][-1][1])
        by_layer = {r["step"]: r.get("imbalance_by_layer") for r in records(runs.work / out) if "lr" in r}
        if loads := [(step, mean(each.values())) for step, each in sorted(by_layer.items()) if each]:
            found.setdefault("imbalance", []).append(loads)
            last = mean(load for step, load in loads if step > steps * 3 // 4)
            found.setdefault("imbalance_of_last_quarter", []).append(last)
    target = max(models["dense"]["at_the_end"])
    for found in models.values():
        found["steps_to_worst_dense"] = [first_at(curve, target) for curve in found["curves"]]
    return {"steps": steps, "tokens_a_step": SEQ * SAMPLES, "models": models}


def plot_experts(result: Mapping[str, Any], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.6))
    for number, (name, found) in enumerate(result["models"].items()):
        for axis, key in ((left, "imbalance"), (right, "curves")):
            for seed, curve in enumerate(found.get(key, [])):
                axis.plot(*zip(*curve, strict=True), color=f"C{number}", label=None if seed else name, lw=1)
    left.set(xlabel="step", ylabel="largest over mean load, mean of layers")
    right.set(xlabel="step", ylabel="validation loss, nats a token")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def plot_cooldown(result: Mapping[str, Any], path: Path) -> None:
    """Validation loss over steps, of all seeds: stable runs, what was finished from them, and cosine runs."""
    figure, axis = plt.subplots(figsize=(6.5, 4))
    curves = result["curves"]
    for curve in curves["stable"]:
        axis.plot(*zip(*curve, strict=True), color="0.6", lw=1, label="stable")
    for kind, color in (("cosine", "tab:orange"), ("wsd", "tab:blue")):
        for length, (seed, curve) in ((n, x) for n, each in curves[kind].items() for x in enumerate(each)):
            if kind == "wsd":  # from the last validation of the stable run before
                before = [point for point in curves["stable"][seed] if point[0] < curve[0][0]]
                curve = [before[-1], *curve]
            axis.plot(*zip(*curve, strict=True), color=color, lw=1, label=kind)
            axis.plot(int(length), curve[-1][1], "o", color=color, ms=4)
    axis.set(xlabel="step", ylabel="validation loss, nats a token", ylim=(4.6, 6.2))
    handles, labels = axis.get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    axis.legend(named.values(), named.keys())
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def plot_width(result: Mapping[str, Any], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(5.5, 3.6))
    for name, each in result["widths"].items():
        losses = [mean(found) for found in each["losses"].values()]
        axis.semilogx([float(r) for r in each["losses"]], losses, "o-", label=name)
    axis.set(xlabel="learning rate", ylabel="validation loss after the last step")
    axis.legend(title="width")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def plot_optimizers(result: Mapping[str, Any], path: Path) -> None:
    figure, axes = plt.subplots(2, len(result["sizes"]), figsize=(10, 7), squeeze=False)
    for column, (size, found) in enumerate(result["sizes"].items()):
        for name, color in (("adamw", "tab:blue"), ("muon", "tab:orange")):
            each = found[name]
            for number, curve in enumerate(each["curves"]):
                label = f"{name}, lr {each['best_lr']:g}" if number == 0 else None
                axes[0][column].plot(*zip(*curve, strict=True), color=color, label=label)
            axes[1][column].plot([float(r) for r in each["sweep"]], each["sweep"].values(), "o-", color=color)
        axes[0][column].set(title=f"GPT-2 {size}", xlabel="step", ylim=(None, 7), yscale="log")
        axes[0][column].legend()
        axes[1][column].set(xlabel="learning rate, seed 1", xscale="log")
    axes[0][0].set_ylabel("validation loss, nats a token")
    axes[1][0].set_ylabel("after the last step")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["optimizers", "cooldown", "width", "experts"])
    parser.add_argument("--corpus", required=True, help="prefix folder of a corpus with 4,096 tokens")
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the result")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="of experts and width: runs of each")
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, help="of optimizers and width")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--before", default="", help="words before each command, such as nice")
    args = parser.parse_args()
    runs = Runs(args.corpus, args.work, args.before)
    if args.what == "optimizers":
        result = optimizers(runs, args.steps, args.sizes, args.rates)
        plot_optimizers(result, args.out.with_suffix(".png"))
    elif args.what == "cooldown":
        result = cooldown(runs, args.steps, args.sizes)
        plot_cooldown(result, args.out.with_suffix(".png"))
    elif args.what == "experts":
        result = experts(runs, args.steps, args.seeds)
        plot_experts(result, args.out.with_suffix(".png"))
    else:
        result = width(runs, args.steps, args.rates, args.seeds)
        plot_width(result, args.out.with_suffix(".png"))
    args.out.write_text(json.dumps({"command": shlex.join(sys.argv[1:]), **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
