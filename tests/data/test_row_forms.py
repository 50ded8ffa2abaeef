"""Rows of conversations in the forms of other programs, against TRL's preparation where it has one."""

from typing import Any

import pytest
from trl.data_utils import extract_prompt, maybe_extract_prompt

from mlm.data.row_forms import standard_form

CHAT, PAIRS = ("messages",), ("prompt", "chosen", "rejected")


def said(*turns: str) -> list[dict[str, str]]:
    """Messages of the user and the assistant in turn; `system:` begins a system's."""
    system = [{"role": "system", "content": text[7:]} for text in turns[:1] if text.startswith("system:")]
    roles = ("user", "assistant") * len(turns)
    rest = zip(roles, turns[len(system) :], strict=False)
    return system + [{"role": role, "content": text} for role, text in rest]


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


FORMS: dict[str, tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]] = {
    "alpaca": (
        CHAT,
        {"instruction": "Add", "input": "1 2", "output": "3", "text": "Below is …"},
        {"messages": said("Add\n1 2", "3"), "text": "Below is …"},
    ),
    "alpaca without an input": (
        CHAT,
        {"instruction": "Sing", "input": "", "output": "la", "system": None},
        {"messages": said("Sing", "la")},
    ),
    "alpaca of LLaMA-Factory": (
        CHAT,
        {"instruction": "c", "output": "d", "system": "s", "history": [["a", "b"]], "tools": "[]"},
        {"messages": said("system:s", "a", "b", "c", "d"), "tools": "[]"},
    ),
    "alpaca's pairs of LLaMA-Factory": (
        PAIRS,
        {"instruction": "Add", "input": "1 2", "chosen": "3", "rejected": "4"},
        {"prompt": said("Add\n1 2"), "chosen": answer("3"), "rejected": answer("4")},
    ),
    "sharegpt's pairs of LLaMA-Factory": (
        PAIRS,
        {
            "conversations": [{"from": "human", "value": "Hi"}],
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
            "tools": "[]",
        },
        {
            "prompt": [{"from": "human", "value": "Hi"}],
            "chosen": [{"from": "gpt", "value": "good"}],
            "rejected": [{"from": "gpt", "value": "bad"}],
            "tools": "[]",
        },
    ),
    "Orca's pairs": (
        PAIRS,
        {"system": "s", "question": "q", "chosen": "good", "rejected": "bad"},
        {"prompt": said("system:s", "q"), "chosen": answer("good"), "rejected": answer("bad")},
    ),
    "a text before answers alone": (
        PAIRS,
        {"prompt": "q", "chosen": answer("good"), "rejected": answer("bad")},
        {"prompt": said("q"), "chosen": answer("good"), "rejected": answer("bad")},
    ),
    "messages before texts": (
        PAIRS,
        {"prompt": said("q"), "chosen": "good", "rejected": "bad"},
        {"prompt": said("q"), "chosen": answer("good"), "rejected": answer("bad")},
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_other_programs_are_read_as_messages(name: str) -> None:
    columns, row, wanted = FORMS[name]
    found, change = standard_form(row, columns)
    assert found == wanted
    assert change


@pytest.mark.parametrize("talk", [("q",), ("system:s", "q"), ("a", "b", "q")])
def test_ultrafeedback_is_read_as_trl_extracts_its_prompt(talk: tuple[str, ...]) -> None:
    row: dict[str, Any] = {"prompt": "q", "chosen": said(*talk, "good"), "rejected": said(*talk, "bad")}
    found, change = standard_form(row, PAIRS)
    assert extract_prompt(found) == maybe_extract_prompt(row)
    assert change


AS_THEY_ARE: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "messages beside an instruction": (CHAT, {"messages": said("a", "b"), "instruction": "c", "output": "d"}),
    "columns of a task": (("instruction", "chosen", "rejected"), FORMS["alpaca's pairs of LLaMA-Factory"][1]),
    "TRL's pairs": (PAIRS, {"prompt": said("q"), "chosen": answer("a"), "rejected": answer("b"), "id": None}),
    "TRL's pairs of texts": (PAIRS, {"prompt": "q", "chosen": "a", "rejected": "b", "instruction": "c"}),
    "a prompt that neither answer holds": (
        PAIRS,
        {"prompt": "p", "chosen": said("q", "a"), "rejected": said("q", "b")},
    ),
    "whole conversations": (
        PAIRS,
        {"chosen": said("q", "a"), "rejected": said("q", "b"), "messages": said("q", "a")},
    ),
    "an instruction that is no text": (CHAT, {"instruction": ["a"], "output": "b"}),
    "a history of no pairs": (CHAT, {"instruction": "a", "output": "b", "history": ["c"]}),
}


@pytest.mark.parametrize("name", AS_THEY_ARE)
def test_other_rows_stay_as_they_are(name: str) -> None:
    columns, row = AS_THEY_ARE[name]
    assert standard_form(row, columns) == (row, "")
