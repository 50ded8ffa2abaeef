"""The training command of a Megatron-LM shell script, with its variables filled in. Nothing is run.

Substitutions that need a shell, such as $(…), stay as they are. All branches of a condition are read.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from mlm.util.errors import UserError
from mlm.util.files import read_bounded

TOKEN = re.compile(
    r"""(?P<skip>[ \t\r]+|\\\r?\n|\#[^\n]*)
    |(?P<end>\n|;+|&+|\|+|[<>]+&?\d*)
    |(?P<parenthesis>[()])
    |(?P<word>(?:'[^']*'|"(?:\\.|[^"\\])*"|\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)
        |`[^`]*`|\$\{(?:[^{}]|\{[^{}]*\})*\}|\\[^\n]|[^\s;&|()<>'"`\\])+)""",
    re.VERBOSE | re.DOTALL,
)
PIECE = re.compile(r"'([^']*)'|\"((?:\\.|[^\"\\])*)\"|\\(.)|([^'\"\\]+)", re.DOTALL)
VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(?::?[-=]((?:[^{}]|\{[^{}]*\})*))?\}|(\w+))")
ASSIGNED = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
HERE_DOCUMENT = re.compile(r"<<-?\s*(['\"]?)(\w+)\1([^\n]*)\n(.*?)^[ \t]*\2[ \t]*$", re.DOTALL | re.MULTILINE)
PROGRAM = re.compile(r"(?:^|/)(?:pre)?train\w*\.py$")
BEFORE_ASSIGNMENT = {"export", "local", "declare", "readonly", "then", "else", "do", "{"}
Variables = Mapping[str, list[str]]


def read_script(path: str) -> str:
    remedy = "give a shell script that calls pretrain_….py"
    try:
        return read_bounded(Path(path), 1 << 20, remedy).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text"
        raise UserError(f"--from-megatron {path}: {reason}; {remedy}") from None


def conditional_flags(script: str) -> list[str]:
    """The flags between an `if` or `case` and its end, without their values."""
    depth, flags = 0, dict[str, None]()
    for _, token in lex(script):
        depth += (token in ("if", "case")) - (token in ("fi", "esac"))
        words = split(token.strip("\"'")) if depth > 0 and "--" in token else []
        flags |= dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("--"))
    return list(flags)


def command_in(script: str) -> list[str]:
    """The training program and its arguments; of several calls the one with the most flags."""
    script = HERE_DOCUMENT.sub(lambda m: f"{m[3]}\n{m[4] if 'train' in m[4] else ''}\n", script)
    variables = {"PWD": ["."], "HOME": ["~"]}  # set by the shell
    commands: list[list[str]] = [[]]
    tokens = lex(script)
    for kind, token in tokens:
        assigned = ASSIGNED.fullmatch(token) if kind == "word" else None
        if assigned and set(commands[-1]) <= BEFORE_ASSIGNMENT:
            name, plus, value = assigned.groups()
            values = [value] if value else read_array(tokens, commands)
            filled = [word for text in values for word in expand(text, variables, splits=len(values) > 1)]
            variables[name] = variables.get(name, []) * bool(plus) + filled
        elif kind == "word":
            commands[-1] += expand(token, variables)
        else:
            commands.append([])
    groups = [*commands, *variables.values()]
    # a command may also be a string: CMD="torchrun pretrain_gpt.py …", bash -c "pretrain_gpt.py …"
    groups += [split(text) for words in groups for text in words if " " in text and ".py" in text]
    calls = [words[number:] for words in groups for number, word in enumerate(words) if PROGRAM.search(word)]
    every_word = [word for words in variables.values() for word in words]
    return max(calls or [every_word], key=lambda words: sum(word.startswith("--") for word in words))


def lex(script: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(script):
        match = TOKEN.match(script, position)
        if match is None:
            line = script.count("\n", 0, position) + 1
            raise UserError(f"--from-megatron: line {line} of the script has a quote without an end")
        position = match.end()
        kind = match.lastgroup
        assert kind is not None
        if kind != "skip":
            yield kind, match[0]


def read_array(tokens: Iterator[tuple[str, str]], commands: list[list[str]]) -> list[str]:
    """The words of an array after `NAME=`; empty if no parenthesis follows."""
    kind, token = next(tokens, ("end", ""))
    if token != "(":
        commands += [[token] if kind == "word" else []]
        return []
    words = []
    for kind, token in tokens:
        if token == ")":
            break
        words += [token] if kind == "word" else []
    return words


def expand(word: str, variables: Variables, *, splits: bool = True) -> list[str]:
    """Split a word as a shell does: quotes removed, variables filled in."""
    if (match := VARIABLE.fullmatch(word.strip('"'))) and word.strip('"') != "$":
        name = match[1] or match[3]
        if name in variables:
            is_text = len(variables[name]) == 1 and splits and not word.startswith('"')
            return split(variables[name][0]) if is_text else list(variables[name])
        if match[2] is not None:
            return split(fill(match[2], variables))
    text = "".join(
        single or escaped or fill(double.replace("\\\n", "") or plain, variables)
        for single, double, escaped, plain in PIECE.findall(word)
    )
    # Split a string of flags, as most scripts do later.
    return split(text) if splits and text.startswith("--") and " " in text else [text]


def fill(text: str, variables: Variables) -> str:
    """Fill in the variables of a text; unset ones take their defaults."""

    def value_of(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        if name in variables:
            return " ".join(variables[name])
        return match[0] if match[2] is None else fill(match[2], variables)

    return VARIABLE.sub(value_of, text)


def split(text: str) -> list[str]:
    """The words of a string, without balanced quotes."""
    with suppress(UserError):
        words = [word for kind, word in lex(text.replace("\n", " ")) if kind == "word"]
        return [expand(word, {}, splits=False)[0] for word in words]
    return text.split()
