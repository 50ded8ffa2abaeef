"""One shape from start to end: memory, equality, warm-up, timed pairs, and what follows."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.machine import Probe, measure_peak_flops
from bench.ranks import WARM_UP_STEPS, Ranks
from bench.spec import Spec
from bench.stats import MAX_SPREAD, MIN_PAIRS, Pair, Spread, reject_above_peak
from bench.timing import Clock, Say, Series


@dataclass(frozen=True)
class Plan:
    """Contenders to compare, and the number of rounds."""

    whole: tuple[str, ...]
    """Contenders in one process each; the first is the reference."""
    split: tuple[str, ...]
    """Contenders in `tp` processes of one share of the threads each."""
    tp: int
    pairs: int
    limit: int
    """Pairs begun at most, dropped ones included."""
    min_sample_s: float
    memory: bool

    def opponents(self) -> list[tuple[str, str]]:
        """(reference, other): all against the first, picotron's split against ours."""
        ours = f"mlm-tp{self.tp}"
        first = self.whole[0]
        pairs = [(first, name) for name in (*self.whole[1:], *self.split) if not name.startswith("picotron")]
        return pairs + [(ours, name) for name in self.split if name.startswith("picotron")]


def run_shape(spec: Spec, plan: Plan, say: Say) -> dict[str, Any]:
    """Everything about one shape as JSON. Raises UserError when contenders differ or a result is rejected."""
    say("measuring the peak of matrix products")
    peaks = measure_peak_flops(spec)
    clock = Clock(Probe(spec), plan.min_sample_s)
    all_series = [Series(a, b) for a, b in plan.opponents()]
    with (
        tempfile.TemporaryDirectory(prefix="bench-train-") as folder,
        Field(spec, plan, Path(folder), say) as field,
    ):
        field.get(plan.whole[0])  # even alone: its memory
        for _ in range(2):  # again: the session's median, known only at the end, may drop early pairs
            for series in all_series:
                if len(series.kept(clock.probe.median())) < plan.pairs and series.attempts < plan.limit:
                    field.keep_only(series.reference, series.other)
                    a, b = field.get(series.reference), field.get(series.other)
                    clock.fill(series, a, b, pairs=plan.pairs, limit=plan.limit, say=say)
    again = measure_peak_flops(spec)
    peaks = {key: max(peaks[key], again[key]) for key in peaks}
    return summarise(spec, plan, all_series, clock.probe, peaks, field.facts)


class Field:
    """The contenders that are up now, each checked and warm. Two at a time, or memory would not do."""

    def __init__(self, spec: Spec, plan: Plan, folder: Path, say: Say) -> None:
        self.spec, self.plan, self.say = spec, plan, say
        self.reference = folder / "reference.safetensors"
        self.up: dict[str, Ranks] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        """Facts about each contender that started."""

    def get(self, name: str) -> Ranks:
        """The contender, started if it is not up. Raises UserError if it does not compute the same."""
        if name in self.up:
            return self.up[name]
        processes = self.plan.tp if name in self.plan.split else 1
        self.say(f"starting {name}" + (f" in {processes} processes" if processes > 1 else ""))
        ranks = self.up[name] = Ranks(name, self.spec, processes)
        if name == self.plan.whole[0] and not self.reference.exists():
            ranks.save_reference(self.reference)
        agreement = ranks.check(self.reference)  # before any step: weights are the initial ones
        memory = total_memory(ranks.memory()) if self.plan.memory and name not in self.facts else None
        begin = time.perf_counter()
        ranks.time(0, WARM_UP_STEPS)
        warm_up_s = time.perf_counter() - begin
        self.facts.setdefault(
            name, asdict(ranks.facts) | asdict(agreement) | {"warm_up_s": warm_up_s, "memory": memory}
        )
        return ranks

    def keep_only(self, *names: str) -> None:
        """End the processes of all others."""
        for name in set(self.up) - set(names):
            self.up.pop(name).close()

    def __enter__(self) -> "Field":
        return self

    def __exit__(self, *_: object) -> None:
        self.keep_only()


def total_memory(each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Memory of all ranks together."""
    sums = {key: sum(m[key] for m in each) for key in ("baseline_bytes", "peak_above_bytes")}
    return sums | {"method": each[0]["method"], "processes": len(each)}


def summarise(
    spec: Spec,
    plan: Plan,
    all_series: Sequence[Series],
    probe: Probe,
    peaks: dict[str, float],
    facts: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """Medians, spreads, ratios and raw samples. Raises UserError if a sample is above the peak."""
    peak, session_median = max(peaks.values()), probe.median()
    tokens = spec.shape.tokens_per_step
    kept = [pair for series in all_series for pair in series.kept(session_median)]
    out: dict[str, Any] = {
        "shape": spec.shape.to_json(),
        "peak_flops": peak,
        "peaks": peaks,
        "contenders": {},
    }
    for name, fact in facts.items():
        seconds = [s.seconds for p in kept for s in (p.reference, p.other) if s.contender == name]
        flops_per_step = fact["flops_per_token"] * tokens
        entry: dict[str, Any] = dict(fact)
        if seconds:
            reject_above_peak(name, flops_per_step / min(seconds), peak)
            flops = Spread.of(seconds).inverse_of(flops_per_step)
            entry |= {
                "step_s": asdict(Spread.of(seconds)),
                "tokens_per_s": asdict(Spread.of(seconds).inverse_of(tokens)),
                "model_flops": asdict(flops),
                "mfu": flops.median / peak,
            }
        out["contenders"][name] = entry
    out["series"] = [series_json(s, s.kept(session_median), facts) for s in all_series]
    out["probe"] = {"median_s": session_median, "repeats": probe.repeats, "times_s": probe.times}
    out["doubts"] = doubts(plan, out["series"])
    return out


def series_json(series: Series, kept: list[Pair], facts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The ratios of one series, and all of its samples."""
    ratios = [p.ratio for p in kept]
    work = facts[series.reference]["flops_per_token"] / facts[series.other]["flops_per_token"]
    return {
        "reference": series.reference,
        "other": series.other,
        "steps_per_sample": series.steps,
        "kept": len(kept),
        "dropped": series.attempts - len(kept),
        "tokens_ratio": asdict(Spread.of(ratios)) if ratios else None,
        "flops_ratio": asdict(Spread.of(ratios).scaled(work)) if ratios else None,
        "pairs": [asdict(p) | {"kept": p in kept, "ratio": p.ratio} for p in series.pairs],
        "cut_short": [asdict(s) for s in series.cut_short],
    }


def doubts(plan: Plan, all_series: Sequence[dict[str, Any]]) -> list[str]:
    """Why this run is no result to quote; empty if it is one."""
    out = []
    if plan.pairs < MIN_PAIRS:
        out.append(f"--pairs {plan.pairs}: a trial; a result needs {MIN_PAIRS}")
    for s in all_series:
        problems = []
        if s["kept"] < plan.pairs or s["dropped"] > s["kept"]:
            problems.append(f"{s['kept']} of {plan.pairs} pairs kept, {s['dropped']} dropped")
        ratio = s["tokens_ratio"]
        if ratio is not None and ratio["high"] - ratio["low"] > MAX_SPREAD * ratio["median"]:
            problems.append(f"quartiles {ratio['low']:.3f} to {ratio['high']:.3f} are too far apart")
        if problems:
            out.append(
                f"{s['reference']} : {s['other']}: {'; '.join(problems)}. "
                "The machine was not steady: run again with nothing else running"
            )
    return out
