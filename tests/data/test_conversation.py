"""Rows of conversations: tokens of `transformers` and TRL, or an error that names the field."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlm.data.chat_files import find_templates
from mlm.data.chat_template import ChatError
from mlm.data.chat_tokens import encode, encode_prompt
from mlm.data.conversation import Conversation, make_conversation, read_conversation
from mlm.data.tokenizer import Tokenizer
from tests.data.chats import CHATML, MARKED, TALK, load, text_of_answers, theirs, tokens_of, write_tokenizer

CALLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if m.content is defined else '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
CALLED = [
    {"role": "user", "content": "the cat"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "sat"},
]
ASKED, SAID = {"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on"}


@pytest.mark.parametrize("tools", [json.dumps(TOOLS), TOOLS, "[]"])
def test_tools_as_json_text_are_these_tools(tmp_path: Path, tools: Any) -> None:
    folder = write_tokenizer(tmp_path, "qwen2", CALLS)
    given = json.loads(tools) if isinstance(tools, str) else tools
    ids = theirs(folder).apply_chat_template(CALLED, tools=given, return_dict=False)
    row = {"messages": CALLED, "tools": tools}
    assert tokens_of(folder, read_conversation(row)).ids.tolist() == ids
    asked = make_conversation({"tools": tools}, CALLED[:1])
    prompt = theirs(folder).apply_chat_template(
        CALLED[:1], tools=given, add_generation_prompt=True, return_dict=False
    )
    assert encode_prompt(asked, *load(folder)) == prompt


def test_content_of_null_beside_calls_is_no_word(tmp_path: Path) -> None:
    folder = write_tokenizer(
        tmp_path, "qwen2", CALLS.replace("m.content if m.content is defined else ''", "m.content")
    )
    found = tokens_of(folder, read_conversation({"messages": CALLED})).ids.tolist()
    assert found == theirs(folder).apply_chat_template(CALLED, return_dict=False)
    assert "None" not in Tokenizer.load(folder).decode(found)


def test_nulls_of_a_table_are_removed_or_kept() -> None:
    from trl.trainer.utils import remove_none_values

    arguments = {"city": "X", "n": None, "l": [None, {"a": None}]}
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    asked = {"role": "assistant", "tool_calls": [call]}
    row = {"messages": [ASKED, asked], "tools": [{"name": "f", "strict": None}]}
    found = read_conversation(row)
    assert [found.messages, found.tools] == remove_none_values([row["messages"], row["tools"]])
    assert found.changes == (
        "nulls removed from tools, calls and their arguments (task.keep_nulls=true keeps)",
    )
    kept = read_conversation(row, keep_nulls=True)
    assert [kept.messages, kept.tools, kept.changes] == [row["messages"], row["tools"], ()]


NAMED = {"default": CHATML, "tool_use": "tools:" + CALLS}


@pytest.mark.parametrize("place", ["list", "dict", "folder"])
@pytest.mark.parametrize("tools", [[], TOOLS])
def test_template_for_tools_is_used_where_there_are_tools(tmp_path: Path, place: str, tools: Any) -> None:
    value: Any = NAMED if place == "dict" else [{"name": k, "template": v} for k, v in NAMED.items()]
    settings = {} if place == "folder" else {"chat_template": value}
    folder = write_tokenizer(tmp_path, "qwen2", None, **settings)
    if place == "folder":
        (folder / "additional_chat_templates").mkdir()
        (folder / "chat_template.jinja").write_text(NAMED["default"])
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(NAMED["tool_use"])
    ids = theirs(folder).apply_chat_template(TALK, tools=tools, return_dict=False)
    assert tokens_of(folder, Conversation(TALK, tools)).ids.tolist() == ids
    (tmp_path / "saved").mkdir()
    tokenizer, tokenizer.chat_template = load(folder)
    tokenizer.save(tmp_path / "saved")
    assert {n: s for n, (s, _) in find_templates(tmp_path / "saved").items()} == NAMED


def test_glaive_roles_are_calls_and_results_of_tools() -> None:
    said = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "x"},
    ]
    found = read_conversation({"conversations": said})
    assert found.messages == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "x"},
    ]
    assert found.changes == ("turns of function_call and observation read as calls and results of tools",)


@pytest.mark.parametrize(
    "row, problem",
    [
        ({"messages": "hello"}, "no list of messages"),
        ({"messages": [{"role": "human", "content": "a"}]}, "message 1: role='human' is unknown"),
        ({"messages": [ASKED, {"role": "assistant"}]}, "message 2: its 'content' is not text"),
        (
            {"messages": [{**ASKED, "content": [{"type": "image"}]}]},
            "message 1: a part of its 'content' is not",
        ),
        ({"tools": "f"}, "'tools' is a text, and no JSON"),
        ({"images": ["a.jpg"]}, "the column 'images' is not read"),
        ({"system": 3}, "'system' holds an integer"),
        (
            {"system": "a", "messages": [{"role": "system", "content": "b"}, ASKED, SAID]},
            "'system' is another text",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "'chat_template_kwargs' is not an object"),
        ({"messages": [ASKED, {**SAID, "weight": 0.5}]}, "message 2: 'weight' is neither 0 nor 1"),
        (
            {"messages": [ASKED, {**SAID, "function_call": {"name": "f"}}]},
            "message 2: 'function_call' is not read",
        ),
        ({"messages": [ASKED, {**SAID, "tool_calls": "f"}]}, "message 2: 'tool_calls' is a text"),
        ({"messages": [{"from": "function_call", "value": "f(1)"}, SAID]}, "message 1: no call"),
        (
            {"messages": None, "prompt": [ASKED, {**SAID, "weight": 0}, ASKED], "completion": [SAID]},
            "a turn of weight 0 after a prompt",
        ),
    ],
)
def test_what_would_change_what_is_learnt_and_is_not_read_is_named(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(ChatError) as caught:
        read_conversation({"messages": [ASKED, SAID], **row})
    assert str(caught.value).startswith(problem)


def test_system_column_and_template_values_equal_those_of_transformers(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, "qwen2", "{{ mood }}" + CHATML)
    row = {"messages": [ASKED, SAID], "system": "be kind", "chat_template_kwargs": {"mood": "calm"}}
    found = read_conversation(row)
    said = [{"role": "system", "content": "be kind"}, ASKED, SAID]
    ids = theirs(folder).apply_chat_template(said, mood="calm", return_dict=False)
    assert tokens_of(folder, found).ids.tolist() == ids
    assert found.changes == ("the column 'system' read as the first message",)


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("key, value", [("weight", 0), ("train", False)])
def test_turns_of_weight_0_are_not_trained(tmp_path: Path, template: str, key: str, value: Any) -> None:
    folder = write_tokenizer(tmp_path, "qwen2", template)
    found = read_conversation({"messages": [TALK[0], {**TALK[1], key: value}, TALK[2], {**TALK[3], key: 1}]})
    assert text_of_answers(folder, tokens_of(folder, found)).strip() == "on the mat.<|im_end|>"
    assert found.changes == ("turns of weight 0 not trained",)


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_completion_alone_is_trained_as_in_trl(tmp_path: Path, template: str) -> None:
    """Labels of SFTTrainer's own preparation; the prompt has an answer too."""
    from datasets import Dataset
    from trl.trainer.sft_trainer import SFTTrainer

    folder = write_tokenizer(tmp_path, "qwen2", template)
    row = {"prompt": TALK[:3], "completion": TALK[3:]}
    off = dict.fromkeys(("dataset_num_proc", "max_length", "assistant_only_loss", "shuffle_dataset"))
    args = SimpleNamespace(dataset_text_field="text", **off)
    trainer: Any = SimpleNamespace(chat_template=None, completion_only_loss=True, _tokenizer=theirs(folder))
    (said,) = SFTTrainer._prepare_dataset(
        trainer, Dataset.from_list([row]), theirs(folder), args, False, None, "rows"
    )
    found = tokens_of(folder, read_conversation(row))
    assert found.ids.tolist() == said["input_ids"]
    assert found.is_answer.tolist() == [label != -100 for label in said["labels"]]


