"""The command `mlm pretrain`."""

from mlm.cli.command import Command
from mlm.runs.checks import check_pretrain
from mlm.runs.config import PretrainConfig
from mlm.util.errors import Problem
from mlm.util.system import resolve


def check(config: PretrainConfig, *, world_size: int | None, local_devices: int | None) -> list[Problem]:
    problems = check_pretrain(config, world_size=world_size, local_devices=local_devices)
    if config.train.observers:
        problems += resolve("mlm.training.named_observers:observer_problems")(config.train.observers)
    return problems


COMMANDS = (
    Command(
        name="pretrain",
        other_names=("train", "fit"),
        spec=PretrainConfig,
        target="mlm.cli.pretrain.run:run",
        check=check,
        preflight="mlm.training.preflight:preflight",
        model_of_ckpt="mlm.cli.pretrain.run:model_of_ckpt",
        resolvers={"schedule.cooldown": "mlm.cli.pretrain.run:settle_cooldown"},
        out_is_run_folder=True,
        has_runs=True,
        summary="train a language model from scratch, or continue from a checkpoint",
        about="""Trains a GPT-2, BERT or Llama on an indexed corpus. Started plainly it starts its ranks on
            this host; under torchrun or SLURM it joins as one. The run folder `out` gets the composed config,
            checkpoints, metrics.jsonl and curves; the same command again resumes it, and so does resume=RUN,
            or resume= of its checkpoint.mirror (@STEP names one), with the run's own settings and the
            overrides after it; with another out=… it continues there. ckpt=… begins a new run with the
            weights of one, and with its model where none is named.
            --from-megatron SCRIPT prints a Megatron-LM command line as settings, and starts nothing.""",
        examples="""
            # The plays of Shakespeare on two cores, layers split over two processes (after `make demo`)
            mlm pretrain experiment=shakespeare
            # Your corpus, on one device
            mlm pretrain model=gpt2_124m data.path=corpus precision=bf16
            # The 8.3 billion model of arXiv:1909.08053 on 64 x 8 GPUs (the script is in the repository)
            sbatch scripts/slurm/pretrain.sbatch model=gpt2_8b tp=8 dp=64 data.path=corpus
            # Throughput only: nothing to prepare
            mlm pretrain --model gpt2_tiny --data synthetic --train.steps 50
            # More steps of a run, in its own folder
            mlm pretrain resume=runs/shakespeare train.steps=1800
            # The end of a run at a stable learning rate, in its own folder
            mlm pretrain resume=runs/shakespeare schedule.cooldown=200
            # A branch of a run from one of its checkpoints, in a folder of its own
            mlm pretrain resume=runs/shakespeare/checkpoints/step-00000300 out=runs/branch optimizer.lr=1e-3
            # A new run, from step 0, with the weights of another or of an import
            mlm pretrain ckpt=runs/gpt2 out=runs/more data.path=corpus
            # What would run, with every key
            mlm pretrain experiment=v1_8_3b --cfg job
            # The settings of a job of 512 GPUs, checked where there are none
            mlm pretrain experiment=v1_8_3b data.path=corpus --check=512
            # Your own YAML besides the shipped one: my_configs/model/my_model.yaml
            mlm pretrain --config-dir my_configs model=my_model data=synthetic
        """,
        keys="""
            out name seed ckpt tp sequence_parallel tp_overlap cp ep expert_tp pp vp pipeline dp zero
            zero_reduce recompute compile data.path data.seq_length train.steps train.global_batch_size
            train.micro_batch_size train.validate_every optimizer.lr schedule.warmup_steps
            checkpoint.save_every log.every dist.device
        """,
    ),
)
