"""Conversion of rows of conversations from other programs' columns to TRL's."""

from collections.abc import Mapping, Sequence
from typing import Any

from mlm.data.records import Record

MESSAGES = ("messages", "conversations")
ASKED = ("instruction", "question", "query", "input")
"""Columns of a question, joined by line breaks."""
QUESTION = (*ASKED, "history", "system")


def standard_form(record: Mapping[str, Any], columns: Sequence[str]) -> tuple[Record, str]:
    """Return a row in TRL's `columns` (messages or prompt, chosen, rejected), and a line on the conversion.

    Converts rows of alpaca (instruction, input, output), and pairs of answers in the columns of
    LLaMA-Factory, Orca and UltraFeedback. Other rows are unchanged.
    """
    row = {key: value for key, value in record.items() if value is not None}
    changed, change = None, "instruction, input and output read as messages"
    if set(columns) == {"prompt", "chosen", "rejected"} and "chosen" in row and "rejected" in row:
        changed, change = _pair(row)
    elif tuple(columns) == MESSAGES[:1] and "instruction" in row:
        has_messages = any(name in row for name in (*MESSAGES, "prompt"))
        if not has_messages and (question := _question(row)) is not None:
            answer = [_message("assistant", row["output"])] if "output" in row else []
            changed = drop_columns(row, (*QUESTION, "output")) | {"messages": question + answer}
    return (dict(record), "") if changed is None else (changed, change)


def _pair(row: Record) -> tuple[Record | None, str]:
    """Return a pair of answers with prompt and answers as messages; None if no conversion is needed."""
    answers = [row["chosen"], row["rejected"]]
    has_lists = all(isinstance(answer, list) and answer for answer in answers)
    prompt = next((row[name] for name in ("prompt", *MESSAGES) if name in row), None)
    consumed: tuple[str, ...] = MESSAGES
    if prompt is None:
        prompt, consumed = _question(row), QUESTION
    elif isinstance(prompt, str) and has_lists:
        prompt = [_message("user", prompt)]
    if not isinstance(prompt, list) or not prompt or (prompt is row.get("prompt") and has_lists):
        return None, ""
    if has_lists and all(_text(prompt[-1]) in map(_text, answer[:-1]) for answer in answers):
        return drop_columns(row, ("prompt", *ASKED)), "a prompt that both answers begin with left out"
    firsts = [answer[0] for answer in answers if has_lists]
    speakers = [m.get("role", m.get("from")) if isinstance(m, dict) else None for m in firsts]
    if any(speaker not in ("assistant", "gpt") for speaker in speakers):
        return None, ""
    pair: Record = {"prompt": prompt}
    for side in ("chosen", "rejected"):
        answer = row[side]
        if isinstance(answer, str):
            answer = _message("assistant", answer)
        pair[side] = [answer] if isinstance(answer, dict) else answer
    return drop_columns(row, consumed) | pair, "prompt and answers of other columns or types read as messages"


def _question(row: Record) -> list[Record] | None:
    """Return the messages of a question, after a system message and earlier turns; None without one."""
    texts, history = [row[name] for name in ASKED if row.get(name)], row.get("history") or []
    if not texts or not all(isinstance(text, str) for text in texts) or not isinstance(history, list):
        return None
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        return None
    turns = [_message(*turn) for pair in history for turn in zip(("user", "assistant"), pair, strict=True)]
    system = [_message("system", row["system"])] if row.get("system") else []
    return [*system, *turns, _message("user", "\n".join(texts))]


def drop_columns(row: Record, names: tuple[str, ...]) -> Record:
    return {key: value for key, value in row.items() if key not in names}


def _message(role: str, content: Any) -> Record:
    return {"role": role, "content": content}


def _text(message: Any) -> Any:
    text = message.get("content", message.get("value")) if isinstance(message, dict) else None
    return text.strip() if isinstance(text, str) else text
