"""Attention heads against scaling efficiency: arXiv:1909.08053, appendix."""

from collections.abc import Sequence
from itertools import pairwise

from mlm.reproduce.conclusion import Cell, Chart, Conclusion, Series, Table, Verdict
from mlm.reproduce.config import ReproduceConfig, Scale
from mlm.reproduce.experiment import Experiment, Step
from mlm.reproduce.measured import above, model, ratios, spread, timed_steps
from mlm.reproduce.planned import planned
from mlm.reproduce.results import Results
from mlm.reproduce.v1 import plan_2019
from mlm.reproduce.v1.ranks import percent_of, tflops, waiting

NAME = "v1-heads"
PUBLISHED = {16: 82, 24: 80, 32: 77}
"""Efficiency of the 8.3B model with 8-way tensor parallelism by heads, percent; from memory."""
LAYERS, HIDDEN, TP = 72, 3072, 8
HEADS: dict[Scale, tuple[int, ...]] = {"laptop": (4, 8, 16), "node": (16, 24, 32), "paper": ()}
DEGREES: dict[Scale, int] = {"laptop": 2, "node": 8, "paper": TP}
"""Tensor-parallel size that is compared with 1."""
SIZES: dict[Scale, tuple[str, ...]] = {
    "laptop": (
        *model(num_layers=4, hidden_size=384, max_positions=512),
        "train.micro_batch_size=2",
        "train.global_batch_size=2",
    ),
    "node": (
        "model=gpt2_8b",
        "model.num_layers=4",
        "train.micro_batch_size=8",
        "train.global_batch_size=8",
    ),
}
"""Four layers on a node: with all 72 one GPU could not hold the model."""


def contender(heads: int, tp: int) -> str:
    """Return the name of a contender."""
    return f"h{heads}-tp{tp}"


def plan_name(heads: int) -> str:
    """Return the name of the step that plans a number of heads."""
    return f"{NAME}-plan-h{heads}"


def steps(config: ReproduceConfig) -> Sequence[Step]:
    """Return the timed runs of each number of heads, and the plans of the paper's layouts."""
    contenders = {
        contender(heads, tp): (
            *SIZES[config.scale],
            f"model.num_heads={heads}",
            f"tp={tp}",
            "dp=1",
        )
        for heads in HEADS[config.scale]
        for tp in (1, DEGREES[config.scale])
    }
    plans = [
        plan_2019.own_step(plan_name(heads), "model=gpt2_8b", f"model.num_heads={heads}", tp=TP)
        for heads in PUBLISHED
    ]
    base = plan_2019.own_step(f"{NAME}-plan-base", "model=gpt2_1_2b", tp=1)
    return [*timed_steps(NAME, contenders, config, minutes=0.3), *plans, base]


def conclude(results: Results) -> Conclusion:
    """Compare the throughput of the tensor-parallel ranks by heads."""
    scale = results.config.scale
    heads, tp = HEADS[scale], DEGREES[scale]
    if not heads:
        return Conclusion(
            verdict=Verdict.PLANNED,
            seen=f"nothing is trained at this scale; {planned_words()}.",
            limits=[plan_2019.NOT_FITTED],
            tables=(plan_table(results),),
            commands=commands(),
        )
    each = {n: tflops(results, NAME, contender(n, tp)) for n in heads}
    alone = {n: tflops(results, NAME, contender(n, 1)) for n in heads}
    against_base = {n: ratios(each[n], alone[heads[0]]) for n in heads}
    against_own = {n: ratios(each[n], alone[n]) for n in heads}
    waits = {n: waiting(results, NAME, contender(n, tp)) for n in heads}
    words = ", ".join(f"{n} heads {percent_of(against_base[n])}" for n in heads)
    own = ", ".join(percent_of(against_own[n]) for n in heads)
    return Conclusion(
        verdict=verdict([against_base[n] for n in heads]),
        seen=f"tp={tp}, throughput of a rank against one process with {heads[0]} heads: {words}; against one "
        f"process with as many heads: {own}; {planned_words()}.",
        limits=[
            plan_2019.NOT_FITTED,
            "The program of 2019 writes attention scores to memory, for each head; here attention is fused, "
            "so that heads cost only smaller products.",
        ],
        tables=(measured_table(tp, against_base, against_own, waits), plan_table(results)),
        charts=(chart(tp, against_base, against_own),),
        commands=commands(),
    )


def verdict(efficiencies: Sequence[list[float]]) -> Verdict:
    """Return the verdict on `more heads, less efficiency`, by neighbours in order of their heads.

    Both are compared round by round: a pair counts if all rounds show it.
    """
    lower = [above(ratios(few, many), 1.0) for few, many in pairwise(efficiencies)]
    if any(each is True for each in lower):
        return Verdict.AGREES if all(each is True for each in lower) else Verdict.PARTLY
    return Verdict.CONTRADICTS if any(each is False for each in lower) else Verdict.OPEN


