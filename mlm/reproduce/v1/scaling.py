"""Table 1 and figure 5 of arXiv:1909.08053: weak scaling of tensor parallelism, alone and with replicas."""

from collections.abc import Sequence
from dataclasses import dataclass

from mlm.reproduce.conclusion import Cell, Chart, Conclusion, Series, Table, Verdict
from mlm.reproduce.config import ReproduceConfig, Scale
from mlm.reproduce.experiment import Experiment, Step
from mlm.reproduce.measured import above, model, ratios, spread, timed_steps
from mlm.reproduce.planned import planned
from mlm.reproduce.results import Results
from mlm.reproduce.v1 import plan_2019
from mlm.reproduce.v1.plan_2019 import gpus
from mlm.reproduce.v1.ranks import cores, percent_of, sent_megabytes, tflops, waiting

NAME = "v1-scaling"


@dataclass(frozen=True)
class Row:
    """A model of table 1."""

    name: str
    model: str
    layers: int
    hidden: int
    heads: int
    tp: int
    alone: float
    """Published efficiency with tensor parallelism alone, percent."""
    replicated: float
    """With 64 replicas."""

    def step(self, dp: int) -> str:
        """Name of the step that plans it."""
        return f"{NAME}-plan-{self.name.lower()}-dp{dp}"


ROWS = (
    Row("1.2B", "gpt2_1_2b", 40, 1536, 16, 1, 100, 96),
    Row("2.5B", "gpt2_2_5b", 54, 1920, 20, 2, 95, 83),
    Row("4.2B", "gpt2_4_2b", 64, 2304, 24, 4, 82, 79),
    Row("8.3B", "gpt2_8b", 72, 3072, 32, 8, 77, 74),
)
"""From memory: arXiv:1909.08053, table 1 and figure 5."""
REPLICAS = 64


@dataclass(frozen=True)
class Contender:
    """A layout that is timed, with the model that grows with tp."""

    tp: int
    dp: int
    words: tuple[str, ...]
    layers: int = 0
    hidden: int = 0
    rows: int = 0
    """Tokens of a micro-batch; these three for what is sent."""

    @property
    def name(self) -> str:
        """Of its runs."""
        return f"tp{self.tp}-dp{self.dp}"

    @property
    def label(self) -> str:
        """In tables."""
        return f"tp={self.tp} dp={self.dp}"

    @property
    def ranks(self) -> int:
        """Its processes."""
        return self.tp * self.dp

    @property
    def published(self) -> float:
        """Published efficiency at this tp, alone or with replicas."""
        row = next(row for row in ROWS if row.tp == self.tp)
        return row.alone if self.dp == 1 else row.replicated


def small(tp: int, dp: int) -> Contender:
    """Return a layout at a laptop's scale: 3 million parameters a rank of tp, 4 samples of 256 a replica."""
    layers, hidden = {1: (4, 256), 2: (5, 320), 4: (7, 384)}[tp]
    sizes = model(num_layers=layers, hidden_size=hidden, num_heads=4, max_positions=256)
    batch = ("train.micro_batch_size=4", f"train.global_batch_size={4 * dp}")
    words = (*sizes, *batch, f"tp={tp}", f"dp={dp}")
    return Contender(tp, dp, words, layers, hidden, 4 * 256)


def on_node(row: Row, dp: int) -> Contender:
    """Return a layout on 8 GPUs: the paper's widths and micro-batch, of its layers four."""
    batch = ("train.micro_batch_size=8", f"train.global_batch_size={8 * dp}")
    words = (f"model={row.model}", "model.num_layers=4", *batch, f"tp={row.tp}", f"dp={dp}")
    return Contender(row.tp, dp, words, 4, row.hidden, 8 * 1024)


