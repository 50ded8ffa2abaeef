"""Activation memory by technique, as in figure 1 and table 2: formulas of the paper beside counted bytes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlm.models.config import ModelConfig
from mlm.plan.memory import MemoryModel
from mlm.plan.shape import Layout
from mlm.reproduce.conclusion import Cell, Chart, Conclusion, Series, Table, Verdict
from mlm.reproduce.config import ReproduceConfig
from mlm.reproduce.counted import Case, kept_per_layer
from mlm.reproduce.experiment import Experiment, Step
from mlm.reproduce.results import Results

NAME = "sp-memory"
SEQ, TP, VOCAB, GB = 2048, 8, 51200, 1e9
CLOSE = 0.01
"""Error of a count at which it is the formula: table 2 leaves out norms' statistics and rounding."""
SMALL = {"num_layers": 2, "hidden_size": 96, "num_heads": 16, "vocab_size": 1024}
SMALL_SEQ = 128
"""A model of the 22 billion one's a s / h, to count attention's scores, which no GPU kernel keeps."""


@dataclass(frozen=True)
class Paper:
    """A model of the paper's table 3, on tp=8."""

    name: str
    hidden: int
    heads: int
    layers: int
    pp: int
    micro_batch: int

    @property
    def sbh(self) -> int:
        """Elements of a boundary tensor."""
        return SEQ * self.micro_batch * self.hidden

    @property
    def scores(self) -> float:
        """Return a s / h."""
        return self.heads * SEQ / self.hidden

    @property
    def sizes(self) -> dict[str, int]:
        """Return the model's sizes."""
        return {
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "num_heads": self.heads,
            "vocab_size": VOCAB,
        }


MODELS = (
    Paper("22B", 6144, 64, 48, 1, 4),
    Paper("175B", 12288, 96, 96, 8, 1),
    Paper("530B", 20480, 128, 105, 35, 1),
    Paper("1T", 25600, 160, 128, 64, 1),
)
"""From memory."""


@dataclass(frozen=True)
class Technique:
    """A row of table 2."""

    name: str
    formula: Callable[[int, float], float]
    """Bytes per s b h from t and a s / h."""
    words: str
    parallel: Mapping[str, object]
    keeps_scores: bool
    """True if attention's scores are kept: counted on a CPU."""


SPLIT = {"tp": TP, "sequence_parallel": True}
TECHNIQUES = (
    Technique("none", lambda t, r: 34 + 5 * r, "34 + 5as/h", {"tp": 1}, True),
    Technique("tp", lambda t, r: 10 + 24 / t + 5 * r / t, "10 + 24/t + 5as/(ht)", {"tp": TP}, True),
    Technique("tp + sp", lambda t, r: 34 / t + 5 * r / t, "34/t + 5as/(ht)", SPLIT, True),
    Technique(
        "tp + selective", lambda t, r: 10 + 24 / t, "10 + 24/t", {"tp": TP, "recompute": "selective"}, False
    ),
    Technique("tp + sp + selective", lambda t, r: 34 / t, "34/t", {**SPLIT, "recompute": "selective"}, False),
    Technique("full", lambda t, r: 2.0, "2", {"tp": TP, "recompute": "full"}, False),
)
BASELINE, BEST = TECHNIQUES[1], TECHNIQUES[4]


def count() -> dict[str, float]:
    """Return the counted bytes per s b h by technique."""
    small = SMALL_SEQ * SMALL["hidden_size"]
    found, model = dict[str, float](), MODELS[0]
    for each in TECHNIQUES:
        if each.keeps_scores:
            case = Case(model=SMALL, seq=SMALL_SEQ, parallel=each.parallel)
            found[each.name] = kept_per_layer(case, on_cpu=True) / small
        else:
            case = Case(
                model=model.sizes,
                seq=SEQ,
                parallel=each.parallel,
                micro_batch=model.micro_batch,
                global_batch=model.micro_batch,
            )
            found[each.name] = kept_per_layer(case) / model.sbh
    return found


def steps(config: ReproduceConfig) -> Sequence[Step]:
    """Return none: bytes are counted without devices."""
    return ()


def conclude(results: Results) -> Conclusion:
    """Compare counted bytes with table 2."""
    return conclude_from(count())


def conclude_from(counted: Mapping[str, float]) -> Conclusion:
    """Conclude from counted bytes per s b h by technique."""
    model = MODELS[0]
    errors = {
        each.name: counted[each.name] / each.formula(TP, model.scores) - 1
        for each in TECHNIQUES
        if each.name in counted
    }
    largest = max(errors, key=lambda name: abs(errors[name]))
    saved = counted[BASELINE.name] / counted[BEST.name]
    return Conclusion(
        verdict=verdict(errors, saved),
        seen=f"Counted bytes of a layer of the {model.name} model are those of table 2 to "
        f"{abs(errors[largest]):.2%} ({largest} is furthest); sequence parallelism with selective "
        f"recomputation keeps {saved:.2g} times fewer than tensor parallelism alone.",
        limits=[
            "Where scores are kept they were counted on a CPU, at a small model of the same a s / h and t: "
            "on a GPU attention is fused here and keeps no scores, so that without recomputation it keeps "
            "what the paper's selective recomputation keeps.",
            "The models' shapes and layouts are from memory.",
            "Counts are of what waits for the backward pass: no workspace, no fragments of the allocator.",
        ],
        tables=[layer_table(counted, errors), device_table()],
        charts=[technique_chart(counted), device_chart()],
        commands=commands(),
    )


def verdict(errors: Mapping[str, float], saved: float) -> Verdict:
    """Return if all counts are the formulas', and if the techniques save about five times."""
    close = [abs(error) <= CLOSE for error in errors.values()]
    if all(close) and saved >= 4.5:
        return Verdict.AGREES
    return Verdict.PARTLY if any(close) else Verdict.CONTRADICTS


