"""One shape from start to end: memory, equality, warm-up, timed rounds, and what follows."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.layouts import parse_layout
from bench.machine import Probe, measure_peak_flops
from bench.ranks import WARM_UP_STEPS, Ranks
from bench.spec import Spec
from bench.stats import (
    MEASURES,
    MIN_PAIRS,
    Measure,
    Ratio,
    Round,
    Spread,
    pairs_of,
    reject_above_peak,
    seconds_of,
)
from bench.timing import Say, take_rounds


@dataclass(frozen=True)
class Plan:
    """Contenders to compare, and the number of rounds."""

    contenders: tuple[str, ...]
    """Contenders in one process each, layouts in one per rank."""
    pairs: int
    limit: int
    """Rounds at most, unless they are done within `seconds`."""
    seconds: float
    """Rounds continue at least this long."""
    memory: bool

    def opponents(self, spec: Spec) -> list[tuple[str, str]]:
        """(reference, other): each against the first of its dtype, and that against the first of all."""
        first: dict[str, str] = {}
        references = [first.setdefault(spec.of(name).dtype, name) for name in self.contenders]
        return [
            (self.contenders[0] if reference == name else reference, name)
            for reference, name in zip(references[1:], self.contenders[1:], strict=True)
        ]


def run_shape(spec: Spec, plan: Plan, say: Say) -> dict[str, Any]:
    """Everything about one shape as JSON: medians, minima, ratios and all steps.

    Raises UserError when contenders differ, or a step is above the peak.
    """
    say("measuring the peak of matrix products")
    dtypes = dict.fromkeys(spec.of(name).dtype for name in plan.contenders)
    peaks = {dtype: measure_peak_flops(replace(spec, dtype=dtype)) for dtype in dtypes}
    with (
        tempfile.TemporaryDirectory(prefix="bench-train-") as folder,
        Field(spec, plan, Path(folder), say) as field,
    ):
        for name in plan.contenders:
            field.start(name)
        probe = Probe(spec)
        rounds = take_rounds(
            field.up,
            plan.opponents(spec),
            probe,
            measures=measures_of(spec),
            pairs=plan.pairs,
            limit=plan.limit,
            seconds=plan.seconds,
            say=say,
        )
    for dtype, before in peaks.items():
        again = measure_peak_flops(replace(spec, dtype=dtype))
        before.update({key: max(before[key], again[key]) for key in before})
    peak: dict[str, float] = {dtype: max(found.values()) for dtype, found in peaks.items()}
    facts = field.facts.items()
    series = [compare(rounds, a, b, plan.pairs) for a, b in plan.opponents(spec)]
    return {
        "shape": {**asdict(spec.shape), "flops_per_token": spec.shape.flops_per_token()},
        "description": f"{spec.shape.describe()}, on {spec.device}, {spec.threads} threads",
        "threads": spec.threads,
        "peak_flops": peak,
        "peaks": peaks,
        "contenders": {name: fact | speeds(spec, name, fact, rounds, peak) for name, fact in facts},
        "series": series,
        "probe": {"repeats": probe.repeats, "times_s": probe.times},
        "rounds": [{name: asdict(turn) for name, turn in one.items()} for one in rounds],
        "doubts": doubts(plan.pairs, series, spec),
    }


def measures_of(spec: Spec) -> tuple[Measure, ...]:
    """Measures that give a result: one CPU thread's processor time is its wall time without other jobs.

    Several threads wait for each other, and a GPU is not in it.
    """
    return ("wall", "cpu") if (spec.device, spec.threads) == ("cpu", 1) else ("wall",)


class Field:
    """The contenders, each checked and warm, all up at once: they wait without computing for their turns."""

    def __init__(self, spec: Spec, plan: Plan, folder: Path, say: Say) -> None:
        self.spec, self.plan, self.say = spec, plan, say
        self.reference = folder / "reference.safetensors"
        self.up: dict[str, Ranks] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        """Facts about each contender."""

    def start(self, name: str) -> None:
        """Start a contender. Raises UserError if it does not compute the same."""
        processes = parse_layout(name).processes if "=" in name else 1
        self.say(f"starting {name}" + (f" in {processes} processes" if processes > 1 else ""))
        ranks = self.up[name] = Ranks(name, self.spec, processes)
        agreement: dict[str, Any] = {}
        if "=" not in name:  # layouts are compared by `mlm parity`
            if not self.reference.exists():
                ranks.save_reference(self.reference)
            agreement = asdict(ranks.check(self.reference))  # before any step: of the initial weights
        begin = time.perf_counter()
        ranks.time(0, WARM_UP_STEPS)
        warm_up_s = time.perf_counter() - begin
        memory: dict[str, Any] | None = None
        if self.plan.memory:
            each = ranks.memory()
            memory = {key: sum(m[key] for m in each) for key in ("baseline_bytes", "peak_above_bytes")}
            memory |= {"method": each[0]["method"], "processes": len(each)}
        self.facts[name] = asdict(ranks.facts) | agreement | {"warm_up_s": warm_up_s, "memory": memory}

    def __enter__(self) -> "Field":
        return self

    def __exit__(self, *_: object) -> None:
        for ranks in self.up.values():
            ranks.close()


def speeds(
    spec: Spec, name: str, fact: dict[str, Any], rounds: Sequence[Round], peak: dict[str, float]
) -> dict[str, Any]:
    """A contender's times over all rounds, and its rates in the median step."""
    turns = [one[name] for one in rounds]
    step: dict[Measure, list[float]] = {m: [seconds_of(turn, m) for turn in turns] for m in MEASURES}
    measure = measures_of(spec)[-1]
    seconds, tokens = Spread.of(step[measure]), spec.shape.tokens_per_step
    flops_per_step = fact["flops_per_token"] * tokens
    reject_above_peak(name, flops_per_step / seconds.least, max(peak.values()))
    dtype = spec.of(name).dtype
    return {
        "step_s": asdict(Spread.of(step["wall"])),
        "step_cpu_s": asdict(Spread.of(step["cpu"])),
        "rates_by": measure,
        "dtype": dtype,
        "tokens_per_s": tokens / seconds.median,
        "model_flops": flops_per_step / seconds.median,
        "mfu": flops_per_step / seconds.median / peak[dtype],
    }


