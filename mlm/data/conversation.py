"""Conversations of rows: messages, tools and values for the template, validated."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlm.data.chat_template import ChatError, Message
from mlm.util.errors import type_of

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool")
SHARE_GPT = "conversations"
"""Column of ShareGPT's messages."""
SPEAKERS = {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "observation": "tool"}
"""ShareGPT's names of roles, where they differ."""
CALL = "function_call"
"""ShareGPT's speaker of a tool call, {"name": …, "arguments": …} as JSON; OpenAI's former key of one."""
WEIGHTS = ("weight", "train", "loss")
"""Keys of an assistant's message that exclude it from the loss, if 0 or false."""
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Columns of rows, and keys of messages, whose content no model reads."""
TOOLS, SYSTEM, OPTIONS = "tools", "system", "chat_template_kwargs"
"""Columns besides messages: functions that may be called, a first message, and values for the template."""
FIXED = ("messages", TOOLS, "add_generation_prompt")
"""Template values that a row must not set."""


@dataclass(frozen=True)
class Conversation:
    """Messages of a row, and the row's other values for a template."""

    messages: Sequence[Message]
    tools: Any = None
    """Descriptions of functions; None without any."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other values for the template, by name."""
    prompt: int = 0
    """Number of messages before the answer; 0 if roles decide."""
    changes: tuple[str, ...] = ()
    """Changes to the row while it was read, for the run's header."""

    def to_json(self) -> list[Any]:
        """Return the values of all fields except `changes`, without trailing options and prompt if unset."""
        optional = [self.options, self.prompt]
        return [self.messages, self.tools, *(optional if any(optional) else ())]


def read_conversation(
    record: Mapping[str, Any], column: str = "messages", *, keep_nulls: bool = False
) -> Conversation:
    """Return the conversation of a row: messages in `column` or `conversations`, or prompt and completion.

    Raises KeyError without any, ChatError.
    """
    for name in (column, SHARE_GPT):
        if record.get(name) is not None:  # a table of several forms fills absent columns with null
            return make_conversation(record, record[name], keep_nulls=keep_nulls)
    prompt, completion = (
        part if isinstance(part, list) else [{"role": role, "content": part}]
        for part, role in ((record["prompt"], "user"), (record["completion"], ASSISTANT))
    )
    first = len(prompt) if isinstance(record["prompt"], list) else 0
    return make_conversation(record, [*prompt, *completion], first, keep_nulls=keep_nulls)


def make_conversation(
    record: Mapping[str, Any], turns: Any, prompt: int = 0, *, keep_nulls: bool = False
) -> Conversation:
    """Return messages, of which the first `prompt` are a prompt, with the other columns of their row.

    Raises ChatError, also for an unsupported column that would change the training.
    """
    for name in MEDIA:
        if record.get(name):
            raise ChatError(f"the column '{name}' is not read, only texts are: delete it, or the row")
    messages, changes = check_messages(turns), list[str]()
    tools, options = objects_in(record.get(TOOLS), f"'{TOOLS}'"), record.get(OPTIONS)
    options = {} if options is None else options
    if not isinstance(options, dict) or any(name in FIXED for name in options):
        problem = f"is not an object of values other than {', '.join(FIXED)}"
        raise ChatError(f"'{OPTIONS}' {problem}: fix or delete it")
    if not keep_nulls:
        cleaned = without_nulls([messages, tools, options])
        if cleaned != [messages, tools, options]:
            changes.append("nulls removed from tools, calls and their arguments (task.keep_nulls=true keeps)")
        messages, tools, options = cleaned
    if any(message.get("from") in (CALL, "observation") for message in turns):
        changes.append(f"turns of {CALL} and observation read as calls and results of tools")
    system = record.get(SYSTEM)
    if system is not None and not isinstance(system, str):
        raise ChatError(f"'{SYSTEM}' holds {type_of(system)}, not a text: fix or delete it")
    if system and messages[0]["role"] != "system":
        messages, prompt = [{"role": "system", "content": system}, *messages], prompt + (prompt > 0)
        changes.append(f"the column '{SYSTEM}' read as the first message")
    elif system and messages[0]["content"] != system:
        raise ChatError(f"'{SYSTEM}' is another text than the first message's: delete one")
    if not all(is_trained(message) for message in messages if message["role"] == ASSISTANT):
        if prompt:
            raise ChatError("a turn of weight 0 after a prompt, where all turns are trained: write messages")
        changes.append("turns of weight 0 not trained")
    return Conversation(messages, tools, options, prompt, tuple(changes))


