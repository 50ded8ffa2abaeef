"""The command `mlm plan schedule`."""

from mlm.config.command import Command
from mlm.plan.checks import check_plan_schedule
from mlm.plan.config import PlanScheduleConfig

COMMANDS = (
    Command(
        words=("plan", "schedule"),
        config="plan_schedule",
        spec=PlanScheduleConfig,
        target="mlm.plan.schedule:run",
        local_check=check_plan_schedule,
        summary="draw a pipeline schedule, with its bubble and what each rank holds and sends",
        about=(
            "Simulates one training step of a pipeline and draws who computes what when, as figures 3 and 4 "
            "of arXiv:2104.04473: forward and backward of each micro-batch on each chunk of layers. Below "
            "stand the bubble (idle over ideal time) beside its closed formula, the makespan, and for each "
            "rank its micro-batches in flight and its transfers. No GPU and no model are needed."
        ),
        examples=(
            (
                "Figure 4 of the paper: interleaved 1F1B, as an SVG too",
                "mlm plan schedule pp=4 vp=2 micro_batches=8 out=schedule.svg",
            ),
            ("Plain 1F1B: the same ranks, twice the bubble", "mlm plan schedule pp=4 micro_batches=8"),
            (
                "Zero bubble (ZB-H1): weight gradients fill the gaps",
                "mlm plan schedule pp=4 micro_batches=8 pipeline=zb_h1",
            ),
            (
                "What slow links cost",
                "mlm plan schedule pp=8 vp=2 micro_batches=32 transfer_cost=0.1",
            ),
        ),
    ),
)
