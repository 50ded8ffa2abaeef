"""The corpus of the experiments: steps that make it, and checks before the first.

`corpus` holds documents for GPT-2, `corpus-bert` the same ones as sentences. Their held-out parts are whole
documents, and train is searched for their text: what agrees in 13 words is removed from it.
"""

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from mlm.config.fields import expand_home
from mlm.data.corpus_files import SPLITS
from mlm.data.receipt import RECEIPT, Receipt, read_receipt
from mlm.reproduce.config import ReproduceConfig
from mlm.reproduce.experiment import Step
from mlm.reproduce.text import SOURCES, source_problem
from mlm.util.errors import Problem, UserError
from mlm.util.extras import load_extra

__all__ = [
    "BERT_CORPUS",
    "CORPUS",
    "VOCAB_SIZE",
    "corpora_of",
    "corpus_problems",
    "corpus_steps",
    "with_corpus",
]

CORPUS, BERT_CORPUS = "corpus", "corpus-bert"
"""Folders in that of `mlm reproduce`, and names of the steps that make them."""
VOCAB_SIZE = 8192
TEXT, DOCUMENTS = "text", "text/documents"
WRITE = ("python", "-m", "mlm.reproduce.text", "--corpus")
"""Words of the step that writes the text, before where it is from."""
NAMED = re.compile(rf"[\w.]+=({CORPUS}|{BERT_CORPUS})(?:/.*)?")
"""A setting that names a corpus: `data.path=corpus`, `path=corpus/test`."""


def corpora_of(steps: Sequence[Step]) -> set[str]:
    """Return the corpora that steps read."""
    return {found[1] for step in steps for word in step.words if (found := NAMED.fullmatch(word))}


def with_corpus(config: ReproduceConfig, steps: Sequence[Step]) -> list[Step]:
    """Return steps with those before them that make the corpora they read."""
    before = [step for name in sorted(corpora_of(steps)) for step in corpus_steps(config, name)]
    return [*before, *(replace(step, needs=(*step.needs, *sorted(corpora_of([step])))) for step in steps)]


def corpus_steps(config: ReproduceConfig, corpus: str = CORPUS) -> list[Step]:
    """Return the steps that make one corpus: text, tokenizer, tokens; or a link to the user's."""
    if config.corpus not in SOURCES:
        folder = os.path.abspath(expand_home(config.corpus))
        return [Step(name=corpus, words=("ln", "-sfn", folder, corpus), result=corpus, minutes=0.01, cores=1)]
    is_bert = corpus == BERT_CORPUS
    tokenizer = f"{TEXT}/{'wordpiece' if is_bert else 'bpe'}.json"
    against = ",".join(f"{DOCUMENTS}/{part}.jsonl" for part in ("validation", "test"))
    return [
        Step(
            name=TEXT,
            words=(
                *(*WRITE, config.corpus),
                *("--debs", f"{TEXT}/debs", "--out", DOCUMENTS),
            ),
            result=DOCUMENTS,
            minutes=1,
            cores=1,
        ),
        Step(
            name=f"{corpus}-tokenizer",
            words=(
                *("mlm", "data", "tokenizer", f"input={DOCUMENTS}", f"out={tokenizer}"),
                f"vocab_size={VOCAB_SIZE}",
                f"kind={'wordpiece' if is_bert else 'bpe'}",
            ),
            result=tokenizer,
            minutes=0.3,
            needs=(TEXT,),
        ),
        Step(
            name=corpus,
            words=(
                *("mlm", "data", "build", f"input={DOCUMENTS}", f"tokenizer={tokenizer}", f"out={corpus}"),
                "recipe=gopher",
                f"decontaminate.against=[{against}]",
                "decontaminate.parts=[train]",
                *(("sentences=true", "append_eod=false") if is_bert else ()),
            ),
            result=f"{corpus}/{RECEIPT}",
            minutes=1.5 if is_bert else 1,
            needs=(f"{corpus}-tokenizer",),
        ),
    ]


def corpus_problems(config: ReproduceConfig, steps: Sequence[Step]) -> list[Problem]:
    """Return problems of the texts and corpora that steps read. Raises CorruptFileError."""
    corpora = corpora_of(steps)
    is_own = config.corpus not in SOURCES
    problems = folder_problems(expand_home(config.corpus), corpora) if corpora and is_own else []
    left = [step for step in with_corpus(config, steps) if not Path(config.out, step.result).exists()]
    for source in dict.fromkeys(step.words[len(WRITE)] for step in left if step.words[: len(WRITE)] == WRITE):
        if (found := source_problem(source)) is not None:
            key = ("corpus", source) if source == config.corpus else ("name", config.name)
            problems.append(Problem.at(*key, *found))
    if any("sentences=true" in step.words for step in left):
        try:
            load_extra("sentencex", f"name={config.name}")
        except UserError as error:
            problems += error.problems
    return problems


def folder_problems(folder: str, corpora: Collection[str]) -> list[Problem]:
    """Return problems of a corpus of the user's. Raises CorruptFileError."""
    receipt = read_receipt(Path(folder))
    if receipt is None:
        fix = f"use {', '.join(SOURCES)}, or the folder of a corpus by `mlm data build`"
        return [Problem.at("corpus", folder, "holds no corpus", fix)]
    found = [problem for name in sorted(corpora) for problem in misfits(receipt, name)]
    return [Problem.at("corpus", folder, problem, fix) for problem, fix in dict.fromkeys(found)]


def misfits(receipt: Receipt, corpus: str) -> list[tuple[str, str]]:
    """Return (problem, fix) pairs of a corpus for the models that are to be trained on it."""
    found = list[tuple[str, str]]()
    if (size := receipt["vocab_size"]) > VOCAB_SIZE:
        found.append(
            (
                f"has a vocabulary of {size:,} tokens, the models here of {VOCAB_SIZE:,}",
                f"build it with a tokenizer of vocab_size={VOCAB_SIZE}",
            )
        )
    if missing := [part for part in SPLITS if part not in receipt["splits"]]:
        found.append((f"has no part {' and no part '.join(missing)}", "build it with all three"))
    if bool(receipt.get("sentences")) != (corpus == BERT_CORPUS):
        have, want = ("documents", "sentences") if corpus == BERT_CORPUS else ("sentences", "documents")
        fix = f"build it with sentences={'true' if want == 'sentences' else 'false'}, or use auto"
        found.append((f"holds {have}, and the experiment needs {want}", fix))
    return found
