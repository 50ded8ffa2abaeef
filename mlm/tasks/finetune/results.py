"""What a finetuning run leaves behind: result.json of each seed, the median over seeds, and tables."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from omegaconf import OmegaConf

import mlm
from mlm.config.build import config_digest, to_dict
from mlm.config.finetune_schema import FinetuneConfig
from mlm.files import write_atomic
from mlm.tasks.finetune.batches import Order
from mlm.tasks.finetune.best import Progress, Scores, best_folder
from mlm.tasks.finetune.material import Start
from mlm.tasks.trained import is_model_folder
from mlm.terminal import add_row, console, plain, table
from mlm.train.pretrain import layout
from mlm.train.trainer import Trainer

RESULT = "result.json"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came out with one seed."""

    task: str
    seed: int
    scores: Scores
    """Metrics of the best checkpoint, by split; the first metric of the first split chose it."""
    best_step: int
    steps: int
    """Steps taken."""
    steps_per_epoch: int
    rows: dict[str, str]
    """Digest of each split's rows."""
    checkpoint: str
    """Folder of the best checkpoint."""
    seconds: float
    """Of this command."""
    precision: str
    layout: dict[str, Any]
    config_digest: str
    versions: dict[str, str]

    @classmethod
    def of(
        cls,
        config: FinetuneConfig,
        trainer: Trainer,
        order: Order,
        progress: Progress,
        rows: dict[str, str],
        seconds: float,
    ) -> "Result":
        """The result of a run that is over."""
        assert progress.best_step is not None, "the last step is validated"
        return cls(
            task=config.task.name,
            seed=config.seed,
            scores=progress.scores,
            best_step=progress.best_step,
            steps=trainer.step,
            steps_per_epoch=order.steps_per_epoch,
            rows=rows,
            checkpoint=str(best_folder(Path(config.out))),
            seconds=round(seconds, 1),
            precision=config.precision.dtype,
            layout={**asdict(config.parallel), "dp": trainer.ctx.dp.size},
            config_digest=config_digest(config),
            versions={"mlm": mlm.__version__, "torch": torch.__version__},
        )


def write_result(out: Path, result: Result) -> None:
    """Write result.json. Raises OSError."""
    write_atomic(out / RESULT, (json.dumps(asdict(result), indent=2) + "\n").encode())


def is_done(config: FinetuneConfig) -> Result | None:
    """The result of a seed whose run is over, with the same settings; None where there is none."""
    try:
        found = Result(**json.loads((Path(config.out) / RESULT).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.config_digest == config_digest(config) else None


def report(config: FinetuneConfig, results: Sequence[Result]) -> None:
    """The table for people, and of several seeds out/result.json with the medians."""
    title = f"finetune {config.task.name} · {plain(config.ckpt)}"
    made = table(title, *["seed"] * (len(results) > 1), "split", "metric", "value#", "best step#")
    for result in results:
        for split, metrics in result.scores.items():
            for name, value in metrics.items():
                seed = (result.seed,) if len(results) > 1 else ()
                add_row(made, *seed, split, name, f"{value:.4f}", result.best_step)
    screen = console()
    medians = medians_of(results)
    if len(results) > 1:
        for split, metrics in medians.items():
            for name, value in metrics.items():
                add_row(made, "median", split, name, f"{value:.4f}", "")
        document = {
            "task": config.task.name,
            "seeds": [result.seed for result in results],
            "medians": medians,
            "results": [asdict(result) for result in results],
        }
        write_atomic(Path(config.out) / RESULT, (json.dumps(document, indent=2) + "\n").encode())
    screen.print(made)
    screen.print(f"written to {plain(Path(config.out) / RESULT)}")
    screen.print(f"best checkpoint: {plain(max(results, key=chosen_by).checkpoint)}")


def chosen_by(result: Result) -> float:
    """The number that the best checkpoint was chosen by."""
    return next(iter(next(iter(result.scores.values())).values()))


def medians_of(results: Sequence[Result]) -> Scores:
    """Median over the seeds of each metric (arXiv:1909.08053, section 5.3)."""
    first = results[0].scores
    return {
        split: {name: median(result.scores[split][name] for result in results) for name in metrics}
        for split, metrics in first.items()
    }


def composed_yaml(config: FinetuneConfig) -> str:
    """The configuration as `--config-dir {out} --config-name config` reads it back."""
    values = to_dict(config)
    values.update(values.pop("parallel"))
    return OmegaConf.to_yaml({"defaults": ["hydra_quiet", "finetune_defaults", "_self_"], **values})


def header(
    config: FinetuneConfig, trainer: Trainer, order: Order, start: Start, examples: int
) -> list[tuple[str, str]]:
    """Rows shown above the numbers."""
    model, train = trainer.config.model, config.train
    shape = f"{model.num_layers} layers × {model.hidden_size} × {model.num_heads} heads"
    kind = "transformers" if is_model_folder(start.named.path) else "mlm"
    return [
        ("run", config.name),
        ("task", f"{config.task.name}: {config.task.kind}, {', '.join(config.task.metrics)}"),
        ("model", f"{model.kind} {model.num_parameters() / 1e6:,.1f}M ({shape}), {kind} weights"),
        ("layout", layout(trainer)),
        (
            "batches",
            f"{examples:,} examples in {order.steps_per_epoch:,} steps of {train.global_batch_size}, "
            f"{train.epochs} epochs; texts of at most {start.max_length} tokens",
        ),
        ("precision", config.precision.dtype),
        ("seed", str(config.seed)),
        ("out", config.out),
    ]
