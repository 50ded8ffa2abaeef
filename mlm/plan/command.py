"""The commands of `mlm plan`."""

from mlm.config.command import Command
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

HARDWARE_FILES = {"hardware=this": this_machine}
NO_DEVICES = ("data=synthetic", "cluster=local")
"""Choices of a command that runs nothing on devices."""

COMMANDS = (
    Command(
        words=("plan", "layouts"),
        spec=PlanLayoutsConfig,
        target="mlm.plan.layouts:run",
        local_check=check_plan_layouts,
        own_choices=NO_DEVICES,
        summary="find the fastest, leanest or cheapest layouts of a model on some GPUs",
        about=(
            "Searches the layouts that `mlm pretrain` takes (tp, sequence parallelism, cp, pp, vp, schedule, "
            "dp, ep, zero, recomputation, micro-batch) on a number of GPUs, and prints the fastest that fit: "
            "step time, tokens per second, model and hardware TFLOP/s, MFU and memory; out=… holds each part of "
            "them. The model's own modules are counted, a layer at a time, without a GPU; "
            "times are checked against published runs (the guide Planning). A key that is set (tp=8) is "
            "kept, the others are searched."
        ),
        examples=(
            (
                "The 8.3 billion model of arXiv:1909.08053 on 64 DGX A100",
                "mlm plan layouts model=gpt2_8b gpus=512 hardware=dgx_a100_80g",
            ),
            (
                "What 300 billion tokens take and cost",
                "mlm plan layouts model=gpt2_8b gpus=64 tokens=300e9 price_per_gpu_hour=2.5",
            ),
            (
                "The same with failures, and the interval of checkpoints that loses least",
                "mlm plan layouts model=llama3_70b gpus=2048 hardware=dgx_h100 train.global_batch_size=2048 "
                "data.seq_length=8192 tokens=2e12 price_per_gpu_hour=2.5 failures.mtbf_hours=50000",
            ),
            (
                "What rejects other layouts, with tp=8 kept",
                "mlm plan layouts model=gpt2_sc21_39b gpus=512 train.global_batch_size=1536 tp=8 why=true",
            ),
            (
                "What memory costs in time",
                "mlm plan layouts model=gpt2_2_5b gpus=16 goal=memory out=a.json",
            ),
            ("How many GPUs are worth their price", "mlm plan layouts model=gpt2_8b gpus=512 goal=cost"),
        ),
        file_groups=("hardware",),
        own_files=HARDWARE_FILES,
        keys=(
            *("gpus", "goal", "tokens", "price_per_gpu_hour", "failures.mtbf_hours", "failures.checkpoint_s"),
            *("failures.interval_s", "failures.restart_s", "show", "why", "out", "data.seq_length"),
            *("train.global_batch_size", "train.micro_batch_size", "tp", "cp", "pp", "vp", "dp"),
            *("sequence_parallel", "pipeline", "zero", "zero_reduce", "recompute"),
        ),
    ),
    Command(
        words=("plan", "compare"),
        spec=PlanCompareConfig,
        target="mlm.plan.compare:run",
        local_check=check_plan_compare,
        own_choices=NO_DEVICES,
        positional=("a", "b"),
        summary="compare two layouts of a model: which parts of a step make their difference",
        about=(
            "Forecasts a step in two layouts, named as `mlm plan layouts` names them, and shows "
            "the parts of both: products, attention, other kernels, exposed "
            "communication over tp, cp, ep, pp and dp, idle time of the pipeline, the optimizer. Memory and "
            "GPU-hours follow."
        ),
        examples=(
            (
                "Tensor parallelism against sharded weights",
                "mlm plan compare 'tp8 pp1 dp64 mb4' 'tp1 pp1 dp512 zero3 mb1' model=gpt2_8b",
            ),
        ),
        file_groups=("hardware",),
        own_files=HARDWARE_FILES,
        keys=("a", "b", "out", "data.seq_length", "train.global_batch_size"),
    ),
    Command(
        words=("plan", "memory"),
        spec=PlanMemoryConfig,
        target="mlm.plan.one_layout:run",
        local_check=check_plan_memory,
        own_choices=NO_DEVICES,
        summary="show the memory of one layout by part, on any rank, beside that of the device",
        about=(
            "Memory of a GPU at its fullest moment, counted in the model's own modules: weights, gradients "
            "and optimizer state (exact), activations of all micro-batches in flight, the vocabulary "
            "projection, communication buffers, and what the driver and the allocator take. Shown for the "
            "first and the last pipeline stage, and for rank=… where it is given."
        ),
        examples=(
            (
                "The 8.3 billion model of arXiv:1909.08053 in its own layout",
                "mlm plan memory model=gpt2_8b parallel=v1_8_3b hardware=dgx2h_v100_32g precision=fp16",
            ),
            (
                "A trillion parameters: arXiv:2104.04473, table 1",
                "mlm plan memory model=gpt2_sc21_1t parallel=sc21_1t hardware=dgx_a100_80g rank=1000",
            ),
            ("Sharded weights on one node", "mlm plan memory model=gpt2_2_5b dp=8 zero=3 zero_reduce=every"),
        ),
        file_groups=("hardware",),
        own_files=HARDWARE_FILES,
        keys=(
            *("rank", "out", "data.seq_length", "train.global_batch_size", "train.micro_batch_size"),
            *("tp", "sequence_parallel", "pp", "vp", "pipeline", "dp", "zero", "zero_reduce", "recompute"),
        ),
    ),
    Command(
        words=("plan", "dry-run"),
        spec=PlanDryRunConfig,
        target="mlm.plan.dry_run:run",
        local_check=check_plan_dry_run,
        own_choices=NO_DEVICES,
        summary="run a step of any rank of any layout here, without its GPUs; count all it does",
        about=(
            "Runs the trainer of one rank of a layout on this machine, on tensors that have shapes and no "
            "numbers, among ranks that answer at once: the settings are those of `mlm pretrain`, and so are "
            "the schedule, the reducers and the optimizer. Counted are its parameters, the FLOPs of its "
            "matrix products, each collective and transfer with its bytes, and its memory when it is "
            "fullest, part by part."
        ),
        examples=(
            (
                "A rank of the 8.3 billion model of arXiv:1909.08053 on 512 GPUs",
                "mlm plan dry-run experiment=v1_8_3b rank=137",
            ),
            ("Any layout of your own", "mlm plan dry-run model=gpt2_8b tp=8 dp=64 precision=bf16 rank=137"),
            (
                "A rank of the trillion of arXiv:2104.04473 on 3,072 GPUs, every number as JSON",
                "mlm plan dry-run model=gpt2_sc21_1t parallel=sc21_1t precision=bf16 rank=1600 out=rank.json",
            ),
            (
                "What sharding leaves on a GPU",
                "mlm plan dry-run model=gpt2_1_5b dp=8 zero=3 precision=bf16 train.global_batch_size=64",
            ),
        ),
        keys=(
            *("rank", "out", "tp", "sequence_parallel", "pp", "vp", "pipeline", "dp", "zero", "zero_reduce"),
            *("recompute", "attention", "data.seq_length", "train.global_batch_size"),
            *("train.micro_batch_size", "model.num_layers", "precision.dtype"),
        ),
    ),
    Command(
        words=("plan", "calibrate"),
        spec=PlanCalibrateConfig,
        target="mlm.plan.calibrate:run",
        local_check=check_plan_calibrate,
        summary="measure this machine or cluster, for plans by its own numbers (hardware=this)",
        about=(
            "Measures matrix products over shapes, memory bandwidth, attention, a transformer layer, the "
            "optimizer's step, and collectives and transfers over sizes, on all ranks at once, in less than "
            "two minutes. The result is kept for hardware=this on this machine, and written as YAML where "
            "out=… names one. Started plainly it takes every GPU of this host, or its cores; under torchrun "
            "or SLURM all hosts, and the links between them."
        ),
        examples=(
            ("This machine, for hardware=this", "mlm plan calibrate"),
            ("A file to keep", "mlm plan calibrate out=my_machine.yaml"),
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
