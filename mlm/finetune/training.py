"""`mlm finetune TASK`: train a head, and the model below it, on a task; keep the best checkpoint."""

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch

import mlm
from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.folders import BEST, CHECKPOINTS, latest_checkpoint
from mlm.checkpoint.native.run_state import FINETUNING, LORA, TOKENIZER
from mlm.checkpoint.native.save_load import CheckpointError, resolve
from mlm.config.build import config_digest, from_dict
from mlm.config.fields import exact
from mlm.data.config import DataConfig
from mlm.data.files_present import hub_id
from mlm.finetune.batches import Batcher, ExampleOrder, TaskBatch, make_batcher
from mlm.finetune.config import FinetuneConfig
from mlm.finetune.examples import Example
from mlm.finetune.inputs import (
    Settings,
    StartModel,
    change_problems,
    choose_epochs_and_batch,
    fixed_settings,
    load_body,
    read_splits,
    read_start,
    tokenize_split,
)
from mlm.finetune.packing import Packer, PairLoss, set_reference
from mlm.finetune.registry import check_installed, task_type
from mlm.finetune.results import (
    BAD_ROWS,
    BASE,
    DATA_COLUMNS,
    DATA_PATH,
    RESULT,
    Progress,
    Result,
    Scores,
    header,
    read_finished_result,
    report,
)
from mlm.finetune.scoring import Objective, Scorer, make_objective, one_label_warning
from mlm.finetune.splits import TaskSplit, TokenizedSplit
from mlm.inference.trained import open_for_layout
from mlm.launch.doctor.folder import check_start
from mlm.launch.stop import stopping_at_once
from mlm.optim.config import ScheduleConfig
from mlm.optim.precision import DTYPES
from mlm.parallel.mesh import ParallelContext
from mlm.runs.config import CheckpointConfig, PretrainConfig, TrainConfig
from mlm.runs.tokenizer import digests_of_tokenizer
from mlm.tracking.config import missing_extras
from mlm.tracking.metrics import Parts, Rates
from mlm.tracking.peak import peak_flops
from mlm.training.identity import changes_line
from mlm.training.loop import Loop, composed_yaml, is_step_due, training_session
from mlm.training.memory import reuse_large_blocks, torch_errors_as_user_errors, trim_memory
from mlm.training.preflight import run_start_problems
from mlm.training.resume import claim, resume
from mlm.training.state import load_weights, stored_shards
from mlm.training.trainer import Trainer
from mlm.util.errors import ConfigError, UserError, attempt, writing_to
from mlm.util.files import dump_json, write_atomic
from mlm.util.ownership import RUN_SETTINGS, claim_problems

FEW_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """Model and examples, shared by the runs of all seeds."""

    start: StartModel
    train: TokenizedSplit
    validations: Sequence[TokenizedSplit]
    """One per split of task.validations."""
    tests: Sequence[TokenizedSplit]
    """Predicted at the end."""

    def notes(self) -> list[str]:
        template, splits = self.start.tokenizer.chat_template, (self.train, *self.validations, *self.tests)
        notes = [template.note] if template is not None and template.note else []
        return [*notes, *(note for split in splits for note in split.notes())]


