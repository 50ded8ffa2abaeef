"""Problems as values: one line, its parts, and the errors that carry them."""

import errno
import pickle
from collections.abc import Sequence

import pytest

from mlm.util.errors import ConfigError, CorruptFileError, Problem, UserError, writing_to

SPLIT = Problem(("tp", "model.num_heads"), "tp=7 does not divide model.num_heads=32", "use tp=8")


def test_problem_concerns_its_keys_and_their_sections() -> None:
    names = ("tp", "model.num_heads", "model", "model.num", "http")
    assert [name for name in names if SPLIT.concerns([name])] == ["tp", "model.num_heads", "model"]


@pytest.mark.parametrize(
    "error",
    [UserError("is wrong", keys=("tp",), fix="use tp=1"), UserError("plain"), ConfigError([SPLIT, "plain"])],
)
def test_error_keeps_its_problems_between_processes(error: UserError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert [(p, p.keys, p.problem, p.fix) for p in copy.problems] == [
        (p, p.keys, p.problem, p.fix) for p in error.problems
    ]


def test_every_problem_is_one_short_printed_line_without_control_characters() -> None:
    long = Problem.at("tp", "9" * 5000, "is too many", "use tp=1")
    error = ConfigError([Problem.at("prompt", "a\nb\x1b[2J", "is wrong"), long])
    shortened = f"tp={'9' * 97}…{'9' * 19}: is too many; use tp=1"
    assert error.lines() == ["prompt=a\\nb\\x1b[2J: is wrong", shortened]


@pytest.mark.parametrize(
    ("problems", "code"),
    [
        (CorruptFileError("torn").problems, 1),
        ([*CorruptFileError("torn").problems, SPLIT], 2),  # the user has something else to correct, too
        ([SPLIT], 2),
    ],
)
def test_problems_that_are_all_damage_have_its_exit_code(problems: Sequence[Problem], code: int) -> None:
    assert ConfigError(problems).exit_code == code
    assert pickle.loads(pickle.dumps(ConfigError(problems))).exit_code == code


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left"), "No space left; free space, or choose another disk"),
        (OSError(errno.EDQUOT, "Quota", "a/b"), "Quota (a/b); free space, or choose another disk"),
        (OSError(errno.EROFS, "Read-only", "a/b"), "Read-only (a/b); choose a folder that can be written to"),
    ],
)
def test_an_error_of_the_disk_names_the_file_if_it_has_one(error: OSError, message: str) -> None:
    with pytest.raises(UserError) as caught, writing_to("a"):
        raise error
    assert str(caught.value) == f"out=a: {message}"
