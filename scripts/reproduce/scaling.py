"""Weak scaling of tensor parallelism (arXiv:1909.08053): the model grows with the ranks."""

from collections.abc import Mapping, Sequence

from reproduce.experiment import Cell, Conclusion, Experiment, Settings, Step, Table, Verdict
from reproduce.results import Results, above, batch, ratios, share, small_gpt2, spread, timed_stages

ONE_HOST = (
    "Ranks exchange tensors through this host's memory (gloo), and share its caches and memory bandwidth: "
    "this compares communication with computing on this machine, not on the paper's."
)
WAITING = "Waiting: the share of a rank's time that it waits for others, transfers included."

NAME = "v1-scaling"
PUBLISHED = 76
"""Throughput per GPU of the 8.3B model on 512 GPUs against one GPU, percent: the abstract."""
SMALL = {1: (4, 256), 2: (5, 320), 4: (7, 384)}
"""tp → (layers, hidden size): 3 million parameters a rank of tp."""
LAYOUTS = ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2))
"""(tp, dp); the first is the base."""


def stages_of(settings: Settings) -> list[list[Step]]:
    """Return the timed runs."""
    contenders = {}
    for tp, dp in LAYOUTS:
        layers, hidden = SMALL[tp]
        sizes = small_gpt2(num_layers=layers, hidden_size=hidden, num_heads=4, max_positions=256)
        contenders[f"tp{tp}-dp{dp}"] = (*sizes, *batch(4, dp), f"tp={tp}", f"dp={dp}")
    return timed_stages(NAME, contenders, settings, 0.3)


def conclude(results: Results) -> Conclusion:
    """Compare the throughput of a rank in each layout with that of one process."""
    base, cores = results.tflops("tp1-dp1"), results.settings.cores
    efficiency = {(tp, dp): ratios(results.tflops(f"tp{tp}-dp{dp}"), base) for tp, dp in LAYOUTS}
    seen = []
    for (tp, dp), each in list(efficiency.items())[1:]:
        taken = f", which is {share([e * tp * dp / cores for e in each])} of what {cores} cores can do"
        seen.append(f"tp={tp} dp={dp} {share(each)}{taken if tp * dp > cores else ''}")
    return Conclusion(
        verdict=verdict(efficiency, cores),
        seen="throughput of a rank against one process, the model growing with tp: " + "; ".join(seen),
        limits=[
            ONE_HOST,
            f"With more than {cores} ranks processes take turns on {cores} cores: their efficiency says what "
            "communication costs, not how the layout scales.",
        ],
        tables=(measured_table(results, efficiency),),
    )


def verdict(efficiency: Mapping[tuple[int, int], Sequence[float]], cores: int) -> Verdict:
    """Return the verdict from the layouts that have a core for each rank.

    Agreement needs the published efficiency of tensor parallelism with replicas; in part: more ranks do more
    work in all rounds; contradiction: they do not.
    """
    inside = {(tp, dp): each for (tp, dp), each in efficiency.items() if 1 < tp * dp <= cores}
    more = [above([tp * dp * e for e in each], 1.0) for (tp, dp), each in inside.items()]
    if not inside or None in more:
        return Verdict.NOTHING
    if not all(more):
        return Verdict.CONTRADICTS
    both = [each for (tp, dp), each in inside.items() if tp > 1 and dp > 1]
    is_reached = [100 * max(each) >= PUBLISHED for each in both]
    return Verdict.AGREES if is_reached and all(is_reached) else Verdict.PARTLY


def measured_table(results: Results, efficiency: Mapping[tuple[int, int], Sequence[float]]) -> Table:
    """Return efficiencies with what they are lost to."""
    rows = list[list[Cell]]()
    for (tp, dp), each in efficiency.items():
        name, cores = f"tp{tp}-dp{dp}", min(tp * dp, results.settings.cores)
        waiting = results.waiting(name)
        free = [e / (1 - wait) for e, wait in zip(each, waiting, strict=True)]
        rate = spread([1e3 * value for value in results.tflops(name)])
        layers, hidden = SMALL[tp]
        rows.append(
            [
                *(f"tp={tp} dp={dp}", tp * dp, cores, rate, share(each)),
                *(share([e * tp * dp / cores for e in each]), share(waiting), share(free)),
                sent_megabytes(layers=layers, hidden=hidden, tokens=4 * 256, tp=tp),
            ]
        )
    return Table(
        title="Weak scaling, measured",
        headings=[
            *("layout", "ranks", "cores", "GFLOP/s of a rank", "efficiency", "against its cores", "waiting"),
            *("efficiency without waiting", "MB sent for tp"),
        ],
        rows=rows,
        note="One thread a rank. Efficiency: throughput of a rank against the first row. Against its "
        f"cores: throughput of all ranks against as many single processes as they have cores. {WAITING} "
        "Efficiency without it is what smaller products and shared caches cost. MB sent: by a rank in a "
        "step, by formula.",
    )


def sent_megabytes(*, layers: int, hidden: int, tokens: int, tp: int) -> float:
    """Return the megabytes that a rank sends for tensor parallelism in a step of one micro-batch.

    Two all-reduces forward and two backward of each layer, one of the embedding's output and one of its
    input's gradient (arXiv:1909.08053, section 3), each of float32 [tokens, hidden], in a ring.
    """
    return (4 * layers + 2) * 2 * (tp - 1) / tp * 4 * tokens * hidden / 1e6


EXPERIMENT = Experiment(
    name=NAME,
    title="Weak scaling of tensor parallelism, alone and with replicas",
    source="Megatron-LM, arXiv:1909.08053, abstract",
    claim="The 8.3B model on 512 GPUs, 8-way tensor parallelism in 64 replicas, keeps 76 % of the "
    "throughput per GPU of a model that fits one GPU.",
    minutes=6,
    stages=stages_of,
    conclude=conclude,
)
