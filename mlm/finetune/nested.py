"""SQuAD and RACE in the form they are published in, as records of the Hub's schema."""

from collections.abc import Iterator
from typing import Any

from mlm.errors import UserError

Record = dict[str, Any]


def squad_records(file: str, content: Any) -> Iterator[tuple[str, Record]]:
    """(place, record) of every question of SQuAD's JSON: {"data": [{title, paragraphs: [{context, qas}]}]}.

    A list of objects, or one under "data", is taken as records themselves. Raises UserError.
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


def race_records(file: str, content: Any) -> Iterator[tuple[str, Record]]:
    """(place, record) of every question of one of RACE's files: {article, questions, options, answers, id}.

    Raises UserError.
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
        raise UserError(f"{file}: not as many questions as options and answers: mend it")
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
    """A list of objects. Raises UserError."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise UserError(f"{place}: has no list of objects under '{name}', as SQuAD's files have: mend it")
    return value
