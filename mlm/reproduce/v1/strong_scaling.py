"""Strong scaling of tensor parallelism at a fixed batch: arXiv:1909.08053, appendix."""

from collections.abc import Sequence

from mlm.reproduce.conclusion import Cell, Chart, Conclusion, Series, Table, Verdict
from mlm.reproduce.config import ReproduceConfig, Scale
from mlm.reproduce.experiment import Experiment, Step
from mlm.reproduce.measured import above, model, ratios, seconds, spread, timed_steps
from mlm.reproduce.planned import planned
from mlm.reproduce.results import Results
from mlm.reproduce.v1 import plan_2019
from mlm.reproduce.v1.ranks import cores, percent_of, waiting

NAME = "v1-strong-scaling"
PUBLISHED = {1: 1.0, 2: 1.64, 4: 2.34, 8: 2.98}
"""Speedup of the 1.2B model at batch 8 by GPUs; from memory."""
DEGREES: dict[Scale, tuple[int, ...]] = {"laptop": (1, 2, 4), "node": (1, 2, 4, 8), "paper": ()}
SIZES: dict[Scale, tuple[str, ...]] = {
    "laptop": (
        *model(num_layers=4, hidden_size=384, num_heads=8, max_positions=256),
        "train.micro_batch_size=4",
        "train.global_batch_size=4",
    ),
    "node": ("model=gpt2_1_2b", "train.micro_batch_size=8", "train.global_batch_size=8", "recompute=full"),
}


def contender(tp: int) -> str:
    """Return the name of a contender."""
    return f"tp{tp}"


def plan_name(tp: int) -> str:
    """Return the name of the step that plans a number of GPUs."""
    return f"{NAME}-plan-tp{tp}"


def steps(config: ReproduceConfig) -> Sequence[Step]:
    """Return the timed runs, and the plans of the paper's layouts."""
    contenders = {contender(tp): (*SIZES[config.scale], f"tp={tp}", "dp=1") for tp in DEGREES[config.scale]}
    plans = [plan_2019.own_step(plan_name(tp), "model=gpt2_1_2b", tp=tp) for tp in PUBLISHED]
    return [*timed_steps(NAME, contenders, config, minutes=0.3), *plans]


def conclude(results: Results) -> Conclusion:
    """Compare step times of one model and batch on more ranks."""
    degrees = DEGREES[results.config.scale]
    if not degrees:
        return Conclusion(
            verdict=Verdict.PLANNED,
            seen=f"nothing is trained at this scale; {planned_words()}.",
            limits=[plan_2019.NOT_FITTED],
            tables=(plan_table(results),),
            commands=commands(),
        )
    alone = seconds(results, NAME, contender(1))
    found = {tp: ratios(alone, seconds(results, NAME, contender(tp))) for tp in degrees}
    available = cores(results.config)
    words = "; ".join(words_of(tp, found[tp], available) for tp in degrees if tp > 1)
    limits = [plan_2019.NOT_FITTED]
    if results.config.scale == "laptop":
        limits.append(
            "Ranks exchange tensors through this host's memory, and share its caches: the speedups say what "
            f"communication costs on this machine. More than {available} ranks take turns on its cores."
        )
    return Conclusion(
        verdict=verdict(found, available),
        seen=f"speedup at a fixed batch: {words}; {planned_words()}.",
        limits=limits,
        tables=(measured_table(results, found, available), plan_table(results)),
        charts=(chart(found),),
        commands=commands(),
    )


def words_of(tp: int, speedups: list[float], available: int) -> str:
    """Return a speedup in words."""
    note = f" on {available} cores" if tp > available else ""
    return f"{spread(speedups)} with {tp} ranks{note} (published {PUBLISHED[tp]:g})"


def verdict(found: dict[int, list[float]], available: int) -> Verdict:
    """Return the verdict on `more ranks are faster, by less than their number`, where each has a core.

    In part: faster, but by less than published in all rounds.
    """
    inside = {tp: speedups for tp, speedups in found.items() if 1 < tp <= available}
    faster = [above(speedups, 1.0) for speedups in inside.values()]
    if not inside or any(each is None for each in faster):
        return Verdict.OPEN
    if not all(faster) or any(above(speedups, tp) for tp, speedups in inside.items()):
        return Verdict.CONTRADICTS
    reached = [spread(speedups).largest >= PUBLISHED[tp] for tp, speedups in inside.items()]
    return Verdict.AGREES if all(reached) else Verdict.PARTLY