def objects_in(value: Any, name: str) -> list[Any] | None:
    """Return a list of objects, from a list or JSON text; None without one. Raises ChatError."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError):
            raise ChatError(f"{name} is a text, and no JSON: write a list of objects") from None
    value = list(value) if isinstance(value, tuple) else value
    if value is not None and not (isinstance(value, list) and all(isinstance(item, dict) for item in value)):
        raise ChatError(f"{name} is not a list of objects: fix or delete it")
    return value


def without_nulls(value: Any) -> Any:
    """Return JSON without null values at any depth; tables use null for absent keys."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: without_nulls(item) for key, item in value.items() if item is not None}


def check_messages(messages: Any) -> list[Message]:
    """Return the messages of a conversation, ShareGPT's too, with a role and a text. Raises ChatError."""
    if not isinstance(messages, list) or not messages:
        raise ChatError('no list of messages: write [{"role": "user", "content": "…"}, …]')
    return [check_message(message, number) for number, message in enumerate(messages, 1)]


def check_message(row: Any, number: int) -> Message:
    if not isinstance(row, dict):
        raise ChatError(f'message {number} is not an object: write {{"role": "user", "content": "…"}}')
    # Tables use null for absent keys.
    message: Message = {key: value for key, value in row.items() if value is not None}
    if "from" in message and "role" not in message:
        speaker, text = message.pop("from"), message.pop("value", None)
        if speaker == CALL:
            try:
                call: Any = json.loads(text) if isinstance(text, str) else text
            except (ValueError, RecursionError):
                call = None
            if not isinstance(call, dict) or not {"name", "arguments"} <= call.keys():
                form = '{"name": "…", "arguments": {…}}'
                raise ChatError(f"message {number}: no call {form} as JSON: fix it")
            message |= {"role": ASSISTANT, "tool_calls": [{"type": "function", "function": call}]}
        else:
            message |= {"role": SPEAKERS.get(str(speaker), speaker), "content": text}
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ChatError(f"message {number}: role={str(role)[:40]!r} is unknown: use {', '.join(ROLES)}")
    if unread := [name for name in (CALL, *MEDIA) if message.get(name)]:
        raise ChatError(f"message {number}: '{unread[0]}' is not read: write tool_calls, or delete the row")
    if invalid := [key for key in WEIGHTS if message.get(key, 1) not in (0, 1)]:
        raise ChatError(f"message {number}: '{invalid[0]}' is neither 0 nor 1: fix or delete it")
    if calls := objects_in(message.get("tool_calls"), f"message {number}: 'tool_calls'"):
        message["tool_calls"] = calls
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
        if len(texts) < len(content):
            part = 'a part of its \'content\' is not {"type": "text", "text": "…"}'
            raise ChatError(f"message {number}: {part}: delete the row")
        content = "".join(texts)
    if content is None and calls:  # OpenAI's form; some templates would write it as a word
        return message
    if not isinstance(content, str):
        raise ChatError(f"message {number}: its 'content' is not text: give one, or delete the message")
    return {**message, "content": content}


def is_trained(message: Message) -> bool:
    """True unless a weight of 0 keeps a message out of the loss."""
    return all(message.get(key, 1) for key in WEIGHTS)
