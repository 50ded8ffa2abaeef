"""The commands that train: see command.py."""

from mlm.config.command import Command
from mlm.config.checks import check_pretrain
from mlm.check.parity.checks import check_parity
from mlm.plan.checks import check_plan_schedule
from mlm.check.verify_resume.checks import check_verify_resume

TRAINING = (
    Command(
        words=("pretrain",),
        config="pretrain",
        target="mlm.pretrain.run:run",
        check=check_pretrain,
        preflight="mlm.pretrain.run:preflight",
        out_is_run_folder=True,
        has_runs=True,
        summary="train a language model from scratch, or go on from a checkpoint",
        about=(
            "Trains a GPT-2 on an indexed corpus. Started plainly it starts its ranks on this host; under "
            "torchrun or SLURM it joins as one. The run folder `out` gets the composed config, checkpoints, "
            "metrics.jsonl and a loss curve; the same command again resumes it, and so does resume=RUN, with "
            "the run's own settings and what is typed behind it."
        ),
        examples=(
            (
                "The plays of Shakespeare on two cores, layers split over two processes (after `make demo`)",
                "mlm pretrain experiment=shakespeare",
            ),
            ("Your corpus, on one device", "mlm pretrain model=gpt2_124m data.path=corpus precision=bf16"),
            (
                "The 8.3 billion model of arXiv:1909.08053 on 64 x 8 GPUs",
                "sbatch scripts/slurm/pretrain.sbatch model=gpt2_8b tp=8 dp=64 data.path=corpus",
            ),
            (
                "Throughput only: nothing to prepare",
                "mlm pretrain --model gpt2_tiny --data synthetic --train.steps 50",
            ),
            (
                "More steps of a run, in its own folder",
                "mlm pretrain resume=runs/shakespeare train.steps=1800",
            ),
            ("What would run, with every key", "mlm pretrain experiment=v1_8_3b --cfg job"),
            (
                "A sweep: each job in its own folder below `out`",
                "mlm pretrain -m experiment=shakespeare optimizer.lr=3e-4,1e-3",
            ),
            (
                "Your own YAML beside the shipped one: my_configs/model/my_model.yaml",
                "mlm pretrain --config-dir my_configs model=my_model data=synthetic",
            ),
        ),
        keys=(
            *("out", "name", "seed", "ckpt", "tp", "sequence_parallel", "pp", "vp", "pipeline", "dp", "zero"),
            *("zero_reduce", "recompute", "compile"),
            *("data.path", "data.seq_length", "train.steps", "train.global_batch_size"),
            *("train.micro_batch_size", "train.validate_every", "optimizer.lr", "schedule.warmup_steps"),
            *("checkpoint.save_every", "log.every", "dist.device"),
        ),
    ),
    Command(
        words=("parity",),
        config="parity",
        target="mlm.check.parity.command_run:run",
        check=check_parity,
        preflight="mlm.check.parity.command_run:preflight",
        out_is_run_folder=True,
        own_choices=("precision=fp64", "cluster=local"),
        summary="check that a layout trains exactly as one process does, before a cluster is asked",
        about=(
            "Runs the first steps of a pretraining run twice, on the layout and on one process, and compares "
            "every loss, gradient and weight. Takes any command line of `mlm pretrain`; by default a tiny "
            "model on random tokens, in float64 even under experiment=…: there equal means to 1e-10, and "
            "every mistake of a layout shows. Ends with 0 if equal, 1 if not."
        ),
        examples=(
            (
                "Every axis at once, on eight processes of a laptop",
                "mlm parity tp=2 pp=2 dp=2 sequence_parallel=true",
            ),
            (
                "Interleaved pipeline with dropout and recomputation",
                "mlm parity pp=2 vp=2 model.num_layers=4 model.hidden_dropout=0.1 recompute=full",
            ),
            (
                "The settings of a large run on a small model",
                "mlm parity experiment=v1_8_3b model=gpt2_tiny tp=2 dp=2 train.global_batch_size=32",
            ),
            (
                "The shapes of a large model, fewer layers, your corpus",
                "mlm parity model=gpt2_355m model.num_layers=2 data.path=corpus tp=4",
            ),
            ("Half precision: looser tolerances", "mlm parity tp=2 precision=bf16"),
        ),
        keys=(
            *("steps", "out", "seed", "ckpt", "tp", "sequence_parallel", "pp", "vp", "pipeline", "dp"),
            *("zero", "zero_reduce", "recompute", "compile"),
            *("model.num_layers", "model.hidden_dropout", "model.attention_dropout"),
            *("data.path", "data.seq_length", "train.global_batch_size", "train.micro_batch_size"),
            *("optimizer.lr", "precision.dtype", "dist.device"),
        ),
    ),
    Command(
        words=("verify-resume",),
        config="verify_resume",
        target="mlm.check.verify_resume.run:run",
        local_check=check_verify_resume,
        preflight="mlm.check.verify_resume.run:preflight",
        own_choices=("cluster=local",),
        summary="check that a killed run resumes as if nothing had happened",
        about=(
            "Trains 2k steps straight; then k steps, a kill -9, and the same command again for k more. "
            "Compares every loss, and at the end every weight and moment: bit for bit on the same layout, to "
            "rounding where resumed.tp, resumed.dp … choose another. Takes any command line of `mlm "
            "pretrain`; ends with 0 if equal, 1 if not."
        ),
        examples=(
            ("A small model on two ranks", "mlm verify-resume tp=2"),
            ("Another number of replicas after the kill", "mlm verify-resume dp=2 resumed.dp=1"),
            (
                "Your corpus and model, as you will train them",
                "mlm verify-resume model=gpt2_124m data.path=corpus precision=bf16 steps=10",
            ),
        ),
        keys=(
            *("steps", "out", "seed", "tp", "sequence_parallel", "pp", "vp", "pipeline", "dp", "zero"),
            *("resumed.tp", "resumed.pp", "resumed.vp", "resumed.dp", "resumed.zero"),
            *("data.path", "data.seq_length", "train.global_batch_size", "train.micro_batch_size"),
            *("precision.dtype", "dist.device"),
        ),
    ),
    Command(
        words=("plan", "schedule"),
        config="plan_schedule",
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
