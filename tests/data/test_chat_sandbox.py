"""Templates that would run for ever, take all memory or leave their sandbox: one line each, soon."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from mlm.data import chat_template
from mlm.data.chat_renderer import STOPS, Renderer, RendererError, RenderError
from mlm.data.chat_template import ChatError, ChatTemplate
from mlm.data.conversation import encode
from mlm.data.tokenizer import Tokenizer
from mlm.util.errors import ConfigError, UserError
from tests.data.chats import TALK, write_tokenizer

SECONDS, MEMORY = 0.5, 400 << 20
COMPUTE = """
from mlm.data.chat_renderer import start
process = start(60.0, 1 << 30)
process.stdin.write('["{{ 1 }}", {}]\\n')
process.stdin.flush()
process.stdout.readline()
print(process.pid, flush=True)
loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
process.stdin.write(f'["{loops}", {{}}]\\n')
process.stdin.flush()
process.wait()
"""
DOUBLING = "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    found = Renderer(SECONDS, MEMORY)
    yield found
    found.close()


@pytest.fixture(autouse=True)
def short(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less time and memory than users have."""
    monkeypatch.setattr(chat_template, "renderer", lambda: renderer)


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
        "{{ 10 ** (10 ** 10) }}",
        "{{ (messages | length) ** (10 ** 10) }}",
    ],
    ids=["loops", "a constant", "one number"],
)
def test_endless_computation_ends(template: str) -> None:
    begun = time.process_time()
    assert f"(it computes for more than {SECONDS} s)" in problem_of(template)
    assert time.process_time() - begun < 1  # of this process: the other is ended by the kernel