def measured_table(
    tp: int,
    against_base: dict[int, list[float]],
    against_own: dict[int, list[float]],
    waits: dict[int, list[float]],
) -> Table:
    """Return efficiencies by heads."""
    rows: list[Sequence[Cell]] = [
        [n, percent_of(against_base[n]), percent_of(against_own[n]), percent_of(waits[n])]
        for n in against_base
    ]
    return Table(
        title=f"Heads against efficiency at tp={tp}, measured",
        headings=["heads", "against one process, fewest heads", "against one process, same heads", "waiting"],
        rows=rows,
        note="Throughput of a rank at the same hidden size. The paper's efficiency is of the first sort, "
        "against one model on one GPU: it falls with all that heads cost. The second sort leaves what they "
        "cost to one process out. Waiting: the share of a rank's time that it waits for others, transfers "
        "included.",
    )


def efficiencies_2019() -> dict[int, float]:
    """Return the planned efficiencies of the program of 2019 by heads, percent."""
    base = plan_2019.tflops(plan_2019.shape(layers=40, hidden=1536, heads=16), tp=1)
    shapes = {n: plan_2019.shape(layers=LAYERS, hidden=HIDDEN, heads=n) for n in PUBLISHED}
    return {n: 100 * plan_2019.tflops(its, tp=TP) / base for n, its in shapes.items()}


def planned_words() -> str:
    """Return the planned and published efficiencies in words."""
    found = efficiencies_2019()
    words = ", ".join(f"{found[n]:.1f} % with {n} heads (published {PUBLISHED[n]} %)" for n in PUBLISHED)
    return f"planned for the 8.3B model with tp=8 on V100s: {words}"


def plan_table(results: Results) -> Table:
    """Return planned efficiencies beside the published ones."""
    found = efficiencies_2019()
    base = planned(results, f"{NAME}-plan-base")
    rows = list[Sequence[Cell]]()
    for n, published in PUBLISHED.items():
        plan = planned(results, plan_name(n))
        own = (
            ""
            if plan is None or base is None
            else f"{100 * plan['model_tflops'] / base['model_tflops']:.1f} %"
        )
        rows.append([n, HIDDEN // n, f"{published} %", f"{found[n]:.1f} %", own])
    return Table(
        title="Heads of the 8.3B model with tp=8 on DGX-2H: published, and planned",
        headings=[
            "heads",
            "width of a head",
            "published",
            "planned, Megatron-LM of 2019",
            "planned, this toolkit",
        ],
        rows=rows,
        note="Published: appendix, from memory. Efficiency against the 1.2B model on one GPU. The plan of "
        "this toolkit takes fused attention, whose time it holds to be that of the hidden size whatever the "
        "heads.",
    )


def chart(tp: int, against_base: dict[int, list[float]], against_own: dict[int, list[float]]) -> Chart:
    """Return efficiencies over heads."""

    def series(name: str, found: dict[int, list[float]]) -> Series:
        spreads = [spread([100 * value for value in values]) for values in found.values()]
        return Series(
            name=name,
            x=list(found),
            y=[each.median for each in spreads],
            low=[each.least for each in spreads],
            high=[each.largest for each in spreads],
        )

    return Chart(
        name="heads",
        title=f"Heads against efficiency at tp={tp}; published at tp=8",
        x_label="heads",
        y_label="efficiency of a rank, %",
        series=[
            series("against one process, fewest heads", against_base),
            series("against one process, same heads", against_own),
            Series(
                name="published, 8.3B model", x=list(PUBLISHED), y=list(PUBLISHED.values()), published=True
            ),
        ],
        from_zero=True,
    )


def commands() -> list[tuple[str, str]]:
    """Return the command lines for the cluster."""
    return [
        (
            f"The 8.3B model with {n} heads on 8 GPUs",
            f"mlm pretrain model=gpt2_8b model.num_heads={n} tp=8 dp=1 recompute=full precision=fp16 "
            "data=synthetic train.micro_batch_size=8 train.global_batch_size=8 train.steps=50 log.every=1",
        )
        for n in PUBLISHED
    ]


EXPERIMENT = Experiment(
    name=NAME,
    title="Attention heads against scaling efficiency",
    source="Megatron-LM, arXiv:1909.08053, appendix",
    claim="At equal hidden size more attention heads lower the efficiency of 8-way tensor parallelism "
    "slightly: 82 %, 80 %, 77 % with 16, 24, 32 heads of the 8.3B model.",
    minutes=6,
    steps=steps,
    conclude=conclude,
)