def measured_table(results: Results, found: dict[int, list[float]], available: int) -> Table:
    """Return speedups with the share of waiting."""
    rows = list[Sequence[Cell]]()
    for tp, speedups in found.items():
        times = spread([1e3 * each for each in seconds(results, NAME, contender(tp))])
        share = waiting(results, NAME, contender(tp))
        rows.append(
            [
                tp,
                min(tp, available),
                str(times),
                str(spread(speedups)),
                percent_of(share),
                f"{PUBLISHED[tp]:g}",
            ]
        )
    return Table(
        title="Speedup at a fixed batch, measured",
        headings=["ranks (tp)", "cores", "ms a step", "speedup", "waiting", "published, GPUs"],
        rows=rows,
        note="One thread a rank. Waiting: the share of a rank's time that it waits for others, transfers "
        "included.",
    )


def speedups_2019() -> dict[int, float]:
    """Return the planned speedups of the program of 2019 by GPUs."""
    its = plan_2019.shape(layers=40, hidden=1536, heads=16)
    times = {tp: plan_2019.seconds(its, tp=tp) for tp in PUBLISHED}
    return {tp: times[1] / each for tp, each in times.items()}


def planned_words() -> str:
    """Return the planned and published speedups in words."""
    found = speedups_2019()
    each = ", ".join(f"{found[tp]:.2f} on {tp} GPUs ({PUBLISHED[tp]:g})" for tp in PUBLISHED if tp > 1)
    return f"planned (published) for the 1.2B model on V100s: {each}"


def plan_table(results: Results) -> Table:
    """Return planned speedups beside the published ones."""
    found = speedups_2019()
    own = {tp: planned(results, plan_name(tp)) for tp in PUBLISHED}
    rows = list[Sequence[Cell]]()
    for tp, published in PUBLISHED.items():
        plan, base = own[tp], own[1]
        its = "" if plan is None or base is None else f"{base['step_s'] / plan['step_s']:.2f}"
        rows.append([tp, f"{published:.2f}", f"{found[tp]:.2f}", its])
    return Table(
        title="Speedup of the 1.2B model at batch 8 on DGX-2H: published, and planned",
        headings=["GPUs", "published", "planned, Megatron-LM of 2019", "planned, this toolkit"],
        rows=rows,
        note="Published: appendix, from memory.",
    )


def chart(found: dict[int, list[float]]) -> Chart:
    """Return speedups over ranks."""
    spreads = [spread(speedups) for speedups in found.values()]
    old = speedups_2019()
    return Chart(
        name="speedup",
        title="Speedup at a fixed batch",
        x_label="ranks",
        y_label="speedup",
        series=[
            Series(
                name="here",
                x=list(found),
                y=[each.median for each in spreads],
                low=[each.least for each in spreads],
                high=[each.largest for each in spreads],
            ),
            Series(name="planned, V100s", x=list(old), y=list(old.values())),
            Series(name="published, V100s", x=list(PUBLISHED), y=list(PUBLISHED.values()), published=True),
        ],
        from_zero=True,
    )


def commands() -> list[tuple[str, str]]:
    """Return the command lines for the cluster."""
    return [
        (
            f"The 1.2B model on {plan_2019.gpus(tp)}",
            f"mlm pretrain model=gpt2_1_2b tp={tp} dp=1 recompute=full precision=fp16 data=synthetic "
            "train.micro_batch_size=8 train.global_batch_size=8 train.steps=50 log.every=1",
        )
        for tp in PUBLISHED
    ]


EXPERIMENT = Experiment(
    name=NAME,
    title="Strong scaling of tensor parallelism at a fixed batch",
    source="Megatron-LM, arXiv:1909.08053, appendix",
    claim="The 1.2B model at batch 8 becomes 1.64, 2.34 and 2.98 times as fast on 2, 4 and 8 GPUs.",
    minutes=3,
    steps=steps,
    conclude=conclude,
)
