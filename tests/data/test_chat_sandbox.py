"""Templates that would run for ever, take all memory or leave their sandbox: one line each, soon."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest

from mlm.data.chat_template import ChatError, ChatTemplate
from mlm.data.chat_tokens import encode
from mlm.data.conversation import Conversation
from mlm.data.tokenizer import Tokenizer
from mlm.util.errors import UserError
from tests.data.chats import TALK, write_tokenizer

DOUBLING = "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"


def problem_of(template: str) -> str:
    with pytest.raises(ChatError) as error:
        ChatTemplate(template, {}, "a.jinja").render(TALK)
    problem = str(error.value)
    assert problem.startswith("a.jinja fails (")
    assert "\n" not in problem
    return problem


@pytest.mark.parametrize(
    "template, reason",
    [
        ("{{ 'a' * 10 ** 10 }}", "it makes a value"),
        ("{{ 10 ** (10 ** 10) }}", "it makes a value"),
        ("{{ (messages | length) ** (10 ** 10) }}", "it makes a value"),
        ("{{ 3 ** 99999 * 3 ** 99999999 }}", "it makes a value"),
        (DOUBLING.replace("~", "+"), "it makes a value"),
        (DOUBLING, "it makes a text"),
        ("{{ '%2000000000d' % 1 }}", "it makes a value"),
        ("{{ '%*d' % (2000000000, 1) }}", "it makes a value"),
        ("{{ '{:2000000000}'.format(1) }}", "it makes a text"),
        ("{{ 'a'.ljust(10 ** 10) }}", "it makes a text"),
        ("{{ [0] * 10 ** 9 }}", "it makes a value"),
        ("{{ 'a' * 10 ** 7 }}", "it writes more than "),
        ("{% for a in range(99999) %}{{ 'a' * 999 }}{% endfor %}", "it writes more than "),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
    ],
)
def test_huge_values_are_not_made(template: str, reason: str) -> None:
    """A single operation is not interrupted by Ctrl-C, and a text may double until memory is full."""
    assert reason in problem_of(template)


def test_usual_operations_are_those_of_jinja() -> None:
    template = (
        "{{ 7 % 4 }}{{ 2 ** 9 }}{{ '-' * 3 }}{{ 'a' ~ 1 ~ none }}{{ [1] + [2] }}{{ '* %3d' % 7 }}"
        "{{ '{:>4} {0}'.format(1) if false else '{:>4}'.format(1) }}{{ 'a'.rjust(5) }}{{ 'x'.upper() }}"
    )
    assert ChatTemplate(template, {}).render(TALK).text == jinja2.Template(template).render()


def test_an_endless_loop_ends_by_ctrl_c() -> None:
    code = (
        "from mlm.data.chat_sandbox import render\n"
        "print('begins', flush=True)\n"
        "render('{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}', {})"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert b"KeyboardInterrupt" in process.communicate(timeout=60)[1]


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
        "{{ dict.mro() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update(role='x') }}",
        "{% include '/etc/hostname' %}",
        "{% import '/etc/hostname' as x %}",
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


def test_template_that_cannot_be_compiled_is_not_taken_for_the_next() -> None:
    assert "No filter named 'nonsense'" in problem_of("{{ messages | nonsense }}")
    assert ChatTemplate("a", {}).render(TALK).text == "a"


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