def layer_table(counted: Mapping[str, float], errors: Mapping[str, float]) -> Table:
    """Return table 2 with counts, of the smallest model."""
    model = MODELS[0]
    rows: list[Sequence[Cell]] = [
        (
            each.name,
            each.words,
            each.formula(TP, model.scores),
            counted[each.name],
            f"{errors[each.name]:+.2%}",
            counted[each.name] * model.sbh / 2**20,
        )
        for each in TECHNIQUES
    ]
    return Table(
        title=f"Activations of a layer of {model.name}, t={TP}",
        headings=("technique", "formula / sbh", "formula", "counted / sbh", "error", "MiB of a layer"),
        rows=rows,
        note=f"Bytes of 16-bit activations; s={SEQ}, b={model.micro_batch}, h={model.hidden}, "
        f"a={model.heads}. Counted: what the trainer's layer keeps for backward (`mlm plan dry-run`).",
    )


@dataclass(frozen=True)
class Device:
    """Bytes of a device of the first stage."""

    state: float
    """Weights, gradients and optimizer state of mlm."""
    baseline: float
    """Activations with tensor parallelism alone, by the paper."""
    here: float
    """Activations with sequence parallelism and selective recomputation, by mlm's plan."""
    paper: float
    """The same by the paper."""


def device(model: Paper) -> Device:
    """Return the memory of a model's first stage: p micro-batches of layers/p layers are in flight."""
    layout = Layout(
        tp=TP,
        pp=model.pp,
        sequence_parallel=True,
        recompute="selective",
        micro_batch=model.micro_batch,
        global_batch=4 * model.pp * model.micro_batch,
    )
    shape = ModelConfig(**model.sizes, max_positions=SEQ)  # type: ignore[arg-type]
    parts = MemoryModel(shape, SEQ).peak(layout).parts
    state = sum(parts[name] for name in ("weights", "gradients", "optimizer", "cast weights"))
    each = model.layers * model.sbh
    return Device(
        state=state,
        baseline=each * BASELINE.formula(TP, model.scores),
        here=parts["activations"],
        paper=each * BEST.formula(TP, model.scores),
    )


def device_table() -> Table:
    """Return the memory of each model's first stage."""
    rows = list[Sequence[Cell]]()
    for model in MODELS:
        found = device(model)
        sizes = (found.state, found.baseline, found.paper, found.here)
        ratio = f"{found.baseline / found.paper:.1f} times"
        rows.append((f"{model.name}, pp={model.pp}", *(size / GB for size in sizes), ratio))
    return Table(
        title="Figure 1: GB of a device of the first stage, tp=8",
        headings=(
            "model",
            "weights and optimizer",
            "tp, by formula",
            "tp + sp + selective, formula",
            "mlm's plan",
            "formulas' ratio",
        ),
        rows=rows,
        note="Activations of pp micro-batches in flight, without interleaving. Weights, gradients and "
        "optimizer state are those of mlm: 18 bytes a parameter. mlm's plan counts the gradients of one "
        "layer's backward pass and the embedding's masks too. An A100 has 80 GB.",
    )


def technique_chart(counted: Mapping[str, float]) -> Chart:
    """Return the bytes of a layer by technique, in per cent of tensor parallelism alone."""
    model, shown = MODELS[0], TECHNIQUES[1:]
    base = BASELINE.formula(TP, model.scores)
    return Chart(
        name="techniques",
        title=f"Activations of a layer of {model.name} against tensor parallelism alone",
        x_label="",
        y_label="%",
        series=[
            Series(
                name="counted",
                x=[each.name for each in shown],
                y=[100 * counted[each.name] / base for each in shown],
            ),
            Series(
                name="table 2",
                x=[each.name for each in shown],
                y=[100 * each.formula(TP, model.scores) / base for each in shown],
                published=True,
            ),
        ],
        from_zero=True,
    )


def device_chart() -> Chart:
    """Return figure 1: the memory of each model's first stage."""
    names, found = [model.name for model in MODELS], [device(model) for model in MODELS]
    return Chart(
        name="devices",
        title="Weights and optimizer state of mlm, and activations (an A100 has 80 GB)",
        x_label="",
        y_label="GB",
        series=[
            Series(
                name="activations of tp + sp + selective, mlm's plan",
                x=names,
                y=[(each.state + each.here) / GB for each in found],
            ),
            Series(
                name="activations of tp + sp + selective, formula",
                x=names,
                y=[(each.state + each.paper) / GB for each in found],
                published=True,
            ),
            Series(
                name="activations of tp alone, formula",
                x=names,
                y=[(each.state + each.baseline) / GB for each in found],
                published=True,
            ),
        ],
        from_zero=True,
    )


def commands() -> list[tuple[str, str]]:
    """Return the dry runs of the largest model's first rank."""
    words = "mlm plan dry-run model=gpt2_sc21_1t parallel=sc21_1t dp=1 precision=bf16 data=synthetic"
    batch = "train.micro_batch_size=1 train.global_batch_size=64"
    return [
        ("Count the memory of a trillion parameters' first rank, full recomputation", f"{words} {batch}"),
        (
            "The same with sequence parallelism and selective recomputation",
            f"{words} {batch} sequence_parallel=true recompute=selective",
        ),
    ]


EXPERIMENT = Experiment(
    name=NAME,
    title="Activation memory by technique",
    source="arXiv:2205.05198, figure 1 and table 2",
    claim="A layer keeps sbh(34 + 5as/h) bytes; sequence parallelism and selective recomputation leave "
    "34sbh/t, about five times less than tensor parallelism alone.",
    minutes=1,
    steps=steps,
    conclude=conclude,
)