CONTENDERS: dict[Scale, tuple[Contender, ...]] = {
    "laptop": tuple(small(tp, dp) for tp, dp in ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2))),
    "node": tuple(on_node(row, dp) for row in ROWS for dp in sorted({1, 8 // row.tp})),
    "paper": (),
}
"""By scale; the first is the base."""


def steps(config: ReproduceConfig) -> Sequence[Step]:
    """Return the timed runs, and the plans of the paper's layouts."""
    contenders = {each.name: each.words for each in CONTENDERS[config.scale]}
    return [
        *timed_steps(NAME, contenders, config, minutes=0.3),
        *(
            plan_2019.own_step(row.step(dp), f"model={row.model}", tp=row.tp, dp=dp)
            for row in ROWS
            for dp in (1, REPLICAS)
        ),
    ]


@dataclass(frozen=True)
class Timed:
    """A contender's throughput, a value per round."""

    contender: Contender
    tflops: list[float]
    """Of one rank."""
    efficiency: list[float]
    """Of one rank against the base."""
    waiting: list[float]


def conclude(results: Results) -> Conclusion:
    """Compare the throughput of a rank in each layout with that of one process."""
    contenders = CONTENDERS[results.config.scale]
    found = [timed(results, each, contenders[0]) for each in contenders]
    available = cores(results.config)
    if not found:
        return Conclusion(
            verdict=Verdict.PLANNED,
            seen="nothing is trained at this scale; the plan's efficiencies stand beside the published ones.",
            limits=[plan_2019.FITTED],
            tables=(plan_table(results),),
            charts=(plan_chart(results),),
            commands=commands(),
        )
    return Conclusion(
        verdict=verdict(found, available),
        seen=seen(found, available),
        limits=limits(results.config, available),
        tables=(measured_table(found, available), plan_table(results)),
        charts=(measured_chart(found), plan_chart(results)),
        commands=commands(),
    )


def timed(results: Results, contender: Contender, base: Contender) -> Timed:
    """Read a contender's rounds."""
    own, alone = (tflops(results, NAME, each.name) for each in (contender, base))
    return Timed(contender, own, ratios(own, alone), waiting(results, NAME, contender.name))


def verdict(found: Sequence[Timed], available: int) -> Verdict:
    """Return the verdict from the layouts that have a core for each rank.

    Agreement: at least the published efficiency at the same tp. In part: less, but more ranks do more work in
    all rounds. Contradiction: they do not.
    """
    inside = [each for each in found if 1 < each.contender.ranks <= available]
    more = [above([each.contender.ranks * e for e in each.efficiency], 1.0) for each in inside]
    if not inside or any(each is None for each in more):
        return Verdict.OPEN
    if not all(more):
        return Verdict.CONTRADICTS
    reached = [100 * spread(each.efficiency).largest >= each.contender.published for each in inside]
    return Verdict.AGREES if all(reached) else Verdict.PARTLY


def seen(found: Sequence[Timed], available: int) -> str:
    """Return what was measured, in a sentence."""
    parts = []
    for each in found[1:]:
        words = f"{each.contender.label} {percent_of(each.efficiency)}"
        if each.contender.ranks > available:
            share = [e * each.contender.ranks / available for e in each.efficiency]
            words += f", which is {percent_of(share)} of what {available} cores can do"
        parts.append(f"{words} (published {each.contender.published:.0f} %)")
    return f"throughput of a rank against one process, the model growing with tp: {'; '.join(parts)}."


def measured_table(found: Sequence[Timed], available: int) -> Table:
    """Return efficiencies with what they are lost to."""
    rows = list[Sequence[Cell]]()
    for each in found:
        its = each.contender
        within = min(its.ranks, available)
        free = [e / (1 - wait) for e, wait in zip(each.efficiency, each.waiting, strict=True)]
        rows.append(
            [
                its.label,
                its.ranks,
                within,
                str(spread([1e3 * value for value in each.tflops])),
                percent_of(each.efficiency),
                percent_of([e * its.ranks / within for e in each.efficiency]),
                percent_of(each.waiting),
                percent_of(free),
                sent_megabytes(layers=its.layers, hidden=its.hidden, rows=its.rows, tp=its.tp),
                f"{its.published:.0f} %",
            ]
        )
    return Table(
        title="Weak scaling, measured",
        headings=[
            *("layout", "ranks", "cores", "GFLOP/s of a rank", "efficiency", "against its cores", "waiting"),
            *("efficiency without waiting", "MB sent for tp", "published"),
        ],
        rows=rows,
        note="One thread a rank. Efficiency: throughput of a rank against the first row. Against its cores: "
        "throughput of all ranks against as many single processes as they have cores. Waiting: the share of "
        "a rank's time that it waits for others, transfers included; efficiency without it is what smaller "
        "products and shared caches cost. MB sent: by a rank in a step, by formula. Published: at that tp, "
        "alone on NVLink (dp=1), or with 64 replicas over InfiniBand.",
    )


def plan_table(results: Results) -> Table:
    """Return planned efficiencies beside the published ones."""
    base = plan_2019.tflops(shape(ROWS[0]), tp=1)
    own = own_tflops(results, ROWS[0], 1)
    rows = list[Sequence[Cell]]()
    for row in ROWS:
        for dp, published in ((1, row.alone), (REPLICAS, row.replicated)):
            old = plan_2019.tflops(shape(row), tp=row.tp, dp=dp)
            rows.append(
                [
                    f"{row.name}, {gpus(row.tp * dp)}",
                    f"tp={row.tp} dp={dp}",
                    f"{published:.0f} %",
                    f"{100 * old / base:.1f} %",
                    f"{100 * own_tflops(results, row, dp) / own:.1f} %",
                ]
            )
    return Table(
        title="Weak scaling on DGX-2H: published, and planned",
        headings=["model", "layout", "published", "planned, Megatron-LM of 2019", "planned, this toolkit"],
        rows=rows,
        note="Published: figure 5, from memory. This toolkit's base is faster on one GPU (fused attention), "
        "so the same communication costs it more.",
    )


def own_tflops(results: Results, row: Row, dp: int) -> float:
    """Return this toolkit's planned TFLOP/s per GPU; NaN where the layout does not fit."""
    found = planned(results, row.step(dp))
    return float("nan") if found is None else float(found["model_tflops"])


def shape(row: Row) -> plan_2019.Shape:
    """Return the shape of a row."""
    return plan_2019.shape(layers=row.layers, hidden=row.hidden, heads=row.heads)


def measured_chart(found: Sequence[Timed]) -> Chart:
    """Return efficiencies as bars beside the published ones."""
    names = [each.contender.label for each in found]
    spreads = [spread([100 * e for e in each.efficiency]) for each in found]
    return Chart(
        name="measured",
        title="Weak scaling, measured here and published",
        x_label="layout",
        y_label="efficiency of a rank, %",
        series=[
            Series(
                name="here",
                x=names,
                y=[each.median for each in spreads],
                low=[each.least for each in spreads],
                high=[each.largest for each in spreads],
            ),
            Series(name="published", x=names, y=[each.contender.published for each in found], published=True),
        ],
        from_zero=True,
    )


def plan_chart(results: Results) -> Chart:
    """Return the planned and published efficiencies over GPUs, as in figure 5."""
    base, own = plan_2019.tflops(shape(ROWS[0]), tp=1), own_tflops(results, ROWS[0], 1)
    series = list[Series]()
    for dp, words in ((1, "tp alone"), (REPLICAS, "with 64 replicas")):
        counts = [str(row.tp * dp) for row in ROWS]
        old = [100 * plan_2019.tflops(shape(row), tp=row.tp, dp=dp) / base for row in ROWS]
        ours = [100 * own_tflops(results, row, dp) / own for row in ROWS]
        numbers = [row.alone if dp == 1 else row.replicated for row in ROWS]
        series += [
            Series(name=f"{words}: published", x=counts, y=numbers, published=True),
            Series(name=f"{words}: planned, program of 2019", x=counts, y=old),
            Series(name=f"{words}: planned, this toolkit", x=counts, y=ours),
        ]
    return Chart(
        name="planned",
        title="Weak scaling to 512 GPUs, planned and published",
        x_label="GPUs",
        y_label="efficiency, %",
        series=series,
        from_zero=True,
    )


def limits(config: ReproduceConfig, available: int) -> list[str]:
    """Return what cannot be concluded."""
    found = [plan_2019.FITTED]
    if config.scale == "laptop":
        found += [
            "Ranks exchange tensors through this host's memory (gloo), and share its caches and memory "
            "bandwidth; on a cluster each GPU has its own. The efficiencies compare communication with "
            "computing on this machine, not on the paper's.",
            f"With more than {available} ranks processes take turns on {available} cores: their efficiency "
            "says what communication costs, not how the layout scales.",
        ]
    return found


def commands() -> list[tuple[str, str]]:
    """Return the command lines for the cluster."""
    return [
        (
            f"The {row.name} model on {gpus(row.tp * dp)}",
            f"mlm pretrain model={row.model} tp={row.tp} dp={dp} recompute=full precision=fp16 "
            f"data=synthetic train.micro_batch_size=8 train.global_batch_size={8 * dp} train.steps=50 "
            "log.every=1",
        )
        for row in ROWS
        for dp in (1, REPLICAS)
    ]


EXPERIMENT = Experiment(
    name=NAME,
    title="Weak scaling of tensor parallelism, alone and with replicas",
    source="Megatron-LM, arXiv:1909.08053, table 1 and figure 5",
    claim="With models that grow with the GPUs, 8-way tensor parallelism keeps 77 % of one GPU's throughput "
    "per GPU, and 64 replicas of it on 512 GPUs 74 %.",
    minutes=6,
    steps=steps,
    conclude=conclude,
)