@pytest.mark.parametrize(
    "template, reason",
    [
        ("{{ 'a' * 10 ** 10 }}", "it needs more memory"),
        (DOUBLING, "it needs more memory"),
        ("{{ '%2000000000d' % 1 }}", "it needs more memory"),
        ("{{ [0] * 10 ** 9 }}", "it needs more memory"),
        ("{{ 'a' * 10 ** 7 }}", "it writes 10,000,000 letters, "),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
    ],
    ids=["product", "doubling", "format", "list", "text", "recursion", "range"],
)
def test_huge_values_are_not_made(template: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patient = Renderer(60, MEMORY)  # a slow machine takes long to fill the memory
    monkeypatch.setattr(chat_template, "renderer", lambda: patient)
    try:
        assert reason in problem_of(template)
    finally:
        patient.close()


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
        "{{ dict.__call__.__func__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ namespace(_a=1) }}",
        "{{ namespace(**{'__class__': 1}) }}",
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


def test_next_text_is_rendered_after_one_that_ended_the_process() -> None:
    good = ChatTemplate("{{ messages[0].content }}", {})
    assert good.render(TALK).text == TALK[0]["content"]
    problem_of("{{ 10 ** (10 ** 10) }}")
    assert good.render(TALK).text == TALK[0]["content"]


@pytest.mark.parametrize("request_to_stop", STOPS, ids=lambda number: number.name)
def test_requests_to_stop_leave_the_process_to_its_command(
    renderer: Renderer, request_to_stop: signal.Signals
) -> None:
    """A command that is to stop after its next step may have texts to render before."""
    assert renderer.render("{{ x }}", {"x": "a"}) == "a"
    process = renderer._process
    assert process is not None
    process.send_signal(request_to_stop)
    assert renderer.render("{{ x }}", {"x": "b"}) == "b"
    assert renderer._process is process


def test_a_request_to_stop_may_come_before_the_process_runs(renderer: Renderer) -> None:
    process = renderer._running()
    process.send_signal(signal.SIGTERM)
    assert renderer.render("{{ x }}", {"x": "a"}) == "a"
    assert renderer._process is process


def test_a_kill_while_it_renders_is_said_and_blames_no_conversation(renderer: Renderer) -> None:
    assert renderer.render("{{ x }}", {"x": "a"}) == "a"
    process = renderer._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    Timer(0.1, process.kill).start()
    with pytest.raises(RendererError, match=r"was killed by SIGKILL.*dmesg.*again") as raised:
        ChatTemplate("{{ messages }}", {}).render(TALK)
    assert raised.value.exit_code == ConfigError(raised.value.problems).exit_code == 1


def test_an_idle_process_that_was_killed_is_started_again(renderer: Renderer) -> None:
    process = renderer._running()
    process.kill()
    process.wait()
    assert renderer.render("{{ x }}", {"x": "a"}) == "a"


def test_it_does_not_outlive_a_killed_command_while_it_computes() -> None:
    """Its standard input ends then, which it would read only afterwards."""
    owner = subprocess.Popen([sys.executable, "-c", COMPUTE], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.communicate()
    end = time.monotonic() + 5.0
    while running(pid) and time.monotonic() < end:
        time.sleep(0.01)
    assert not running(pid)


def running(pid: int) -> bool:
    """True for a process that is there and no zombie, which nobody may wait for here."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] not in "ZX"
    except OSError:
        return False


def test_template_that_cannot_be_compiled_is_not_taken_for_the_next() -> None:
    assert "No filter named 'nonsense'" in problem_of("{{ messages | nonsense }}")
    assert ChatTemplate("a", {}).render(TALK).text == "a"


def test_first_problem_ends_the_reading_of_conversations(tmp_path: Path) -> None:
    """So that a file takes no longer than one text may."""
    read: list[int] = []

    def conversations() -> Iterator[tuple[list[dict[str, Any]], None]]:
        for number in range(3):
            read.append(number)
            yield TALK, None  # type: ignore[misc]

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
    (problem,) = encode([(TALK, tools)], tokenizer, template)
    assert "nested too deeply" in str(problem)


def test_process_ends_with_its_renderer() -> None:
    renderer = Renderer()
    assert renderer.render("{{ a }}", {"a": "é\ud800"}) == "é\ud800"
    process = renderer._process
    assert process is not None
    renderer.close()
    assert process.returncode is not None


def test_text_after_an_error_is_of_its_own_template() -> None:
    """The process has compiled the template that failed; the one before must be sent to it again."""
    good = ChatTemplate("{{ messages[0].content }}", {})
    assert good.render(TALK).text == TALK[0]["content"]
    assert "no such talk" in problem_of(
        "b{% if messages | length > 1 %}{{ raise_exception('no such talk') }}{% endif %}"
    )
    assert good.render(TALK).text == good.render(TALK).text == TALK[0]["content"]


def test_a_long_template_may_write_itself_each_time(renderer: Renderer) -> None:
    """Of the second text the process receives the values alone."""
    for _ in range(2):
        assert renderer.render("a" * 5000, {}) == "a" * 5000


@pytest.mark.parametrize(
    ("signal_", "kind"),
    [(signal.SIGKILL, RendererError), (signal.SIGQUIT, RendererError), (signal.SIGSEGV, RenderError)],
    ids=lambda value: getattr(value, "name", None),
)
def test_an_end_that_no_template_causes_blames_none(signal_: signal.Signals, kind: type[Exception]) -> None:
    found = Renderer()
    found._process = subprocess.Popen([sys.executable, "-c", f"import os; os.kill(os.getpid(), {signal_:d})"])
    assert type(found._ended()) is kind


def test_a_fork_renders_in_a_process_of_its_own_and_ends_no_other() -> None:
    """Known by its number, which is another than that of what started the process."""
    found = Renderer()
    process = found._running()
    found._owner += 1  # as a fork finds it
    found.close()
    assert process.poll() is None
    found._process, found._source = process, "{{ x }}"
    assert found.render("{{ x }}", {"x": "b"}) == "b"
    assert found._process is not process
    found.close()
    process.kill()
    process.communicate()


class Interrupted:
    """An output of which the first read ends by Ctrl-C."""

    def __init__(self, output: Any) -> None:
        self.output, self.is_new = output, True

    def readline(self) -> str:
        if self.is_new:
            self.is_new = False
            raise KeyboardInterrupt
        line: str = self.output.readline()
        return line

    def __getattr__(self, name: str) -> Any:
        return getattr(self.output, name)


def test_text_after_an_interrupted_one_is_its_own() -> None:
    """The answer that nobody waited for is no answer to the next request."""
    found = Renderer()
    process = found._running()
    process.stdout = Interrupted(process.stdout)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        found.render("{{ x }}", {"x": "a"})
    assert found.render("{{ x }}", {"x": "b"}) == "b"
    found.close()
