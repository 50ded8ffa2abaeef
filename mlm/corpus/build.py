"""`mlm data build`: from raw text to a corpus in Megatron's .bin/.idx."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from mlm.config.build import to_dict
from mlm.corpus.config import DataBuildConfig
from mlm.corpus.decontaminate.benchmarks import read_benchmarks, save_benchmarks
from mlm.corpus.read.inputs import digests_of, with_digests, write_inputs
from mlm.corpus.read.one_text import parts_of_text
from mlm.corpus.read.shards import Found, cut, find_all, group
from mlm.corpus.stages.local import run_stages
from mlm.corpus.stages.merge import move, publish
from mlm.corpus.stages.plan import EVALUATION, TOKENIZER, Plan, shard_bytes
from mlm.corpus.stages.report import outcome, refuse_empty_parts, summary, warn, write_rejected
from mlm.data.parts import parse_split
from mlm.data.receipt import RECEIPT, Receipt, check_corpus, damaged_file, read_receipt, write_receipt
from mlm.data.tokenizer import Tokenizer
from mlm.errors import UserError
from mlm.files.atomic import digest_file, open_lock, write_atomic
from mlm.files.ownership import claim_folder, claim_problems, delete_owned

__all__ = ["check_corpus", "run_build"]

MARKER = ".building"  # in `out` while a build is under way: what lies there is ours to replace
LOCK = "lock"  # in the work folder
OUT_LOCK = ".lock"
WORK = "work"  # in `out`


def run_build(config: DataBuildConfig, console: Console | None = None) -> Receipt | None:
    """Write a corpus folder, its receipt last; the receipt is returned. Nothing to do if it is there already.

    What an interrupted build has finished is not done again. None is returned while jobs on a cluster are
    still at work. Raises UserError: bad input, an empty part, or a folder that holds something else.
    """
    console = console or Console()
    parse_split(config.split)
    tokenizer = Tokenizer.load(config.tokenizer, eod=config.eod)
    if config.prepend_bos and tokenizer.bos_id is None:
        raise UserError(
            f"prepend_bos=true: tokenizer={config.tokenizer} has no token for the beginning: leave it false"
        )
    found, out, work = find_all(config), Path(config.out), work_folder(config)
    if (warning := found.warning()) is not None:
        console.print(warning, soft_wrap=True, markup=False)
    with explain_disk_faults(out), ExitStack() as stack:
        begun = work.exists()
        claim_folders(config, tokenizer)
        stack.enter_context(sole_build(out / OUT_LOCK, f"out={out}"))
        stack.enter_context(explain_disk_faults(work))
        stack.enter_context(sole_build(work / LOCK, f"work={work}"))
        digested = with_digests(found.inputs, work, console)
        tokenizer.save(work / TOKENIZER)
        evaluation = prepare_evaluation(config, work)
        size = shard_bytes(sum(item.bytes for item in digested))
        parts = parts_of_text(digested, parse_split(config.split))
        if parts is not None:
            say_how_one_text_is_cut(config, console)
        config = with_min_tokens(config, is_one_text=parts is not None)
        shards = tuple(parts or cut(digested, size))
        plan = Plan(
            config, work, digested, shards, group(digested, shards, size), tokenizer.digest, evaluation
        )
        made_of = ingredients(plan, tokenizer)
        try:
            receipt = reusable(out, made_of)
        except UserError:
            if not begun:
                delete_work(config)
            raise
        if receipt is not None:
            console.print(f"{out} is up to date", soft_wrap=True)
        else:
            write_atomic(out / MARKER, b"")
            receipt = build(plan, found, made_of, out, console)
        if receipt is None:
            return None
        warn(config, console)
        if not config.keep_work and (kept := delete_work(config)) is not None:
            console.print(kept, soft_wrap=True, markup=False, highlight=False)
    return receipt


def work_folder(config: DataBuildConfig) -> Path:
    """Folder of what lies between the stages."""
    return Path(config.work) if config.work is not None else Path(config.out, WORK)


def preflight(config: DataBuildConfig) -> list[str]:
    """Problems of the folders to write; called before the input is read."""
    try:
        tokenizer = Tokenizer.load(config.tokenizer, eod=config.eod)
    except UserError as error:
        return [str(error)]
    out, work = claims(config, tokenizer)
    return [
        *claim_problems(config.out, **out),
        *claim_problems(work_folder(config), **work),
        *place_faults(config),
    ]


def place_faults(config: DataBuildConfig) -> list[str]:
    """`work` where it would be deleted with something else, or `out` with it."""
    out, work = Path(config.out).resolve(), work_folder(config).resolve()
    if work == out or work in out.parents:
        said = "is" if work == out else "holds"
        return [f"work={config.work}: {said} out={config.out}; name another folder"]
    return []


def claims(config: DataBuildConfig, tokenizer: Tokenizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments with which `out` and the work folder are claimed."""
    reads = [config.input, *config.decontaminate.against]
    key = "out" if config.work is None else "work"
    return (
        {"kind": "corpus", "inputs": reads, "same": {TOKENIZER: tokenizer.content}},
        {"kind": "corpus-work", "key": key, "inputs": [*reads, config.tokenizer]},
    )


