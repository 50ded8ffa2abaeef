"""The commands: which config each composes, what it runs, and what its help says.

Targets are import strings, so that help, completion and faults come without importing torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from mlm.config.checks import check_eval_loss, check_generate, check_pretrain
from mlm.config.compose import SPECS
from mlm.config.parity_checks import check_parity
from mlm.config.plan_checks import check_plan_schedule


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of `mlm`."""

    words: tuple[str, ...]
    """As typed: ("eval", "loss")."""
    config: str
    """Name of its primary config in configs/, and of its dataclass in SPECS."""
    target: str
    """module:function that does the work."""
    check: Callable[..., list[str]] | None = None
    """check(config, world_size=…, local_devices=…) -> faults; a command that has one runs on ranks, as
    target(config, ctx). One without runs in this process, as target(config)."""
    local_check: Callable[[Any], list[str]] | None = None
    """local_check(config) -> faults, of a command that runs in this process."""
    preflight: str | None = None
    """module:function(config) -> faults found by looking into files, asked when there is no other fault."""
    out_is_run_folder: bool = False
    """Whether `out` is a run folder, where failing ranks may leave their logs."""
    summary: str
    """One line for `mlm --help`."""
    about: str
    """A paragraph for its own help."""
    examples: tuple[tuple[str, str], ...]
    """(what it does, command line) pairs."""
    own_choices: tuple[str, ...] = ()
    """Choices of groups that experiment=… leaves as they are here; typed ones win."""
    keys: tuple[str, ...] = ()
    """Most used keys, for its help; empty means all."""

    @property
    def name(self) -> str:
        """`eval loss`."""
        return " ".join(self.words)

    @property
    def spec(self) -> type:
        """The dataclass its config becomes."""
        return SPECS[self.config]


COMMANDS = (
    Command(
        words=("pretrain",),
        config="pretrain",
        target="mlm.train.pretrain:run",
        check=check_pretrain,
        preflight="mlm.train.pretrain:preflight",
        out_is_run_folder=True,
        summary="train a language model from scratch, or go on from a checkpoint",
        about=(
            "Trains a GPT-2 on an indexed corpus. Started plainly it starts its ranks on this host; under "
            "torchrun or SLURM it joins as one. The run folder `out` gets the composed config, checkpoints, "
            "metrics.jsonl and a loss curve; the same command again resumes it."
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
            *("recompute", "compile"),
            *("data.path", "data.seq_length", "train.steps", "train.global_batch_size"),
            *("train.micro_batch_size", "train.validate_every", "optimizer.lr", "schedule.warmup_steps"),
            *("checkpoint.save_every", "log.every", "dist.device"),
        ),
    ),
    Command(
        words=("parity",),
        config="parity",
        target="mlm.tasks.parity:run",
        check=check_parity,
        preflight="mlm.tasks.parity:preflight",
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
            *("zero", "recompute", "compile"),
            *("model.num_layers", "model.hidden_dropout", "model.attention_dropout"),
            *("data.path", "data.seq_length", "train.global_batch_size", "train.micro_batch_size"),
            *("optimizer.lr", "precision.dtype", "dist.device"),
        ),
    ),
    Command(
        words=("eval", "loss"),
        config="eval_loss",
        target="mlm.tasks.loss:run",
        check=check_eval_loss,
        preflight="mlm.tasks.loss:preflight",
        summary="mean loss, perplexity and bits per byte of a checkpoint on a corpus",
        about=(
            "Scores a checkpoint on an indexed corpus, every token once. The score does not depend on tp, "
            "pp, dp or the batch size. It is printed and saved as JSON."
        ),
        examples=(
            ("The validation set of a run", "mlm eval loss ckpt=runs/shakespeare"),
            ("Another corpus, on two ranks", "mlm eval loss ckpt=runs/shakespeare path=corpus/test tp=2"),
        ),
        keys=(
            *("ckpt", "path", "out", "batch_size", "seq_length", "tokenizer"),
            *("tp", "pp", "dp", "dist.device"),
        ),
    ),
    Command(
        words=("generate",),
        config="generate",
        target="mlm.tasks.generate:run",
        check=check_generate,
        preflight="mlm.tasks.generate:preflight",
        summary="continue a text with a checkpoint",
        about="Samples a continuation of a prompt, token by token, and prints it.",
        examples=(
            ("A passage", 'mlm generate ckpt=runs/shakespeare prompt="ROMEO:"'),
            (
                "The most probable continuation",
                'mlm generate --ckpt runs/shakespeare --prompt "To be, or" --temperature 0',
            ),
        ),
        keys=(
            *("ckpt", "prompt", "max_new_tokens", "temperature", "top_k", "top_p", "seed", "tokenizer"),
            *("tp", "pp", "dist.device"),
        ),
    ),
    Command(
        words=("data", "tokenizer"),
        config="data_tokenizer",
        target="mlm.data.build:run_tokenizer",
        summary="train a byte-level BPE tokenizer on text",
        about="Trains a byte-level BPE on text and writes tokenizer.json, for `mlm data build`.",
        examples=(
            ("8,192 tokens from your documents", "mlm data tokenizer input=text out=corpus vocab_size=8192"),
        ),
    ),
    Command(
        words=("data", "build"),
        config="data_build",
        target="mlm.data.build:run_build",
        summary="tokenise text into the .bin/.idx corpus that pretrain reads",
        about=(
            "Tokenises documents into Megatron's indexed format, one corpus each for train, validation and "
            "test, with the tokenizer beside them."
        ),
        examples=(
            (
                "A folder of train.jsonl and validation.jsonl",
                "mlm data build input=text tokenizer=corpus out=corpus",
            ),
            (
                "One file, split by documents",
                "mlm data build input=text.jsonl tokenizer=gpt2 out=corpus split=0.9,0.05,0.05",
            ),
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


def resolve(target: str) -> Any:
    """The function that an import string names: `mlm.tasks.loss:run`."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)
