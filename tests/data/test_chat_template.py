"""Conversations as tokens, equal to those of `transformers`; templates that would never end or break out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlm.data import chat_template
from mlm.data.chat_files import find_templates, read_template
from mlm.data.chat_template import ChatError, ChatTemplate, with_reasoning
from mlm.data.chat_tokens import Tokens, encode, end_of_turn_tokens
from mlm.data.chat_tokens import encode_prompt as encode_conversation
from mlm.data.conversation import Conversation, check_messages
from mlm.data.tokenizer import Tokenizer
from mlm.util.errors import CorruptFileError, UserError
from tests.data import chats
from tests.data.chats import (
    CHATML,
    MARKED,
    SPECIAL,
    TALK,
    TEMPLATES,
    load,
    text_of_answers,
    theirs,
    write_tokenizer,
)

STYLES = tuple(TEMPLATES)


def encode_prompt(messages: Any, *loaded: Any) -> list[int]:
    return encode_conversation(Conversation(messages), *loaded)


def tokens_of(folder: Path, messages: Any, name: str | None = None, **options: Any) -> Tokens:
    return chats.tokens_of(folder, Conversation(messages), name, **options)


@pytest.mark.parametrize("style", STYLES)
def test_conversation_and_prompt_equal_those_of_transformers(tmp_path: Path, style: str) -> None:
    folder = write_tokenizer(tmp_path, style)
    said = theirs(folder).apply_chat_template(TALK, return_dict=False)
    assert tokens_of(folder, TALK).ids.tolist() == said
    said = theirs(folder).apply_chat_template(TALK[:3], add_generation_prompt=True, return_dict=False)
    assert encode_prompt(TALK[:3], *load(folder)) == said


def test_marked_answers_equal_the_mask_of_transformers(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, "qwen2", MARKED)
    ascii_talk = [{**m, "content": m["content"].replace("é漢", " ")} for m in TALK]
    said = theirs(folder).apply_chat_template(ascii_talk, return_dict=True, return_assistant_tokens_mask=True)
    found = tokens_of(folder, ascii_talk)
    assert found.ids.tolist() == said["input_ids"]
    assert found.is_answer.tolist() == list(map(bool, said["assistant_masks"]))


OUTSIDE = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|eot_id|>"
    "{% endfor %}"
)


@pytest.mark.parametrize("end", ["", "   ", " \n "])
@pytest.mark.parametrize("start", ["", "\n"])
def test_spaces_at_the_ends_of_an_answer_belong_to_it(tmp_path: Path, start: str, end: str) -> None:
    """Also where the tokenizer leaves them out of its tokens' letters, and the end of the turn is outside."""
    folder = write_tokenizer(tmp_path, "llama3", OUTSIDE)
    talk = [TALK[0], {"role": "assistant", "content": f"{start}on the mat.{end}"}]
    said = theirs(folder).apply_chat_template(talk, return_dict=True)["input_ids"]
    found = tokens_of(folder, talk)
    assert found.ids.tolist() == said
    assert text_of_answers(folder, found) == talk[1]["content"]


def test_half_a_surrogate_pair_is_an_error_of_one_line(tmp_path: Path) -> None:
    """A template can write one, and its file in JSON can hold one."""
    folder = write_tokenizer(tmp_path / "a", "qwen2", "{{ '\\ud800' }}" + CHATML)
    (problem,) = encode([Conversation(TALK)], *load(folder))
    assert isinstance(problem, ChatError)
    assert "chat_template writes half a surrogate pair (U+D800): correct the conversation, or" in str(problem)
    folder = write_tokenizer(tmp_path / "b", "qwen2", CHATML + "{# \udfff #}")
    with pytest.raises(UserError, match=r"chat_template: holds half a surrogate pair \(U\+DFFF\): correct"):
        load(folder)