def claim_folders(config: DataBuildConfig, tokenizer: Tokenizer) -> None:
    """Make or adopt both folders. Raises UserError where something of the user's is in the way."""
    out, work = claims(config, tokenizer)
    faults = [*place_faults(config), *claim_problems(work_folder(config), **work)]
    if faults:
        raise UserError(faults[0])
    claim_folder(config.out, **out)
    claim_folder(work_folder(config), **work)


def delete_work(config: DataBuildConfig) -> str | None:
    """Delete what the build left between its stages; a line on what stays, None if nothing does."""
    reads = [config.input, config.tokenizer, *config.decontaminate.against, config.out]
    return delete_owned(work_folder(config), "corpus-work", inputs=reads)


def with_min_tokens(config: DataBuildConfig, *, is_one_text: bool) -> DataBuildConfig:
    """The settings with filter.min_tokens=auto resolved; a typed number holds for every input.

    The parts of one text are no documents that could be too short.
    """
    if config.filter.min_tokens != "auto":
        return config
    least = None if is_one_text else config.filter.least_tokens
    return replace(config, filter=replace(config.filter, min_tokens=least))


def say_how_one_text_is_cut(config: DataBuildConfig, console: Console) -> None:
    """A line on the parts of an input of one text, and on the rule that is off for them."""
    off = "; filter.min_tokens=auto is off, a number holds" if config.filter.min_tokens == "auto" else ""
    console.print(
        f"input={config.input} is one text: cut into consecutive parts by split={config.split}, at ends of "
        f"paragraphs where there are any{off}",
        soft_wrap=True,
        markup=False,
    )


def build(plan: Plan, found: Found, made_of: Receipt, out: Path, console: Console) -> Receipt | None:
    """Run the stages and publish what they made. None while jobs on a cluster are at work."""
    path, executor = plan.save(), plan.config.executor
    if executor.kind == "local":
        workers = executor.workers or len(os.sched_getaffinity(0))
        run_stages(plan, path, workers, console)
    else:
        try:
            from mlm.corpus.stages.cluster import run_ray, run_slurm
        except ImportError as error:
            raise UserError(
                f"executor.kind={executor.kind} needs datatrove: pip install 'mlm[cluster]', or set "
                f"executor.kind=local"
            ) from error
        if executor.kind == "ray":
            run_ray(plan, path)
        elif not run_slurm(plan, path, console):
            return None
    facts = outcome(plan) | {"not_read": found.account()}
    refuse_empty_parts(plan, facts)
    names = publish(plan, out)
    move(plan.work / TOKENIZER, out / TOKENIZER)
    listed = [*write_rejected(plan, out), *write_inputs(plan.inputs, out)]
    receipt = write_receipt(out, made_of | facts, [*names, TOKENIZER, *listed])
    (out / MARKER).unlink()
    console.print(summary(out, receipt))
    return receipt


def ingredients(plan: Plan, tokenizer: Tokenizer) -> Receipt:
    """Everything the output is a function of."""
    config = to_dict(plan.config)
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
        "split": list(parse_split(plan.config.split)) if plan.is_divided else None,
        "seed": plan.config.seed,
        **{key: config[key] for key in ("eod", "keep_ids") if config[key]},  # receipts of old do not say it
        "inputs": digests_of({item.name: item.digest for item in plan.inputs}),
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
    inputs = receipt.get("inputs")
    known = receipt | {"inputs": digests_of(inputs) if isinstance(inputs, dict) else inputs}
    differing = [key for key, value in made_of.items() if known.get(key) != value]
    if differing:
        raise UserError(f"out={out} holds a corpus made with other {', '.join(differing)}: {remedy}")
    if (name := damaged_file(out, receipt)) is not None:
        raise UserError(f"out={out}: {name} is not what {RECEIPT} says: {remedy}")
    return receipt


@contextmanager
def sole_build(lock: Path, folder: str) -> Iterator[None]:
    """Keep two commands from working in one folder. Raises UserError for the second."""
    descriptor = take(lock)
    if descriptor is None:
        raise UserError(f"{folder} is in use by another `mlm data build`: wait for it, or set another out=")
    try:
        yield
    finally:
        with suppress(OSError):
            lock.unlink()  # while it is held: `take` believes in no file but the one there now
        os.close(descriptor)


def take(lock: Path) -> int | None:
    """A descriptor that holds the lock, None if another process has it. Raises OSError."""
    while True:
        descriptor = open_lock(lock)
        try:
            # not flock, whose lock the child processes would share and keep
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                return descriptor
        except (BlockingIOError, PermissionError):
            os.close(descriptor)
            return None
        except FileNotFoundError:
            pass  # gone with the one who held it
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