def preflight(config: FinetuneConfig) -> list[str]:
    problems = [*missing_extras(config.log)]
    source = attempt(problems, lambda: open_for_layout(config.ckpt, config.parallel))
    start = None if problems else attempt(problems, lambda: read_start(config, source))
    attempt(problems, lambda: check_installed(config.task))
    splits = attempt(problems, lambda: read_splits(config, None if config.data.bad_rows == "skip" else start))
    if problems or start is None or splits is None:
        return problems
    try:
        if config.seeds > 1:
            problems += claim_problems(config.out, "run", writes=(RESULT,))
            if latest_checkpoint(Path(config.out, CHECKPOINTS)) is not None:
                problems.append(
                    f"seeds={config.seeds}: out={config.out} holds a run of one; set another out=…"
                )
        tp, limit = config.parallel.tp, start.model.max_positions
        if config.parallel.sequence_parallel and -(-start.max_length // tp) * tp > limit:
            problems.append(
                f"task.max_length={start.max_length}: sequence_parallel=true pads texts to a multiple of "
                f"tp={tp}, and the model reads {limit} tokens: use task.max_length={limit // tp * tp} or less"
            )
        for seed_config in configs_by_seed(choose_epochs_and_batch(config, splits)):
            problems += run_start_problems(pretrain_config(seed_config, start, 1), compares=False)
            problems += change_problems(seed_config, fixed_settings(seed_config, start, splits))
    except UserError as error:
        return list(error.problems)
    return problems


def run(config: FinetuneConfig, ctx: ParallelContext) -> int:
    """Finetune, with each seed; every rank calls this. Return the command's exit code. Raises UserError."""
    if ctx.device.type == "cpu":
        reuse_large_blocks()
    start, splits = read_start(config), read_splits(config)
    configs, ranks = configs_by_seed(choose_epochs_and_batch(config, splits)), Ranks.of(ctx)

    def read_results() -> list[Any]:
        if not ctx.is_main:  # one rank reads, as a shared disk may show ranks different files
            return []
        settings = [fixed_settings(seed_config, start, splits) for seed_config in configs]
        results = [read_finished_result(*pair) for pair in zip(configs, settings, strict=True)]
        return [[s, result and asdict(result)] for s, result in zip(settings, results, strict=True)]

    def explain(error: Exception) -> UserError:
        return CheckpointError(f"ckpt={config.ckpt}, out={config.out}: cannot be read ({error}): fix it")

    states = ranks.broadcast(ranks.together(read_results, explain))
    results = [None if result is None else from_dict(Result, result) for _, result in states]
    is_new = None in results
    with stopping_at_once("stopped before training"):
        material = tokenize_inputs(config, start, splits) if is_new else None
    for n, seed_config in enumerate(configs):
        if results[n] is None and material is not None:
            results[n], stopped = finetune(seed_config, states[n][0], material, ctx)
            if stopped is not None and None in results:
                return stopped
    if ctx.is_main:
        report(config, [result for result in results if result is not None], is_new=is_new)
    return 0


def configs_by_seed(config: FinetuneConfig) -> list[FinetuneConfig]:
    if config.seeds == 1:
        return [config]
    seeds = range(config.seed, config.seed + config.seeds)
    return [replace(config, seed=s, seeds=1, out=str(Path(config.out, f"seed-{s}"))) for s in seeds]


def tokenize_inputs(config: FinetuneConfig, start: StartModel, splits: Mapping[str, TaskSplit]) -> RunInputs:
    """Tokenise the rows. Raises UserError."""
    task, train = config.task, splits[config.task.train]
    tests, problems = task.tests if config.data.predict_tests else (), list[str]()
    used = [train, *(splits[name] for name in (*task.validations, *tests))]
    attempts = [attempt(problems, partial(tokenize_split, task, split, start)) for split in used]
    if problems:
        raise ConfigError(problems)
    tokenized = [result for result in attempts if result is not None]
    end = 1 + len(task.validations)
    return RunInputs(start=start, train=tokenized[0], validations=tokenized[1:end], tests=tokenized[end:])


@dataclass
class FinetuneLoop(Loop):
    """Train on epochs of batches, validate by the task's metrics, and keep the best checkpoint."""

    warmup_key = "schedule.warmup"

    config: FinetuneConfig
    material: RunInputs
    order: ExampleOrder
    batcher: Batcher
    progress: Progress
    rows: int = field(default=0, init=False)
    """Examples trained on since the last logged step."""

    @property
    def scorer(self) -> Scorer:
        objective = cast(Objective, self.trainer.objective)
        task, model = self.config.task, self.trainer.model
        return Scorer(model=model, objective=objective, task=task, batcher=self.batcher)

    @property
    def validate_every(self) -> int:
        return self.config.train.validate_every or self.order.steps_per_epoch

    def is_done(self) -> bool:
        return super().is_done() or 0 < self.config.train.patience <= self.progress.without_gain

    def is_save_due(self, validated: bool) -> bool:
        every = self.config.checkpoint.save_every
        return is_step_due(self.trainer.step, every) if every else validated

    @contextmanager
    def batches(self) -> Iterator[Iterator[list[TaskBatch]]]:
        examples = self.material.train.examples
        # the low bits hold a sample's position in the step: each sample has a number of its own
        yield (
            self.batcher.micro_batches(examples, self.order.batch(step).tolist(), step << 32)
            for step in count(self.trainer.step)
        )

    def count(self) -> None:
        numbers, examples = self.order.batch(self.trainer.step - 1), self.material.train.examples
        tokens = sum(len(text) for n in numbers for text in examples[n].texts)
        self.rows += len(numbers)
        self.progress.tokens += tokens
        self.throughput.count(tokens)
        if self.trainer.ctx.device.type == "cpu" and is_step_due(self.trainer.step, 20):
            trim_memory()  # sequences of other lengths need blocks of other sizes

    def tokens(self) -> int:
        return self.progress.tokens

    def parts(self, means: Sequence[float], rates: Rates) -> Parts:
        rows, self.rows = self.rows, 0
        names = self.trainer.objective.metrics
        return {
            **dict(zip(names[1:], means[1:], strict=True)),
            "epoch": self.trainer.step / self.order.steps_per_epoch,
            "examples_per_s": rows / rates.steps / rates.step_time_s,
        }

    def score(self) -> None:
        trainer, task, scorer = self.trainer, self.config.task, self.scorer
        scores: Scores = {}
        for tokenized in self.material.validations:
            split = tokenized.split
            scores[split.name], predictions = scorer.score(tokenized, shown=trainer.ctx.is_main)
            if warning := one_label_warning(task, split, predictions):
                self.reporter.problem(warning)
        previous, self.progress = self.progress, replace(self.progress)
        is_best = self.progress.add(trainer.step, scores, task_type(task.kind).errors)
        if is_best:
            self.record_progress()
            if not self.save_best(is_needed=previous.best_step is None and self.is_done()):
                # the previous best stays; the next better score is saved again
                self.progress, is_best = replace(previous, without_gain=0), False
                self.record_progress()
        for name, metrics in scores.items():
            self.reporter.scores(trainer.step, name, metrics, is_best=is_best)

    def save(self, *, awaited: bool) -> None:
        self.record_progress()
        super().save(awaited=awaited)

    def record_progress(self) -> None:
        state = self.trainer.extra_state
        # a new dictionary: a save under way may still be writing the one before
        state[FINETUNING] = {**state[FINETUNING], "progress": asdict(self.progress)}


def pretrain_config(config: FinetuneConfig, start: StartModel, steps: int) -> PretrainConfig:
    """Return the run as the trainer takes it, and as checkpoints save it."""
    assert config.train.global_batch_size, "set by choose_epochs_and_batch"
    warmup = min(math.ceil(exact(config.schedule.warmup) * steps), steps - 1)
    shared = (
        *("name", "out", "seed", "compile", "profile", "lora", "parallel", "optimizer", "precision", "log"),
        *("incident", "check", "dist"),
    )
    return PretrainConfig(
        **{key: getattr(config, key) for key in shared},
        model=start.model,
        schedule=ScheduleConfig(
            decay=config.schedule.decay, warmup_steps=warmup, min_lr=config.schedule.min_lr
        ),
        data=DataConfig(seq_length=start.max_length),
        train=TrainConfig(
            steps=steps,
            global_batch_size=config.train.global_batch_size,
            micro_batch_size=config.train.micro_batch_size,
        ),
        checkpoint=CheckpointConfig(keep_last=config.checkpoint.keep_last, resume=config.checkpoint.resume),
    )


def finetune(
    config: FinetuneConfig, settings: Settings, material: RunInputs, ctx: ParallelContext
) -> tuple[Result | None, int | None]:
    """Train; return (result, or None if stopped before the end; exit code if a stop was requested).

    Collective over all ranks.
    """
    begin, kind, start = time.monotonic(), task_type(config.task.kind), material.start
    examples, size = material.train.examples, config.train.micro_batch_size
    assert config.train.epochs, "set by choose_epochs_and_batch"
    assert config.train.global_batch_size
    order = ExampleOrder(
        examples,
        batch_size=config.train.global_batch_size,
        sort_batches=1 if kind.is_chat else config.train.sort_batches,  # packed, not sorted
        seed=config.seed,
    )
    steps = config.train.epochs * order.steps_per_epoch
    spec = pretrain_config(config, start, steps)
    objective = make_objective(config.task, ctx, DTYPES[config.precision.dtype])
    with torch_errors_as_user_errors(spec, "task.max_length"), ExitStack() as stack:
        claim(spec, ctx, stack)
        check_start(config.out, ctx)
        trainer = Trainer(spec, ctx, cast(Any, objective))
        batcher = make_batcher(trainer.model, size, start.max_length, kind.batcher)
        needs_reference = isinstance(objective, PairLoss) and objective.has_reference
        splits = [material.train, *material.validations]
        pairs = [split.examples for split in splits] if needs_reference else []
        origin, progress = load_start(trainer, config, settings, start, pairs, batcher)
        if ctx.is_main:  # last: a run that is rejected above leaves its folder unchanged
            prepare_directory(config, start)
        notes = [f"resuming from {origin} (step {trainer.step})"] if origin else start.notes
        if changes := trainer.ancestry.changed_at(trainer.step):
            notes = [*notes, changes_line(changes)]
        fix = "leave out train.epochs and train.global_batch_size, or set more epochs or smaller batches"
        few_steps = f"{steps} step{'s' * (steps > 1)} of training change little: {fix}"
        lengths = [len(text) for example in examples for text in example.texts]
        with training_session(
            trainer,
            Path(config.out),
            header=header(config, trainer, start, len(examples)),
            record={
                "config_digest": config_digest(config),
                "resumed_from": origin and str(origin),
            },
            notes=[*notes, *material.notes()],
            warnings=[few_steps] if steps < FEW_STEPS else [],
            peak=peak_flops(ctx.device, config.precision.dtype, config.dist.peak_tflops),
            tokens_per_step=0,  # varies: FinetuneLoop.count counts
            seq_length=sum(lengths) // len(lengths),
            loss_unit=kind.loss_unit,
        ) as session:
            loop = FinetuneLoop(
                *session, config=config, material=material, order=order, batcher=batcher, progress=progress
            )
            if not loop.run() or (loop.is_stopping and material.tests):
                return None, session.note_stopped("\nRun the same command again to continue.")
        with stopping_at_once("stopped while predicting; the same command continues"):
            result = finish(loop, settings, begin)
        return result, session.stop.exit_code if loop.is_stopping else None


def prepare_directory(config: FinetuneConfig, start: StartModel) -> None:
    """Write the composed configuration, and the tokenizer where commands look for it. Raises UserError."""
    out = Path(config.out)
    with writing_to(config.out):
        for folder in (out, out / BEST):
            folder.mkdir(parents=True, exist_ok=True)
            start.tokenizer.save(folder)
        write_atomic(out / RUN_SETTINGS, composed_yaml(config, "finetune").encode())


def load_start(
    trainer: Trainer,
    config: FinetuneConfig,
    settings: Settings,
    start: StartModel,
    pairs: Sequence[Sequence[Example]],
    batcher: Batcher,
) -> tuple[Path | None, Progress]:
    """Load the run's newest checkpoint, if any, else `ckpt`; return its path and the validations so far.

    The model of `ckpt` is the reference model of `pairs`. Collective over all ranks. Raises UserError,
    CorruptFileError.
    """
    trainer.extra_state[FINETUNING] = {
        "depends_on": settings,
        "progress": asdict(Progress()),
        BASE: hub_id(config.ckpt) or start.source.config.name,
        DATA_PATH: None if config.data.path is None else os.path.abspath(config.data.path),
        DATA_COLUMNS: config.data.columns,
        BAD_ROWS: config.data.bad_rows,
        "data.hub": config.task.hub if config.data.path is None else None,
    }
    trainer.extra_state[TOKENIZER] = digests_of_tokenizer(start.tokenizer).encode()
    needs_body = bool(pairs) or config.lora.rank > 0  # checkpoints of adapters hold no base
    if needs_body:
        base = load_body(trainer.shards, start.source, trainer.ctx).digest
        if config.lora.rank:
            trainer.extra_state[LORA] = {"base": start.source.name, "digest": base}
    with stopping_at_once("stopped before training"):
        for examples in pairs:
            set_reference(trainer.model, cast(PairLoss, trainer.objective), examples, cast(Packer, batcher))
    checkpoint = resume(trainer)
    if checkpoint is None:
        if not needs_body:
            load_body(trainer.shards, start.source, trainer.ctx)
        return None, Progress()
    return checkpoint, Progress.read(checkpoint)


def finish(loop: FinetuneLoop, settings: Settings, begin: float) -> Result:
    """Predict the tests with the best weights, and write the result. Collective; raises UserError.

    `begin` is the time at which this command began the run, by the monotonic clock.
    """
    config, trainer, tests = loop.config, loop.trainer, loop.material.tests
    task, out = config.task, Path(config.out)
    best = resolve(str(out / BEST))
    progress = Progress.read(best)
    assert progress.best_step is not None
    if tests:
        load_weights(stored_shards(trainer, trainer.shards), best, trainer.ctx)
    scored = [loop.scorer.score_and_write(test, out / "predictions") for test in tests]
    result = Result(
        task=task.name,
        seed=config.seed,
        # in the order of the task, which a manifest does not keep
        scores={
            split: {name: values[name] for name in task.metrics if name in values} | values
            for split, values in ((name, progress.scores[name]) for name in task.validations)
        },
        tests={test.tokenized.split.name: test.metrics for test in scored if test.metrics},
        predictions=tuple(file for test in scored for file in test.files),
        best_step=progress.best_step,
        steps=trainer.step,
        steps_per_epoch=loop.order.steps_per_epoch,
        checkpoint=str(out / BEST),
        seconds=round(time.monotonic() - begin, 1),
        precision=config.precision.dtype,
        layout={**asdict(config.parallel), "dp": trainer.ctx.dp.size},
        depends_on=settings,
        config_digest=config_digest(config),
        versions={"mlm": mlm.__version__, "torch": torch.__version__},
        notes=tuple(loop.material.notes()),
    )
    if trainer.ctx.is_main:
        with writing_to(config.out):
            write_atomic(out / RESULT, dump_json(asdict(result)))
    return result