HEAD, TAIL = "<|im_start|>assistant\n", "<|im_end|>\n"
ANSWER = "{{ '<|im_start|>assistant\n' }}%s{{ m.content + '<|im_end|>\n' }}%s"
LOOP = (
    "{% for m in messages %}{% if m.role == 'assistant' %}ANSWER{% else %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
WAYS = {
    "needs a first message": "{{ messages[0].role[:0] }}"
    + LOOP
    + "{% if add_generation_prompt %}HEAD{% endif %}",
    "an end that follows": LOOP + "{% if add_generation_prompt %}HEAD{% else %}<|endoftext|>{% endif %}",
    "a thought in the prompt alone": LOOP + "{% if add_generation_prompt %}HEAD<t></t>{% endif %}",
    "another end of the last turn": LOOP.replace("ANSWER", "ANSWER{% if loop.last %}<|endoftext|>{% endif %}")
    + "{% if add_generation_prompt %}HEAD{% endif %}",
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("talk", [TALK, TALK[1:]], ids=["several turns", "assistant first"])
def test_answers_are_found_as_blocks_would_mark_them(tmp_path: Path, way: str, talk: list[Any]) -> None:
    """Of a template without blocks the mask that `transformers` returns for the same one with blocks."""
    talk = [{**m, "content": m["content"].replace("é漢", "")} for m in talk]
    source = WAYS[way].replace("HEAD", HEAD)
    plain = write_tokenizer(tmp_path / "a", "qwen2", source.replace("ANSWER", ANSWER % ("", "")))
    marks = ANSWER % ("{% generation %}", "{% endgeneration %}")
    marked = write_tokenizer(tmp_path / "b", "qwen2", source.replace("ANSWER", marks))
    said = theirs(marked).apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
    found = tokens_of(plain, Conversation(talk))
    assert found.ids.tolist() == said["input_ids"]
    mask = list(map(bool, said["assistant_masks"]))
    if found.ids[-1] == Tokenizer.load(plain).eod_id:  # after the last block, which is learnt too
        mask[-1] = found.is_answer[-1]
    assert found.is_answer.tolist() == mask


@pytest.mark.parametrize(
    "answer, problem",
    [
        ("", "leaves its text out"),
        ("{{ m.content }}{{ m.content }}", "leaves its text out, or writes it more than once"),
    ],
)
def test_template_in_which_an_answer_cannot_be_found_says_what_it_does(
    tmp_path: Path, answer: str, problem: str
) -> None:
    source = LOOP.replace("ANSWER", answer) + "{% if add_generation_prompt %}x{% endif %}"
    folder = write_tokenizer(tmp_path, "qwen2", source)
    (found,) = encode([Conversation(TALK)], *load(folder))
    assert f"message 2: {folder}/tokenizer_config.json: chat_template {problem}" in str(found)