def compare(rounds: Sequence[Round], reference: str, other: str, pairs: int) -> dict[str, Any]:
    both = pairs_of(rounds, reference, other)
    ratios = {measure: Ratio.of(both, measure) for measure in MEASURES}
    problems = {
        measure: ["no pair kept"] if ratio is None else ratio.problems(pairs)
        for measure, ratio in ratios.items()
    }
    return {
        "reference": reference,
        "other": other,
        "rounds": len(rounds),
        "tokens_ratio": None if ratios["wall"] is None else asdict(ratios["wall"]),
        "tokens_ratio_cpu": None if ratios["cpu"] is None else asdict(ratios["cpu"]),
        "ratio_of_minima": {
            m: min(seconds_of(p.other, m) for p in both) / min(seconds_of(p.reference, m) for p in both)
            for m in MEASURES
        },
        "problems": problems,
    }


def doubts(pairs: int, all_series: Sequence[dict[str, Any]], spec: Spec) -> list[str]:
    """Reasons not to quote this run; empty if there are none.

    Wall time is a result, and with one CPU thread processor time is one too.
    """
    out = []
    if pairs < MIN_PAIRS:
        out.append(f"--pairs {pairs}: a trial; a result needs {MIN_PAIRS}")
    measures = measures_of(spec)
    for s in all_series:
        if all(s["problems"][m] for m in measures):
            problems = "; ".join(f"{m} time: {', '.join(s['problems'][m])}" for m in measures)
            out.append(
                f"{s['reference']} : {s['other']}: {problems}. Run again with nothing else running"
                + ("" if len(measures) == 2 or spec.device == "cuda" else ", or with --threads 1")
            )
    return out
