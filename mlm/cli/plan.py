"""The commands of `mlm plan`."""

from functools import partial

from mlm.cli.command import Command
from mlm.plan.checks import (
    check_plan_calibrate,
    check_plan_compare,
    check_plan_dry_run,
    check_plan_layouts,
    check_plan_memory,
    check_plan_schedule,
)
from mlm.plan.config import (
    PlanCalibrateConfig,
    PlanCompareConfig,
    PlanDryRunConfig,
    PlanLayoutsConfig,
    PlanMemoryConfig,
    PlanScheduleConfig,
)
from mlm.plan.hardware import this_machine

NO_DEVICES = ("data=synthetic", "cluster=local")
"""Choices of a command that runs nothing on devices."""
on_hardware = partial(
    Command,
    own_choices=NO_DEVICES,
    file_groups=("hardware",),
    own_files={"hardware=this": this_machine},
)
BATCH = ("data.seq_length", "train.global_batch_size", "train.micro_batch_size")
LAYOUT = ("tp", "sequence_parallel", "pp", "vp", "pipeline", "dp", "zero", "zero_reduce", "recompute")

COMMANDS = (
    on_hardware(
        words=("plan", "layouts"),
        spec=PlanLayoutsConfig,
        target="mlm.plan.layouts:run",
        local_check=check_plan_layouts,
        summary="find the fastest, leanest or cheapest layouts of a model on some GPUs",
        about=(
            "Searches the layouts that `mlm pretrain` takes on a number of GPUs, counting the model's own "
            "modules without a GPU. A key that is set (tp=8) is kept, the others are searched."
        ),
        examples=(
            (
                "The 8.3 billion model of arXiv:1909.08053 on 64 DGX A100",
                "mlm plan layouts model=gpt2_8b gpus=512 hardware=dgx_a100_80g",
            ),
            (
                "What 300 billion tokens take and cost, with failures",
                "mlm plan layouts model=gpt2_8b gpus=64 tokens=300e9 price_per_gpu_hour=2.5 "
                "failures.mtbf_hours=50000",
            ),
        ),
        keys=(
            *("gpus", "goal", "tokens", "price_per_gpu_hour", "failures.mtbf_hours", "show", "out"),
            *BATCH,
            *("tp", "cp", "pp", "vp", "dp", "sequence_parallel", "pipeline", "zero", "recompute"),
        ),
    ),
    on_hardware(
        words=("plan", "compare"),
        spec=PlanCompareConfig,
        target="mlm.plan.layouts:compare",
        local_check=check_plan_compare,
        positional=("a", "b"),
        summary="compare two layouts of a model: which parts of a step make their difference",
        about=(
            "Forecasts a step in two layouts, named as `mlm plan layouts` names them, part by part, and "
            "their memory and GPU-hours."
        ),
        examples=(
            (
                "Tensor parallelism against sharded weights",
                "mlm plan compare 'tp8 pp1 dp64 mb4' 'tp1 pp1 dp512 zero3 mb1' model=gpt2_8b",
            ),
        ),
        keys=("a", "b", "out", "data.seq_length", "train.global_batch_size"),
    ),
    on_hardware(
        words=("plan", "memory"),
        spec=PlanMemoryConfig,
        target="mlm.plan.layouts:memory",
        local_check=check_plan_memory,
        summary="show the memory of one layout by part, on any rank, beside that of the device",
        about=(
            "Memory of a GPU at its fullest moment, counted in the model's own modules, on rank=… and on the "
            "first and the last pipeline stage."
        ),
        examples=(
            (
                "A trillion parameters: arXiv:2104.04473, table 1",
                "mlm plan memory model=gpt2_sc21_1t parallel=sc21_1t hardware=dgx_a100_80g rank=1000",
            ),
        ),
        keys=("rank", "out", *BATCH, *LAYOUT),
    ),
    Command(
        words=("plan", "dry-run"),
        own_choices=NO_DEVICES,
        spec=PlanDryRunConfig,
        target="mlm.plan.dry_run:run",
        local_check=check_plan_dry_run,
        summary="run a step of any rank of any layout here, without its GPUs; count all it does",
        about=(
            "Runs the trainer of one rank of a layout on tensors without numbers, with the settings of "
            "`mlm pretrain`. Counted are its parameters, FLOPs, messages, and its memory when it is fullest."
        ),
        examples=(
            (
                "A rank of the trillion of arXiv:2104.04473 on 3,072 GPUs, every number as JSON",
                "mlm plan dry-run model=gpt2_sc21_1t parallel=sc21_1t precision=bf16 rank=1600 out=rank.json",
            ),
        ),
        keys=("rank", "out", *BATCH, *LAYOUT, "attention", "precision.dtype"),
    ),
    Command(
        words=("plan", "calibrate"),
        spec=PlanCalibrateConfig,
        target="mlm.plan.calibrate:run",
        local_check=check_plan_calibrate,
        summary="measure this machine or cluster, for plans by its own numbers (hardware=this)",
        about=(
            "Measures kernels, collectives and transfers on all ranks at once, in less than two minutes. "
            "Started plainly it takes every GPU of this host, or its cores; under torchrun or SLURM all "
            "hosts, and the links between them."
        ),
        examples=(
            ("This machine, for hardware=this", "mlm plan calibrate"),
            (
                "Two hosts of 8 GPUs (on each of them)",
                "torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 "
                "--no-python mlm plan calibrate out=my_cluster.yaml",
            ),
        ),
    ),
    Command(
        words=("plan", "schedule"),
        spec=PlanScheduleConfig,
        target="mlm.plan.schedule:run",
        local_check=check_plan_schedule,
        summary="draw a pipeline schedule, with its bubble and what each rank holds",
        about=(
            "Simulates one training step of a pipeline and draws who computes what when, as figures 3 and 4 "
            "of arXiv:2104.04473. Below stand the bubble (idle over ideal time), the makespan, and the "
            "micro-batches in flight on each rank."
        ),
        examples=(
            (
                "Figure 4 of the paper: interleaved 1F1B",
                "mlm plan schedule pp=4 vp=2 micro_batches=8",
            ),
            (
                "Zero bubble (ZB-H1): weight gradients fill the gaps",
                "mlm plan schedule pp=4 micro_batches=8 pipeline=zb_h1",
            ),
        ),
    ),
)
