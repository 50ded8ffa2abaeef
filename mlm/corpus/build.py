"""`mlm data build`: from raw text to a corpus in Megatron's .bin/.idx."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from mlm.config.build import to_dict
from mlm.corpus.benchmarks import dump_benchmarks, read_benchmarks
from mlm.corpus.config import DataBuildConfig, as_paths
from mlm.corpus.read.encoding import AUTO
from mlm.corpus.read.finding import find_inputs
from mlm.corpus.read.records import Input
from mlm.corpus.read.shards import describe_encodings, group, input_lines, split_inputs, with_digests
from mlm.corpus.stages.passages import plan_passages
from mlm.corpus.stages.plan import EVALUATION, BuildPlan, make_plan, shard_bytes
from mlm.corpus.stages.publish import count_documents, publish, reject_empty_parts, summary
from mlm.corpus.stages.ray_executor import RayExecutor, executor_problems
from mlm.corpus.stages.run import Executor, LocalExecutor, run_stages
from mlm.data.config import SPLITS
from mlm.data.corpus_files import TOKENIZER, parse_split
from mlm.data.indexed import IndexedDataset
from mlm.data.receipt import INPUTS, MARKER, RECEIPT, Receipt, damaged_file, read_receipt, write_receipt
from mlm.data.tokenizer import Tokenizer
from mlm.util.errors import UserError, writing_to
from mlm.util.files import digest_bytes, write_atomic
from mlm.util.lock import Lock
from mlm.util.ownership import claim_folder, claim_problems, delete_owned
from mlm.util.system import available_cores
from mlm.util.terminal import console, one_line

WORK = "work"
"""Folder in `out` of the files between the stages."""


def run_build(config: DataBuildConfig, screen: Console | None = None) -> Receipt:
    """Write a corpus folder, its receipt last; return the receipt. An existing corpus is only verified.

    Finished tasks of an interrupted build are reused. Raises UserError for bad input, an empty part, or a
    folder with other content.
    """
    screen = screen or console()
    parse_split(config.split)
    tokenizer = Tokenizer.load(config.tokenizer, eod=config.eod)
    if config.prepend_bos and tokenizer.bos_id is None:
        begin = one_line(tokenizer.name_of(tokenizer.eod_id))
        screen.print(f"documents begin with {begin}: the tokenizer declares no beginning of a sequence")
    if tokenizer.opening and not config.prepend_bos:
        begin = one_line(tokenizer.decode(tokenizer.opening))
        note = f"the tokenizer puts {begin} before a text, and these documents begin without it"
        screen.print(f"{note}: prepend_bos=true adds it")
    listing, out, work = find_inputs(config), Path(config.out), Path(config.out, WORK)
    for note in listing.notes():
        screen.print(note)
    with writing_to(str(out)), ExitStack() as stack:
        (_, claim), (_, claim_of_work) = claims(config, tokenizer)
        claim_folder(out, **claim)
        stack.enter_context(sole_build(out))
        inputs = with_digests(listing.inputs, config.encoding)
        if config.encoding == AUTO and (encodings := describe_encodings(inputs)):
            screen.print(f"encoding=auto: {encodings}")
        evaluation = dump_benchmarks(read_benchmarks(config.decontaminate.against))
        identity = ingredients(config, inputs, tokenizer, digest_bytes(evaluation) if evaluation else None)
        receipt = read_receipt(out)
        if receipt is not None:
            remedy = "set another out=, or delete the folder"
            current = json.loads(json.dumps(identity))  # tuples are lists in the receipt
            if differing := [key for key, value in current.items() if receipt.get(key) != value]:
                raise UserError(f"out={out} holds a corpus made with other {', '.join(differing)}: {remedy}")
            if (name := damaged_file(out, receipt)) is not None:
                raise UserError(f"out={out}: {name} differs from {RECEIPT}: {remedy}")
            screen.print(f"{out} is up to date")
        else:
            reject_corpus(out)
            claim_folder(work, **claim_of_work)
            write_atomic(work / TOKENIZER, tokenizer.content)
            write_atomic(work / EVALUATION, evaluation)
            size = shard_bytes(sum(item.bytes for item in inputs))
            shards = split_inputs(inputs, size)
            plan = make_plan(config, work, shards, group(shards, size), identity)
            write_atomic(out / MARKER, os.urandom(8))  # nodes identify the folder by its content
            receipt = build(plan, inputs, listing.account(), identity, out, screen)
        (out / MARKER).unlink(missing_ok=True)
        if config.dedup.enabled and not config.decontaminate.against:
            screen.print(
                "no evaluation set is kept out of this corpus: set "
                "decontaminate.against=[wikitext103,lambada] to have scores on them mean something"
            )
        inputs_read = [*as_paths(config.input), config.tokenizer, *config.decontaminate.against, config.out]
        if (message := delete_owned(work, "corpus-work", inputs=inputs_read)) is not None:
            screen.print(message)
    return receipt


def preflight(config: DataBuildConfig) -> list[str]:
    """Return problems of the folders to write and of the executor; called before the input is read."""
    try:
        tokenizer = Tokenizer.load(config.tokenizer, eod=config.eod)
    except UserError as error:
        return list(error.problems)
    folders = claims(config, tokenizer)
    problems = [problem for folder, claim in folders for problem in claim_problems(folder, **claim)]
    return [*problems, *executor_problems(config.executor)]


def claims(config: DataBuildConfig, tokenizer: Tokenizer) -> list[tuple[Path, dict[str, Any]]]:
    """Return the folders that a build creates or reuses, and the arguments that claim them."""
    inputs = [*as_paths(config.input), *config.decontaminate.against]
    return [
        (Path(config.out), {"kind": "corpus", "inputs": inputs, "same": {TOKENIZER: tokenizer.content}}),
        (Path(config.out, WORK), {"kind": "corpus-work", "inputs": [*inputs, config.tokenizer]}),
    ]


def build(
    plan: BuildPlan,
    inputs: Sequence[Input],
    not_read: dict[str, Any],
    identity: Receipt,
    out: Path,
    screen: Console,
) -> Receipt:
    config = plan.config
    executor: Executor = LocalExecutor(config.workers or available_cores())
    if config.executor.kind == "ray":
        executor = RayExecutor(config.executor.address, config.workers, screen)
    with executor:
        run_stages(plan, executor)
        facts = count_documents(plan)
        if (split := plan_passages(plan, facts["splits"])) is not None:
            run_stages(plan := split, executor)
            facts = count_documents(plan)
            number = facts["passages"]["documents"]
            subject = f"{number} documents are" if number > 1 else "one document is"
            note = "; filter.min_tokens=auto is off for them" if config.filter.min_tokens == "auto" else ""
            screen.print(
                f"{subject} too few for split={config.split}: split into consecutive passages, train first, "
                f"at ends of paragraphs if there are any{note}"
            )
    facts |= {"not_read": not_read}
    reject_empty_parts(plan, facts)
    names = publish(plan, out)
    os.replace(plan.work / TOKENIZER, out / TOKENIZER)
    write_atomic(out / INPUTS, input_lines(inputs))
    receipt = write_receipt(out, identity | facts, [*names, TOKENIZER, INPUTS])
    screen.print(summary(out, receipt))
    tokens, size = receipt["splits"]["train"]["tokens"], receipt["vocab_size"]
    if tokens < 10 * size:  # most of its ids are then too rare to be learned
        distinct = len(np.unique(IndexedDataset(out / "train").tokens[:]))
        screen.print(
            f"the vocabulary is large for this text: train has {tokens:,} tokens, of {distinct:,} of "
            f"{size:,} ids; `mlm data tokenizer` learns a smaller one"
        )
    return receipt


def ingredients(
    config: DataBuildConfig, inputs: Sequence[Input], tokenizer: Tokenizer, evaluation: str | None
) -> Receipt:
    """Return all that determines the output; `evaluation` is the digest of the evaluation texts."""
    values = to_dict(config)
    keys = ("text_key", "bad_input", "max_document_bytes", "append_eod", "eod", "prepend_bos", "sentences")
    values["filter"]["min_tokens"] = config.filter.least_tokens or None
    is_divided = not any(item.split for item in inputs)
    return {
        "format": "mlm-corpus-2",
        "tokenizer": tokenizer.digest,
        "vocab_size": tokenizer.vocab_size,
        "eod_id": tokenizer.eod_id,
        "bos_id": tokenizer.bos_id,
        **{key: values[key] for key in keys},
        "recipe": {key: values[key] for key in ("normalise", "filter", "dedup", "decontaminate")},
        "evaluation_texts": evaluation,
        "split": list(parse_split(config.split)) if is_divided else None,
        "seed": config.seed,
        "inputs": {"files": len(inputs), "digest": digest_bytes(input_lines(inputs))},
    }


def reject_corpus(out: Path) -> None:
    """Raise UserError if a folder holds a complete corpus, which is never replaced."""
    if not (out / MARKER).exists() and any((out / f"{part}.idx").exists() for part in SPLITS):
        raise UserError(f"out={out} holds a corpus: set another out=, or delete the folder")


@contextmanager
def sole_build(out: Path) -> Iterator[None]:
    """Lock a folder for one build. Raises UserError if it is locked."""
    lock = Lock(out / ".lock")
    if not lock.take():
        raise UserError(f"out={out} is in use by another `mlm data build`: wait for it, or set another out=")
    try:
        yield
    finally:
        lock.release(delete=True)
