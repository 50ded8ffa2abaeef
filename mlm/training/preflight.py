"""Checks of a run's files before its ranks start.

Torch is imported only to read a checkpoint or a model folder.
"""

import os
from pathlib import Path

from mlm.config.build import protected_from
from mlm.launch.environment import read_rank_position
from mlm.runs.config import PretrainConfig
from mlm.runs.corpora import corpus_problems, validation_prefixes
from mlm.runs.tokenizer import corpus_tokenizer_errors, tokenizer_of, vocabulary_problem
from mlm.tracking.config import missing_extras
from mlm.util.errors import Problem, UserError
from mlm.util.extras import load_extra
from mlm.util.lock import LOCK, single_writer
from mlm.util.ownership import CHECKPOINTS, claim_problems, file_type_name
from mlm.util.system import resolve

PROMPTS = "train.sample_prompts"


def preflight(config: PretrainConfig) -> list[str]:
    """Return the problems of the files of a run; called before any rank starts."""
    problems = [*missing_extras(config.log), *corpus_problems(config)]
    # settings that use the validation loss need a validation part
    readers = {
        "train.keep_best": config.train.keep_best,
        "train.patience": config.train.patience,
        "ema.validate": config.ema.validate,
    }
    key = next((key for key, value in readers.items() if value), None)
    if not problems and key and config.data.kind == "indexed" and not validation_prefixes(config.data):
        why = "goes by the validation loss, and the corpus has no validation part"
        fix = f"set data.validation=PREFIX, or remove {key}"
        problems = [Problem((key, "data.validation"), f"{key}: {why}", fix)]
    problems = problems or corpus_tokenizer_errors(config.data) or prompt_problems(config)
    return problems or run_start_problems(config)


def run_start_problems(config: PretrainConfig, *, compares: bool = True) -> list[str]:
    """Return the problems that keep the run from starting, or from having its folder alone.

    Without `compares` the caller compares the run with its checkpoint. Called before any rank starts. The
    lock is tested only without a launcher, whose ranks would block each other.
    """
    problems = claim_problems(config.out, "run", inputs=protected_from(config))
    names = "config.yaml metrics.jsonl tokenizer.json checkpoints/latest best/checkpoints/latest"
    paths = [Path(config.out, name) for name in names.split()]
    blocked = [path for path in paths if os.path.lexists(path) and not path.is_file()]
    problems = problems or [
        f"out={config.out}: {path} is {file_type_name(path)}; delete or rename it" for path in blocked
    ]
    if problems:
        return problems
    folder = Path(config.out, CHECKPOINTS)
    try:
        # a run takes its lock before it saves
        holds_saves = any(name != LOCK for name in os.listdir(folder))
    except FileNotFoundError:
        holds_saves = False
    except OSError:
        holds_saves = True  # reading the saves reports the error
    try:
        if config.lora.rank:
            names = resolve("mlm.convert.huggingface.families:layer_names")(config.model)
            resolve("mlm.models.lora:adapted_on_meta")(config.model, config.lora, names)
            if config.lora.quantize != "none":
                load_extra("bitsandbytes", f"lora.quantize={config.lora.quantize}", "nf4")
        if config.ckpt or config.checkpoint.from_run or holds_saves:
            problems += resolve("mlm.training.resume:start_problems")(config, compares=compares)
        if not problems and read_rank_position(os.environ) is None:
            if config.checkpoint.mirror is not None:
                resolve("mlm.training.mirror:read_mirror")(Path(config.out), config.checkpoint)
            with single_writer(folder, is_trial=True):
                pass
    except UserError as error:
        return list(error.problems)
    return problems


def prompt_problems(config: PretrainConfig) -> list[str]:
    """Return the problems of prompts under the run's tokenizer. Raises UserError."""
    prompts, length = config.train.sample_prompts, config.data.seq_length
    if not prompts:
        return []
    tokenizer = tokenizer_of(config.data)
    if tokenizer is None:
        why = f"data.kind={config.data.kind}: no tokenizer is known"
        fix = f"set data.tokenizer=…/tokenizer.json, or remove {PROMPTS}"
        return [Problem((PROMPTS, "data.tokenizer"), f"{PROMPTS}: {why}", fix)]
    name = str(config.data.tokenizer or "tokenizer.json of the corpus")
    problems = [vocabulary_problem(name, tokenizer, config.model, key="data.tokenizer")]
    for number, prompt in enumerate(prompts, start=1):
        count = len(tokenizer.encode_prompt(prompt))
        if count > length:
            why = f"prompt {number} has {count} tokens, more than data.seq_length={length}"
            problems.append(Problem((PROMPTS, "data.seq_length"), f"{PROMPTS}: {why}", "shorten it"))
    return [problem for problem in problems if problem is not None]
