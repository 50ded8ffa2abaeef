"""Templates that would run for ever or leave their sandbox: one line each, soon."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlm.data import chat_template
from mlm.data.chat_template import ChatError, ChatTemplate
from mlm.data.chat_tokens import encode
from mlm.data.conversation import Conversation
from mlm.data.tokenizer import Tokenizer
from mlm.util.errors import UserError
from tests.data.chats import TALK, write_tokenizer

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def problem_of(template: str) -> str:
    with pytest.raises(ChatError) as error:
        ChatTemplate(template, {}, "a.jinja").render(TALK)
    problem = str(error.value)
    assert problem.startswith("a.jinja fails (")
    assert "\n" not in problem
    return problem


@pytest.mark.parametrize(
    "template", [ENDLESS, "{{ (messages | length) ** (10 ** 10) }}", "{{ 10 ** (10 ** 10) }}"]
)
def test_rendering_ends_at_its_time_limit(monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    monkeypatch.setattr(chat_template, "TIME_LIMIT_S", 0.2)
    assert "it takes more than 0.2 s" in problem_of(template)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
        ("{{ messages | nonsense }}", "No filter named 'nonsense'"),
    ],
)
def test_failing_template_is_one_line(template: str, reason: str) -> None:
    assert reason in problem_of(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ '{a.__class__.__mro__}'.format_map({'a': 1}) }}",
        "{{ lipsum.__globals__['os'] }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__code__.co_code }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update(role='x') }}",
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


def test_first_problem_ends_the_reading_of_conversations(tmp_path: Path) -> None:
    """So that a file takes no longer than one text may."""
    read: list[int] = []

    def conversations() -> Iterator[Conversation]:
        for number in range(3):
            read.append(number)
            yield Conversation(TALK)

    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, "qwen2"))
    template = ChatTemplate("{{ raise_exception('no') }}", {})
    assert isinstance(next(encode(conversations(), tokenizer, template)), ChatError)
    assert read == [0]


def test_tools_nested_too_deeply_are_an_error(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, "qwen2"))
    template = ChatTemplate("{{ tools | tojson }}", {})
    tools: Any = []
    for _ in range(900):
        tools = [tools]
    (problem,) = encode([Conversation(TALK, tools)], tokenizer, template)
    assert "nested too deeply" in str(problem)


def test_text_after_an_error_is_of_its_own_template() -> None:
    good = ChatTemplate("{{ messages[0].content }}", {})
    assert good.render(TALK).text == TALK[0]["content"]
    assert "no such talk" in problem_of(
        "b{% if messages | length > 1 %}{{ raise_exception('no such talk') }}{% endif %}"
    )
    assert good.render(TALK).text == good.render(TALK).text == TALK[0]["content"]
