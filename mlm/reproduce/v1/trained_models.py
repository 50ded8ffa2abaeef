"""The models that arXiv:1909.08053 trains (table 2), as planned runs on its cluster."""

from collections.abc import Sequence
from dataclasses import dataclass

from mlm.reproduce.conclusion import Cell, Conclusion, Table, Verdict
from mlm.reproduce.experiment import Step
from mlm.reproduce.planned import layout, layout_step, planned
from mlm.reproduce.results import Results

STEPS = 300_000
TOKENS_PER_STEP = 512 * 1024
EPOCH = 68_507
"""Steps of an epoch of its corpus."""
HARDWARE = ("hardware=dgx2h_v100_32g", "precision=fp16")


@dataclass(frozen=True)
class TrainedModel:
    """A row of table 2."""

    name: str
    """`355M`."""
    model: str
    """Preset of its shape."""
    tp: int
    days_per_epoch: float
    """Published."""
    wikitext103: float
    """Published perplexity, table 3."""
    lambada: float
    """Published accuracy, percent, table 3."""

    @property
    def words(self) -> tuple[str, ...]:
        """Settings of its run: 64 replicas of 8 samples, layers recomputed."""
        fixed = layout(tp=self.tp, dp=64, recompute="full", micro_batch=8, global_batch=512)
        return (f"model={self.model}", *fixed)

    @property
    def step(self) -> str:
        """Name of the step that plans it."""
        return f"v1-trained-{self.name.lower()}"

    @property
    def command(self) -> str:
        """Its training run; the learning rate and its decay are the defaults of `mlm pretrain`."""
        kept = [word for word in self.words if not word.startswith("gpus=")]
        training = ("precision=fp16", "schedule=cosine_v1", f"train.steps={STEPS}", "data.path=corpora/web")
        return " ".join(("mlm pretrain", *kept, *training))


MODELS = (
    TrainedModel("355M", "gpt2_v1_355m", 1, 0.86, 19.31, 45.18),
    TrainedModel("2.5B", "gpt2_v1_2_5b", 2, 2.27, 12.76, 61.73),
    TrainedModel("8.3B", "gpt2_v1_8_3b", 8, 2.10, 10.81, 66.51),
)
"""From memory: arXiv:1909.08053, tables 2 and 3."""


def plan_steps() -> list[Step]:
    """Return the plans of the paper's runs."""
    return [
        layout_step(each.step, *each.words, *HARDWARE, f"tokens={STEPS * TOKENS_PER_STEP}") for each in MODELS
    ]


def conclusion(results: Results, evaluations: Sequence[str] = ()) -> Conclusion:
    """Return the commands for a cluster, with the plan's times beside the published ones."""
    rows = list[Sequence[Cell]]()
    for each in MODELS:
        plan = planned(results, each.step)
        days = "does not fit" if plan is None else f"{plan['days']:.1f}"
        epoch = "" if plan is None else f"{plan['days'] * EPOCH / STEPS:.2f}"
        energy = "" if plan is None or plan["energy_mwh"] is None else f"{plan['energy_mwh']:.1f}"
        rows.append([each.name, 64 * each.tp, days, energy, epoch, f"{each.days_per_epoch:.2f}"])
    commands = [(f"Train the {each.name} model on {64 * each.tp} GPUs", each.command) for each in MODELS]
    commands += [
        (f"Evaluate the {each.name} model", line.format(ckpt=f"runs/{each.model}"))
        for each in MODELS
        for line in evaluations
    ]
    return Conclusion(
        verdict=Verdict.PLANNED,
        seen="nothing is trained at this scale; the plan's days per epoch stand beside the published ones.",
        limits=[
            "The plan's constants were fitted on the scaling study of the same paper (table 1, figure 5)."
        ],
        tables=(
            Table(
                title="The paper's runs on DGX-2H as planned, 300,000 steps of 512 x 1,024 tokens",
                headings=["model", "GPUs", "days", "MWh", "days per epoch", "published"],
                rows=rows,
                note=f"An epoch is {EPOCH:,} steps. Published: table 2, from memory.",
            ),
        ),
        commands=commands,
    )
