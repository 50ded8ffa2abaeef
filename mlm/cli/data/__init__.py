"""The commands `mlm data …`, which make corpora: their settings, checks and help.

Settings of `mlm data build` are in mlm/corpus/config.py.
"""

from mlm.cli.command import Command
from mlm.cli.data.settings import (
    DataInspectConfig,
    DataMergeConfig,
    DataSplitConfig,
    DataTokenizerConfig,
    DataVerifyConfig,
)
from mlm.corpus.config import DataBuildConfig
from mlm.corpus.read.encoding import AUTO, codec_of
from mlm.data.config import SPLITS
from mlm.util.errors import Problem

MAX_BANDS = 1024  # a task and a column of keys each


def check_encoding(config: DataBuildConfig | DataTokenizerConfig) -> list[Problem]:
    try:
        if config.encoding != AUTO:
            codec_of(config.encoding)
    except LookupError:
        fix = "use auto, utf-8, latin-1, cp1252, cp1251, shift_jis or another name that Python knows"
        return [Problem.at("encoding", config.encoding, "is no encoding of text", fix)]
    return []


def check_build(config: DataBuildConfig) -> list[Problem]:
    problems, decontaminate, rules = check_encoding(config), config.decontaminate, config.filter
    if not decontaminate.parts or not set(decontaminate.parts) <= set(SPLITS):
        parts, fix = f"[{','.join(decontaminate.parts)}]", f"name some of {', '.join(SPLITS)}"
        problems.append(Problem.at("decontaminate.parts", parts, "must be parts of a corpus", fix))
    if (bands := config.dedup.bands) > MAX_BANDS:
        problem = f"dedup.bands={bands} is above {MAX_BANDS}"
        problems.append(Problem(("dedup.bands",), problem, "lower it, and dedup.rows with it"))
    for section, least, most in (
        (decontaminate, "decontaminate.min_ngram", "decontaminate.ngram"),
        (rules, "filter.min_words", "filter.max_words"),
        (rules, "filter.min_mean_word_length", "filter.max_mean_word_length"),
    ):
        low, high = (getattr(section, key.partition(".")[2]) for key in (least, most))
        if low is not None and high is not None and low > high:
            problems.append(Problem((least, most), f"{least}={low} is above {most}={high}", "lower it"))
    return problems


def check_merge(config: DataMergeConfig) -> list[Problem]:
    fix = "name corpora to join: mlm data merge corpora/a corpora/b"
    return [] if len(config.paths) > 1 else [Problem(("paths",), "paths names fewer than two corpora", fix)]


COMMANDS = (
    Command(
        name="data tokenizer",
        other_names=("tokenize",),
        spec=DataTokenizerConfig,
        target="mlm.cli.data.run:run_tokenizer",
        local_check=check_encoding,
        preflight="mlm.cli.data.run:preflight_tokenizer",
        summary="train a tokenizer on text (byte-level BPE, WordPiece), or import one",
        about="""Trains a byte-level BPE as GPT-2's or a WordPiece vocabulary as BERT's on text, or reads the
            files of another tokenizer; writes tokenizer.json, for `mlm data build`.""",
        examples="""
            # 8,192 tokens from your documents
            mlm data tokenizer input=text out=corpus vocab_size=8192
            # BERT's kind, with capitals
            mlm data tokenizer input=text out=corpus kind=wordpiece vocab_size=30000 lowercase=false
            # BERT's own vocabulary
            mlm data tokenizer input=bert/vocab.txt out=corpus
        """,
    ),
    Command(
        name="data build",
        other_names=("prepare", "preprocess"),
        spec=DataBuildConfig,
        target="mlm.corpus.build:run_build",
        local_check=check_build,
        preflight="mlm.corpus.build:preflight",
        summary="clean, deduplicate, decontaminate and tokenise text into a corpus that pretrain reads",
        about="""Reads text, fixes and filters it, removes near-duplicates and the text of evaluation sets,
            and writes Megatron's indexed format, one corpus each for train, validation and test. Started
            again after an interruption, it continues where it was. recipe=plain takes documents as they
            are.""",
        examples="""
            # A folder of web text, kept apart from what models are scored on
            mlm data build data=web tokenizer=gpt2 out=out decontaminate.against=[wikitext103,lambada]
            # One text file, split into train, validation and test
            mlm data build data=book.txt tokenizer=gpt2 out=corpus
            # Clean text, already in train.jsonl and validation.jsonl
            mlm data build data=text tokenizer=corpus out=corpus recipe=plain
            # Files and folders, of which some are not in UTF-8
            mlm data build 'input=[book.txt,pages]' tokenizer=gpt2 out=corpus encoding=auto
            # Compressed files, split by documents
            mlm data build 'data=web/*.jsonl.zst' tokenizer=gpt2 out=corpus split=0.9/0.05/0.05
            # On all nodes of a Ray cluster, which share the folders
            mlm data build data=/shared/web tokenizer=gpt2 out=/shared/corpus executor=ray
        """,
        aliases={"data": "input"},
        keys="""
            input tokenizer out split bad_input filter.min_tokens dedup.threshold decontaminate.against
            workers
        """,
    ),
    Command(
        name="data merge",
        other_names=("merge_datasets",),
        spec=DataMergeConfig,
        target="mlm.cli.data.run:run_merge",
        local_check=check_merge,
        summary="join corpora of one tokenizer, their documents in sequence",
        about="""Writes one corpus of all documents of several, in the order given, byte for byte as
            Megatron-LM's merge_datasets.py does. To mix corpora by weight, train with data.blend.""",
        examples="""
            # Two corpora, part by part
            mlm data merge corpora/wiki corpora/web out=corpora/both
            # Pairs of Megatron-LM, which become train
            mlm data merge a_text_document b_text_document out=corpora/both
        """,
        positional=("paths",),
        takes_list=True,
    ),
    Command(
        name="data split",
        spec=DataSplitConfig,
        target="mlm.cli.data.run:run_split",
        summary="divide a corpus into train, validation and test by documents",
        about="""Writes a corpus whose parts are consecutive documents of another, with the bounds that
            Megatron-LM's --split gives a corpus of one sequence per document.""",
        examples="""
            # As Megatron-LM's --split 969,30,1
            mlm data split my_text_document out=corpus split=969/30/1
        """,
        positional=("path",),
    ),
    Command(
        name="data inspect",
        spec=DataInspectConfig,
        target="mlm.cli.data.run:run_inspect",
        summary="show what a corpus holds: documents, tokens, lengths, decoded samples",
        about="""Shows the header of a .bin/.idx pair, how many documents and tokens it holds, how long they
            are and a few of them as text. Reads corpora of Megatron-LM as well.""",
        examples="""
            # Counts and lengths of a corpus, part by part
            mlm data inspect corpus
            # A foreign pair
            mlm data inspect wiki_text_document tokenizer=gpt2 samples=10
        """,
        positional=("path",),
    ),
    Command(
        name="data verify",
        spec=DataVerifyConfig,
        target="mlm.cli.data.run:run_verify",
        summary="find truncation, bad pointers and token ids out of range in a corpus",
        about="""Reads a corpus whole: sizes, pointers, boundaries, every token id, the digests of its
            receipt. Exits with 1 when something is wrong.""",
        examples="""
            # Check every file of a corpus
            mlm data verify corpus
            # A foreign pair
            mlm data verify wiki_text_document vocab_size=50257
        """,
        positional=("path",),
    ),
)
