"""`mlm data build`: from raw text to a corpus in Megatron's .bin/.idx."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from mlm.config.build import to_dict
from mlm.config.data_schema import DataBuildConfig
from mlm.config.errors import UserError
from mlm.data.corpus.benchmarks import read_benchmarks, save_benchmarks
from mlm.data.corpus.inputs import with_digests
from mlm.data.corpus.local import run_stages
from mlm.data.corpus.merge_stage import move, publish
from mlm.data.corpus.plan import EVALUATION, TOKENIZER, Plan, shard_bytes
from mlm.data.corpus.report import outcome, refuse_empty_parts, summary, warn, write_rejected
from mlm.data.corpus.shards import cut, find_all
from mlm.data.indexed import bin_path, idx_path
from mlm.data.parts import SPLITS, parse_split
from mlm.data.receipt import RECEIPT, Receipt, check_corpus, damaged_file, read_receipt, write_receipt
from mlm.data.tokenizer import Tokenizer
from mlm.files import digest_file, write_atomic

__all__ = ["check_corpus", "run_build"]

MARKER = ".building"  # in `out` while a build is under way: what lies there is ours to replace
LOCK = "lock"


def run_build(config: DataBuildConfig, console: Console | None = None) -> Receipt | None:
    """Write a corpus folder, its receipt last; the receipt is returned. Nothing to do if it is there already.

    What an interrupted build has finished is not done again. None is returned while jobs on a cluster are
    still at work. Raises UserError: bad input, an empty part, or a folder that holds something else.
    """
    console = console or Console()
    parse_split(config.split)
    tokenizer = Tokenizer.load(config.tokenizer)
    if config.prepend_bos and tokenizer.bos_id is None:
        raise UserError(
            f"prepend_bos=true: tokenizer={config.tokenizer} has no token for the beginning: leave it false"
        )
    found, out = find_all(config), Path(config.out)
    if (warning := found.warning()) is not None:
        console.print(warning, soft_wrap=True, markup=False)
    work = Path(config.work) if config.work is not None else out / "work"
    with explain_disk_faults(out):
        refuse_foreign(out)
        out.mkdir(parents=True, exist_ok=True)
        work.mkdir(parents=True, exist_ok=True)
    with explain_disk_faults(work), sole_build(work):
        digested = with_digests(found.inputs, work, console)
        tokenizer.save(work / TOKENIZER)
        evaluation = prepare_evaluation(config, work)
        shards = tuple(cut(digested, shard_bytes(sum(item.bytes for item in digested))))
        plan = Plan(config, work, digested, shards, tokenizer.digest, evaluation)
        made_of = ingredients(plan, tokenizer)
        if (receipt := reusable(out, made_of)) is not None:
            console.print(f"{out} is up to date", soft_wrap=True)
        else:
            write_atomic(out / MARKER, b"")
            receipt = build(plan, made_of, out, console)
        if receipt is None:
            return None
    warn(config, console)
    if not config.keep_work:
        shutil.rmtree(work, ignore_errors=True)
    return receipt


def build(plan: Plan, made_of: Receipt, out: Path, console: Console) -> Receipt | None:
    """Run the stages and publish what they made. None while jobs on a cluster are at work."""
    path, executor = plan.save(), plan.config.executor
    if executor.kind == "local":
        workers = executor.workers or len(os.sched_getaffinity(0))
        run_stages(plan, path, workers, console)
    else:
        try:
            from mlm.data.corpus.cluster import run_ray, run_slurm
        except ImportError as error:
            raise UserError(
                f"executor.kind={executor.kind} needs datatrove: pip install 'mlm[cluster]', or set "
                f"executor.kind=local"
            ) from error
        if executor.kind == "ray":
            run_ray(plan, path)
        elif not run_slurm(plan, path, console):
            return None
    facts = outcome(plan)
    refuse_empty_parts(plan, facts)
    names = publish(plan, out)
    move(plan.work / TOKENIZER, out / TOKENIZER)
    rejected = write_rejected(plan, out)
    receipt = write_receipt(out, made_of | facts, [*names, TOKENIZER, *rejected])
    (out / MARKER).unlink()
    console.print(summary(out, receipt))
    return receipt


def ingredients(plan: Plan, tokenizer: Tokenizer) -> Receipt:
    """Everything the output is a function of."""
    config = to_dict(plan.config)
    divided = not any(shard.split for shard in plan.shards)
    settings = (
        "text_key",
        "id_key",
        "bad_input",
        "max_document_bytes",
        "append_eod",
        "prepend_bos",
        "sentences",
    )
    return {
        "format": "mlm-corpus-2",
        "tokenizer": tokenizer.digest,
        "vocab_size": tokenizer.vocab_size,
        "eod_id": tokenizer.eod_id,
        **{key: config[key] for key in settings},
        "recipe": {key: config[key] for key in ("normalise", "filter", "dedup", "decontaminate")},
        "evaluation_texts": plan.evaluation,
        "split": list(parse_split(plan.config.split)) if divided else None,
        "seed": plan.config.seed,
        "inputs": {item.name: item.digest for item in plan.inputs},
    }


def prepare_evaluation(config: DataBuildConfig, work: Path) -> str | None:
    """Put the texts to keep out into the work folder; their digest is returned, None if there are none."""
    if not config.decontaminate.against:
        return None
    save_benchmarks(read_benchmarks(config.decontaminate.against), work / EVALUATION)
    return digest_file(work / EVALUATION)


def reusable(out: Path, made_of: Receipt) -> Receipt | None:
    """The receipt of an equal corpus that is already whole. Raises UserError when another one is there."""
    receipt = read_receipt(out)
    if receipt is None:
        return None
    remedy = "set another out=, or delete the folder"
    differing = [key for key, value in made_of.items() if receipt.get(key) != value]
    if differing:
        raise UserError(f"out={out} holds a corpus made with other {', '.join(differing)}: {remedy}")
    if (name := damaged_file(out, receipt)) is not None:
        raise UserError(f"out={out}: {name} is not what {RECEIPT} says: {remedy}")
    return receipt


def refuse_foreign(out: Path) -> None:
    """Files of anyone else are not touched. Raises UserError when `out` holds some and no receipt."""
    if (out / RECEIPT).exists() or (out / MARKER).exists():
        return
    files = [path(out / split) for split in SPLITS for path in (bin_path, idx_path)]
    for file in files:
        if file.exists():
            raise UserError(
                f"out={out} holds {file.name} but no {RECEIPT}: set another out=, or delete the files"
            )


@contextmanager
def sole_build(work: Path) -> Iterator[None]:
    """Keep two commands from working in one folder. Raises UserError for the second."""
    descriptor = os.open(work / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        try:
            # not flock, whose lock the child processes would share and keep
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise UserError(
                f"work={work} is in use by another `mlm data build`: wait for it, or set another out="
            ) from None
        yield
    finally:
        os.close(descriptor)


@contextmanager
def explain_disk_faults(folder: Path) -> Iterator[None]:
    """Turn a full or read-only disk into a UserError. What was half written has no final name."""
    try:
        yield
    except OSError as error:
        place = error.filename or folder
        raise UserError(
            f"out={folder}: {place}: {error.strerror}: free space there or set another out="
        ) from error