FORMS: dict[str, Callable[[dict[str, str]], dict[str, Any]]] = {
    "ShareGPT": lambda m: {"from": "human" if m["role"] == "user" else "gpt", "value": m["content"]},
    "parts": lambda m: m | {"content": [{"type": "text", "text": t} for t in m["content"].partition(" ")]},
    "table": lambda m: {**m, "tool_calls": None, "from": None},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_other_forms_of_messages_are_the_equal_conversation(tmp_path: Path, form: str, template: str) -> None:
    """Ids, and the mask of answers where the template marks them, of `transformers` on role and content."""
    folder = write_tokenizer(tmp_path, "qwen2", template)
    talk = [{**m, "content": m["content"].replace("é漢", "")} for m in TALK]
    found = tokens_of(folder, check_messages(list(map(FORMS[form], talk))))
    said = theirs(folder).apply_chat_template(
        talk, return_dict=True, return_assistant_tokens_mask=template == MARKED
    )
    assert found.ids.tolist() == said["input_ids"]
    if template == MARKED:
        assert found.is_answer.tolist() == list(map(bool, said["assistant_masks"]))


def test_built_in_chatml_equals_that_of_transformers(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "a", "qwen2", None)
    tokenizer, template = load(folder, "chatml")
    assert template.note == ""
    found = tokens_of(folder, TALK, "chatml")
    other = theirs(write_tokenizer(tmp_path / "b", "qwen2", CHATML))
    assert found.ids.tolist() == other.apply_chat_template(TALK, return_dict=False)
    assert encode_prompt(TALK[:3], tokenizer, template) == other.apply_chat_template(
        TALK[:3], add_generation_prompt=True, return_dict=False
    )
    assert text_of_answers(folder, found) == "".join(m["content"] + "<|im_end|>" for m in TALK[1::2])


@pytest.mark.parametrize("style", ["llama3", "llama2"])
def test_built_in_chatml_ends_turns_with_a_token_that_the_vocabulary_has(tmp_path: Path, style: str) -> None:
    """One token, learnt with the answer, at which generation ends; what is saved says so to others."""
    folder = write_tokenizer(tmp_path / "a", style, None)
    tokenizer, template = load(folder, "chatml")
    end = tokenizer.name_of(tokenizer.eod_id)
    assert template.note == (
        f"chat template chatml: a turn ends with {end}, as the vocabulary has no <|im_end|>, and "
        "<|im_start|> is text of several tokens"
    )
    found = tokens_of(folder, TALK, "chatml")
    ends = found.ids == tokenizer.eod_id
    assert ends.sum() == len(TALK)
    assert (ends & found.is_answer).sum() == 2
    assert end_of_turn_tokens(template, tokenizer) == {tokenizer.eod_id}
    tokenizer.chat_template = template
    tokenizer.save(folder)
    assert theirs(folder).apply_chat_template(TALK, return_dict=False) == found.ids.tolist()


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_last_answer_alone(tmp_path: Path, template: str) -> None:
    folder = write_tokenizer(tmp_path, "qwen2", template)
    found = tokens_of(folder, TALK, answers="last")
    assert text_of_answers(folder, found).strip() == "on the mat.<|im_end|>"


@pytest.mark.parametrize("style", STYLES)
def test_special_tokens_that_a_message_spells_out_are_text(tmp_path: Path, style: str) -> None:
    folder = write_tokenizer(tmp_path, style)
    names = "".join(SPECIAL[style])
    spelt = [{"role": "user", "content": f"say {names} now"}, TALK[1]]
    plain = tokens_of(folder, [{"role": "user", "content": "say now"}, TALK[1]])
    found, tokenizer = tokens_of(folder, spelt), Tokenizer.load(folder)
    counts = [[ids.tolist().count(id) for id in tokenizer.special_ids] for ids in (plain.ids, found.ids)]
    assert counts[0] == counts[1]
    assert names in tokenizer.decode(found.ids.tolist())
    assert tokenizer.decode(found.ids[found.is_answer]) == tokenizer.decode(plain.ids[plain.is_answer])


def test_tools_and_loop_controls_reach_the_template(tmp_path: Path) -> None:
    first = "{% for m in messages %}{% if loop.index0 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
    folder = write_tokenizer(tmp_path, "qwen2", "{{ tools | tojson }}" + first)
    tools = [{"name": "é<f>"}]
    said = theirs(folder).apply_chat_template(TALK, tools=tools, tokenize=False)
    assert load(folder)[1].render(TALK, tools).text == said == '[{"name": "é<f>"}]' + TALK[0]["content"]


LAST = CHATML.replace(
    "message['content'] +", "('<t>' if loop.last and loop.index0 % 2 else '') + message['content'] +"
)
"""As Qwen 3 leaves out the thoughts of earlier turns."""


@pytest.mark.parametrize("name, thoughts", [(None, 1), ("turns", 2)])
def test_answers_that_later_messages_change_are_found_or_kept(
    tmp_path: Path, name: str | None, thoughts: int
) -> None:
    """Where the template writes them; with the name `turns` as they were when nothing followed them."""
    folder = write_tokenizer(tmp_path, "qwen2", LAST)
    found = tokens_of(folder, TALK, name)
    first, last = (message["content"] + "<|im_end|>\n" for message in TALK[1::2])
    assert text_of_answers(folder, found) == ("<t>" if thoughts == 2 else "") + first + "<t>" + last
    assert Tokenizer.load(folder).decode(found.ids.tolist()).count("<t>") == thoughts


def test_reasoning_is_under_each_name_that_templates_read() -> None:
    """Under both where a message has it under any; what it has under these already stays."""
    message = {"role": "assistant", "content": "c"}
    for name in ("reasoning_content", "thinking", "reasoning"):
        found = with_reasoning({**message, name: "r"})
        assert (found["reasoning_content"], found["thinking"]) == ("r", "r")
    assert with_reasoning({**message, "thinking": None}) == {**message, "thinking": None}
    both = with_reasoning({**message, "reasoning_content": "r", "thinking": "t"})
    assert (both["reasoning_content"], both["thinking"]) == ("r", "t")


@pytest.mark.parametrize(
    ("value", "sources"),
    [
        ("a", {"default": "a"}),
        ({"default": "d", "../up": "r"}, {"default": "d"}),
        (None, {}),
    ],
)
def test_templates_of_a_folder_have_names(tmp_path: Path, value: Any, sources: dict[str, str]) -> None:
    folder = write_tokenizer(tmp_path, "qwen2", None, chat_template=value)
    assert {name: source for name, (source, _) in find_templates(folder).items()} == sources


def test_template_of_more_than_a_mebibyte_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.jinja").write_text("a" * (1 << 20))
    assert len(read_template(tmp_path / "a.jinja")) == (1 << 20)
    (tmp_path / "a.jinja").write_text("a" * ((1 << 20) + 1))
    with pytest.raises(CorruptFileError, match="1048577 bytes, 1048576 is the limit"):
        read_template(tmp_path / "a.jinja")


def problem_of(template: str) -> str:
    with pytest.raises(ChatError) as error:
        ChatTemplate(template, {}, "a.jinja").render(TALK)
    problem = str(error.value)
    assert problem.startswith("a.jinja fails (")
    assert "\n" not in problem
    return problem


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ (messages | length) ** (10 ** 10) }}",
        "{{ 10 ** (10 ** 10) }}",
    ],
)
def test_rendering_ends_at_its_time_limit(monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    monkeypatch.setattr(chat_template, "TIME_LIMIT_S", 0.2)
    assert "it takes more than 0.2 s" in problem_of(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ '{a.__class__.__mro__}'.format_map({'a': 1}) }}",
        "{{ lipsum.__globals__['os'] }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.clear() }}",
        "{% include '/etc/hostname' %}",
        "{% set messages.role = 'x' %}",
    ],
)
def test_template_cannot_leave_its_sandbox(template: str) -> None:
    problem_of(template)


@pytest.mark.parametrize(
    "source",
    ["{{ " + "(" * 9999 + ")" * 9999 + " }}", "{% if 1 %}" * 9999, f"{{{{ {'1' * 9999} }}}}"],
    ids=["brackets", "blocks", "a number"],
)
def test_source_that_no_parser_survives_is_an_error(source: str) -> None:
    with pytest.raises(UserError, match=r"^a\.jinja.*: no Jinja \(.*\): correct the template$"):
        ChatTemplate(source, {}, "a.jinja")
