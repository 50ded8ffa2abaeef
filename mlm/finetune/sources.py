"""The records of a split: from files, among them RACE's and SQuAD's as published, or from the Hub."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlm.data.records import SUFFIXES, Located, Record, hub_records, read_records, readable
from mlm.finetune.config import TaskConfig
from mlm.util.errors import UserError

KEY = "data.path"


def read_split_records(task: TaskConfig, split: str, path: str | None) -> Iterator[Located]:
    """Yield the records of a split of a folder or file, or of the Hub. Raises UserError, CorruptFileError."""
    if path is not None:
        for file in find_files(Path(path), split, task.subsets):
            yield from read_file(file)
        return
    if task.hub is None:
        raise UserError(
            f"{KEY}=null: task {task.name} has no data set on the Hub: give {KEY}=… or task.hub=…"
        )
    bring = f"it as files such as {split}.jsonl or .parquet in a FOLDER"
    rows = hub_records(task.hub, task.hub_config, split, key=KEY, bring=bring)
    name = " ".join(filter(None, (task.hub, task.hub_config, split)))
    for number, record in enumerate(rows, 1):
        yield f"{name} row {number}", record


def find_files(path: Path, split: str, subsets: tuple[str, ...]) -> list[Path]:
    """Return the files of a split: `path` itself, or those below it with the split's name.

    {split}.jsonl and the like; {split}-00000-of-00002.parquet as the Hub stores it; {split}-v1.1.json as
    SQuAD is published; {split}/{subset}/*.txt as RACE is; any of these below a folder named after a subset.
    `dev` is another name for `validation`. Raises UserError.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"{KEY}={path}: no such file or folder: give one with {split}.jsonl, or a file")
    roots = folders_of(path, subsets) or [path]
    names = dict.fromkeys([split, split.replace("validation", "dev")])
    for name in names:
        files = [file for root in roots for file in files_named(root, name, subsets)]
        if files:
            return files
    raise UserError(f"{KEY}={path}: has no split {split}: give a folder with {split}.jsonl, or a file")


def files_named(root: Path, name: str, subsets: tuple[str, ...]) -> list[Path]:
    """Return the files of a split in a folder. Raises UserError if there are several to choose from."""
    plain = [[f"{name}{suffix}"] for suffix in (*SUFFIXES, ".json")]
    published = [[f"{name}-*-of-*.parquet"], [f"{name}-v[0-9]*.json"], [f"{name}/*.txt"]]
    by_subset = [f"{folder.relative_to(root)}/*.txt" for folder in folders_of(root / name, subsets)]
    ways = [
        [file for pattern in patterns for file in sorted(root.glob(pattern))]
        for patterns in [*plain, *published, by_subset]
    ]
    choices = [files for files in ways if files]
    if len(choices) > 1:
        places = " and ".join(str(files[0]) for files in choices[:2])
        raise UserError(f"{KEY}: both {places} hold the split {name}: name one of them, or delete one")
    return choices[0] if choices else []


def folders_of(path: Path, subsets: tuple[str, ...]) -> list[Path]:
    """Return the folders of all subsets; empty if there are none. Raises UserError if some are missing."""
    folders = {subset: path / subset for subset in subsets}
    there = [folder for folder in folders.values() if folder.is_dir()]
    if there and len(there) < len(folders):
        missing = ", ".join(subset for subset, folder in folders.items() if not folder.is_dir())
        raise UserError(
            f"{KEY}: {path} has no folder {missing}: add it, or set task.subsets to what there is"
        )
    return there


def read_file(file: Path) -> Iterator[Located]:
    """Yield the records of a file. Raises UserError, CorruptFileError."""
    if file.suffix not in (".json", ".txt"):
        return read_records(file)
    try:
        with readable(file):
            content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: is not JSON: give another file") from error
    return (squad_records if file.suffix == ".json" else race_records)(str(file), content)


def squad_records(file: str, content: Any) -> Iterator[Located]:
    """Yield (location, record) of every question of SQuAD's JSON.

    Its form is {"data": [{title, paragraphs: [{context, qas}]}]}. A list of objects, or one under "data", is
    taken as records themselves. Raises UserError.
    """
    articles = content.get("data") if isinstance(content, dict) else content
    for number, article in enumerate(members(articles, file, "data"), 1):
        if "paragraphs" not in article:
            yield f"{file}:row {number}", article
            continue
        place = f"{file}:article {number}"
        for at, paragraph in enumerate(members(article["paragraphs"], place, "paragraphs"), 1):
            here = f"{place} paragraph {at}"
            for index, qa in enumerate(members(paragraph.get("qas"), here, "qas"), 1):
                record = {**qa, "context": paragraph.get("context"), "title": article.get("title")}
                yield f"{here} question {index}", record


def race_records(file: str, content: Any) -> Iterator[Located]:
    """Yield (location, record) of every question of one of RACE's files.

    Its form is {article, questions, options, answers, id}. Raises UserError.
    """
    columns = ("questions", "options")
    if not isinstance(content, dict) or not all(isinstance(content.get(key), list) for key in columns):
        raise UserError(
            f"{file}: is no article of RACE (article, questions, options, answers, id): remove it"
        )
    questions, options, answers = (content.get(key) for key in (*columns, "answers"))
    assert isinstance(questions, list)
    assert isinstance(options, list)
    answers = [None] * len(questions) if answers is None else answers
    if not isinstance(answers, list) or not len(questions) == len(options) == len(answers):
        raise UserError(f"{file}: not as many questions as options and answers: fix it")
    for index, question in enumerate(questions):
        yield (
            f"{file}:question {index + 1}",
            {
                "example_id": content.get("id"),
                "article": content.get("article"),
                "question": question,
                "options": options[index],
                "answer": answers[index],
            },
        )


def members(value: Any, place: str, name: str) -> list[Record]:
    """Return a list of objects. Raises UserError."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise UserError(f"{place}: has no list of objects under '{name}', as SQuAD's files have: fix it")
    return value
