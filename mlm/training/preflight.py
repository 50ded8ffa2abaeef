"""Checks of a run's files before its ranks start.

Torch is imported only where there is a checkpoint, or a model folder, to read.
"""

import os
from pathlib import Path

from mlm.config.build import protected_from
from mlm.launch.environment import read_rank_place
from mlm.runs.config import PretrainConfig
from mlm.runs.corpora import corpus_problems, validation_prefixes
from mlm.runs.tokenizer import corpus_tokenizer_errors
from mlm.tracking.config import missing_extras
from mlm.util.errors import Problem, UserError
from mlm.util.extras import load_extra
from mlm.util.lock import LOCK, single_writer
from mlm.util.ownership import CHECKPOINTS, claim_problems, file_type_name
from mlm.util.system import resolve


def preflight(config: PretrainConfig) -> list[str]:
    """Return the problems that reading the named files shows; called before any rank starts."""
    problems = [*missing_extras(config.log), *corpus_problems(config)]
    if not problems and (problem := validation_problem(config)):
        problems = [problem]
    problems = problems or corpus_tokenizer_errors(config.data)
    return problems or run_start_problems(config)


def validation_problem(config: PretrainConfig) -> Problem | None:
    """Problem of settings that go by the validation loss of a run that has no validation part."""
    readers = {
        "train.keep_best": config.train.keep_best,
        "train.patience": config.train.patience,
        "ema.validate": config.ema.validate,
    }
    key = next((key for key, value in readers.items() if value), None)
    if key is None or config.data.kind != "indexed" or validation_prefixes(config.data):
        return None
    why = "goes by the validation loss, and the corpus has no validation part"
    return Problem((key, "data.validation"), f"{key}: {why}", f"set data.validation=PREFIX, or remove {key}")


def run_start_problems(config: PretrainConfig, *, compares: bool = True) -> list[str]:
    """Return the problems that keep the run from its start, or from being alone in its folder.

    Without `compares` the caller compares the run with its checkpoint. Called before any rank starts. The
    lock is tried only without a launcher, whose ranks would block each other.
    """
    problems = claim_problems(config.out, "run", inputs=protected_from(config))
    if problems := problems or _replaced_files(config.out):
        return problems
    folder = Path(config.out, CHECKPOINTS)
    try:
        if config.lora.rank:
            names = resolve("mlm.convert.huggingface.families:layer_names")(config.model)
            resolve("mlm.models.lora:adapted_on_meta")(config.model, config.lora, names)
            if config.lora.quantize != "none":
                load_extra("bitsandbytes", f"lora.quantize={config.lora.quantize}", "nf4")
        if config.ckpt or config.checkpoint.from_run or _holds_saves(folder):
            problems += resolve("mlm.training.resume:start_problems")(config, compares=compares)
        if not problems and read_rank_place(os.environ) is None:
            if config.checkpoint.mirror is not None:
                resolve("mlm.training.mirror:read_mirror")(Path(config.out), config.checkpoint)
            with single_writer(folder, is_trial=True):
                pass
    except UserError as error:
        return list(error.problems)
    return problems


def _replaced_files(out: str) -> list[str]:
    """Return the problems of names of a run's files that a folder, or anything else than a file, has."""
    names = "config.yaml metrics.jsonl tokenizer.json checkpoints/latest best/checkpoints/latest"
    paths = [Path(out, name) for name in names.split()]
    wrong = [path for path in paths if os.path.lexists(path) and not path.is_file()]
    return [f"out={out}: {path} is {file_type_name(path)}; delete or rename it" for path in wrong]


def _holds_saves(folder: Path) -> bool:
    """True unless a folder is missing, or holds nothing but the lock that a run takes before it saves."""
    try:
        return any(name != LOCK for name in os.listdir(folder))
    except FileNotFoundError:
        return False
    except OSError:
        return True  # whoever reads it says why it cannot
