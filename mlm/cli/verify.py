"""The commands `mlm parity`, `audit`, `verify-resume`, `doctor` and `replay`: their checks and help."""

import math
from dataclasses import replace

from mlm.cli.command import Command
from mlm.launch.config import DoctorConfig
from mlm.launch.rules.checks import checked_by, devices_exist
from mlm.launch.rules.layout import MAX_CPU_RANKS, RANK_RULES, Launch
from mlm.runs.checks import check_pretrain, pretraining_problems
from mlm.training.incidents.config import ReplayConfig
from mlm.util.errors import Problem, format_settings
from mlm.util.results import folder_problem
from mlm.verify.config import AuditConfig, ParityConfig, VerifyResumeConfig, comparable


def check_parity(config: ParityConfig, *, world_size: int | None, local_devices: int | None) -> list[Problem]:
    problems = check_pretrain(comparable(config), world_size=world_size, local_devices=local_devices)
    p, cp = config.model.attention_dropout, config.parallel.cp
    if problems or local_devices is None or not p or cp == 1:
        return problems
    # Fused attention on one GPU draws other masks than attention over cp ranks, which hashes positions.
    problem = f"model.attention_dropout={p:g} on a GPU draws other masks at cp={cp} than on one process"
    return [Problem(("model.attention_dropout", "cp"), problem, "use model.attention_dropout=0")]


def check_verify_resume(config: VerifyResumeConfig) -> list[Problem]:
    run = replace(config, dist=replace(config.dist, device="auto", backend="auto"))
    return pretraining_problems(comparable(run), Launch(None, None, elsewhere=False))


def check_audit(config: AuditConfig) -> list[Problem]:
    sizes = {axis: getattr(config, axis) for axis in ("tp", "pp", "dp", "cp")}
    ranks = math.prod(sizes.values())
    if 1 < ranks <= MAX_CPU_RANKS:
        return []
    problem = f"{format_settings(sizes)}: an audit compares 2 to {MAX_CPU_RANKS} ranks with one process"
    return [Problem(sizes, f"{problem}, not {ranks}", "set one size or two, such as tp=2")]


KEYS = """
    steps out seed ckpt tp sequence_parallel cp ep pp vp pipeline dp zero data.path data.seq_length
    train.global_batch_size train.micro_batch_size precision.dtype dist.device
"""
COMMANDS = (
    Command(
        name="parity",
        spec=ParityConfig,
        target="mlm.verify.parity:run",
        check=check_parity,
        preflight="mlm.verify.parity:preflight",
        out_is_run_folder=True,
        fixed_choices=("precision=fp64", "cluster=local"),
        summary="check that a layout trains exactly as one process does, before using a cluster",
        about="""Runs the first steps of a pretraining run on the layout and on one process, and compares
            every loss, gradient and weight. Takes any command line of `mlm pretrain`; by default a tiny model
            on random tokens, in float64, where equal means to 1e-10. Ends with 0 if equal, 1 if not.""",
        examples="""
            # Every axis at once, on eight processes of a laptop
            mlm parity tp=2 pp=2 dp=2 sequence_parallel=true
            # The settings of a large run on a small model
            mlm parity experiment=v1_8_3b model=gpt2_tiny tp=2 dp=2 train.global_batch_size=32
            # Half precision: looser tolerances
            mlm parity tp=2 precision=bf16
        """,
        keys=f"{KEYS} recompute compile model.num_layers model.hidden_dropout",
    ),
    Command(
        name="audit",
        spec=AuditConfig,
        target="mlm.verify.audit.api:run",
        local_check=check_audit,
        preflight="mlm.verify.audit.api:preflight",
        summary="find the first place where a layout of any PyTorch training code parts from one process",
        about="""Runs a function of yours, which builds a module or a training step for a mesh, on one process
            and on the layout, over gloo and in float64. Compares the output of every module and its gradient,
            every parameter's gradient after reduction, the norm, the weights after each step; names the first
            place that differs, the likely cause, and the smallest layout that shows it. Ends with 0 if all is
            alike, 1 if not, 2 for code that cannot be judged.""",
        examples="""
            # A tensor-parallel module
            mlm audit my_model.py:build --tp 2
            # With replicas and a page
            mlm audit my_model.py:build tp=2 dp=2 out=audit.html
        """,
        positional=("build",),
    ),
    Command(
        name="verify-resume",
        spec=VerifyResumeConfig,
        target="mlm.verify.resume:run",
        local_check=check_verify_resume,
        preflight="mlm.verify.resume:preflight",
        fixed_choices=("cluster=local",),
        summary="check that a killed run resumes as if nothing had happened",
        about="""Trains 2k steps straight; then k steps, a kill -9, and the same command again for k more.
            Compares every loss, and at the end every weight and moment, bit for bit. On a GPU add
            deterministic=true: its fastest attention adds gradients in no fixed order, so that no two runs
            have the same bits. Takes any command line of `mlm pretrain`; ends with 0 if equal, 1 if not.""",
        examples="""
            # Kill a run on two ranks, resume it, and compare bit for bit
            mlm verify-resume tp=2
        """,
        keys=KEYS,
    ),
    Command(
        name="doctor",
        spec=DoctorConfig,
        target="mlm.launch.doctor.run:run",
        check=checked_by(RANK_RULES, (devices_exist, lambda config, _: folder_problem(config.out))),
        forecast="mlm.launch.doctor.run:lines",
        summary="check hosts, disks, GPUs and the network of a layout before a run",
        about="""Looks on every rank at versions, device, memory, disk, limits, /dev/shm, host
            names and variables; tries whether the folder is shared, renames, locks and is fast; and compares
            collectives over each axis with exact numbers and times them. Prints a table with a remedy for
            each problem. Ends with 0, or 1 if a check failed. Starts its ranks as `mlm pretrain` does:
            plainly, under torchrun or under srun.""",
        examples="""
            # This host
            mlm doctor
            # The layout of a run, and the disk that it will write to
            mlm doctor tp=2 out=runs/doctor.json
            # Two hosts of 8 GPUs (on each of them)
            torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500
                --no-python mlm doctor tp=8
        """,
        keys="out tp cp pp dp ep expert_tp dist.device dist.backend dist.timeout_s",
    ),
    Command(
        name="replay",
        spec=ReplayConfig,
        target="mlm.training.incidents.replay:run",
        positional=("incident",),
        summary="compute the step of an incident once more, and find where it went wrong",
        about="""Loads the checkpoint before the incident on one process, trains up to its step and computes
            that step again. Prints the first number that is not finite or far from the others (module,
            tensor, sample, position), and compares another precision. Changes nothing in the run.""",
        examples="""
            # A run of any layout
            mlm replay runs/a/incidents/step-00001234
            # In float64 too
            mlm replay runs/a/incidents/step-00001234 precision=fp64
        """,
    ),
)
