"""Tasks, files of rows and tokenizers for the tests."""

import csv
import gzip
import json
import random
import string
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from transformers import BertTokenizerFast, RobertaTokenizer

from mlm.config.build import build
from mlm.config.paths import CONFIG_DIR
from mlm.corpus.train_tokenizer import train_bpe
from mlm.data.tokenizer import Tokenizer
from mlm.finetune.config import TaskConfig
from mlm.finetune.splits import TaskSplit, read_split

VOCABULARY = (
    "the a cat dog sea sat saw ran on mat tree who when what answer near far old new moon river stone quick "
    "slow bright café naïve it was is not . , ? ! ' ( ) -"
)
WORDS = VOCABULARY.split()
ENDINGS = "##s ##ed ##ing ##er"
PAIR = {"first": "A cat sat .", "second": "The cat was not far .", "label": 1, "idx": 0}
RACE = {
    "example_id": "high7.txt",
    "article": "A cat sat .",
    "question": "Who sat ?",
    "options": ["cat", "dog", "sea", "tree"],
    "answer": "A",
}
SQUAD = {
    "id": "q1",
    "context": "The old cat sat.",
    "question": "Who sat?",
    "answers": {"text": ["The old cat", "cat"], "answer_start": [0, 8]},
}
TALK = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on the mat"}]
STS = {"sentence1": "a cat", "sentence2": "the cat", "label": 3.8, "idx": 0}


def shipped(name: str, **changes: Any) -> TaskConfig:
    """The task of configs/task, some of its keys changed."""
    content = yaml.safe_load((CONFIG_DIR / "task" / f"{name}.yaml").read_text())
    return build(TaskConfig, content | changes)


def pairs(**changes: Any) -> TaskConfig:
    values = {"name": "mine", "columns": ["first", "second"], "labels": ["no", "yes"]}
    return build(TaskConfig, values | changes)


def split_of(
    folder: Path, task: TaskConfig, records: Iterable[Mapping[str, Any]], name: str = "train"
) -> TaskSplit:
    return read_split(task, name, path=str(write_rows(folder / f"{name}.jsonl", records)))


def write_rows(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """Rows in the form that the file's name says."""
    path.parent.mkdir(exist_ok=True)
    match path.suffix:
        case ".gz":
            write_table(path.with_suffix(""), rows)
            path.write_bytes(gzip.compress(path.with_suffix("").read_bytes()))
            path.with_suffix("").unlink()
        case ".jsonl" | ".ndjson":
            write_rows(path, rows)
        case ".json":
            path.write_text(json.dumps(rows))
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        case ".csv" | ".tsv":
            with open(path, "w", newline="") as f:
                if path.suffix == ".tsv":
                    table = [list(rows[0]), *(list(row.values()) for row in rows)]
                    f.writelines("\t".join(map(str, line)) + "\n" for line in table)
                else:
                    writer = csv.DictWriter(f, list(rows[0]))
                    writer.writeheader()
                    writer.writerows(rows)


def sentence(draw: random.Random, words: int) -> str:
    """Words known and unknown, with accents, capitals and punctuation."""
    picks = [draw.choice(WORDS) for _ in range(words)]
    changed = [pick.title() + draw.choice(["", "s", "ing", "?"]) for pick in picks]
    return " ".join(c if draw.random() < 0.3 else p for p, c in zip(picks, changed, strict=True))


@cache
def _vocabulary() -> Path:
    file = Path(mkdtemp()) / "vocab.txt"
    letters = [*string.ascii_lowercase, *(f"##{c}" for c in string.ascii_lowercase)]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    file.write_text("\n".join(dict.fromkeys([*special, *letters, "cafe", "naive", *ENDINGS.split(), *WORDS])))
    return file


@cache
def bert() -> Tokenizer:
    """Our BERT tokenizer of a small vocabulary."""
    return Tokenizer.load(_vocabulary())


@cache
def their_bert() -> BertTokenizerFast:
    tokenizer = BertTokenizerFast.from_pretrained(str(_vocabulary().parent))
    assert len(tokenizer) == bert().vocab_size
    return tokenizer


@cache
def _roberta() -> Path:
    """A folder with the files of roberta-base, which names its special tokens by its model_type alone."""
    folder, model = Path(mkdtemp()), json.loads(gpt2().content)["model"]
    pieces = [name for name in sorted(model["vocab"], key=model["vocab"].get) if name != "<|endoftext|>"]
    names = ["<s>", "<pad>", "</s>", "<unk>", *pieces, "<mask>"]
    (folder / "vocab.json").write_text(json.dumps({name: n for n, name in enumerate(names)}))
    (folder / "merges.txt").write_text("".join(f"{' '.join(pair)}\n" for pair in model["merges"]))
    (folder / "config.json").write_text('{"model_type": "roberta"}')
    return folder


@cache
def roberta() -> Tokenizer:
    return Tokenizer.load(_roberta())


@cache
def their_roberta() -> RobertaTokenizer:
    return RobertaTokenizer.from_pretrained(str(_roberta()))


@cache
def gpt2() -> Tokenizer:
    return train_bpe([VOCABULARY] * 9, 320)
