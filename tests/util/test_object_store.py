"""Objects of a store, read from a real server that fails as networks and stores do."""

from collections.abc import Iterator

import pytest

from mlm.config.fields import Role, path_problem
from mlm.util import object_store
from mlm.util.errors import UserError
from mlm.util.object_store import (
    StoredObject,
    list_objects,
    open_object,
    open_store,
    read_ranges,
    split_step,
    write_object,
)
from tests.slow import slow
from tests.stores import BUCKET, KEY, SECRET, Store, serve

CONTENT = bytes(range(256)) * 40


@pytest.fixture(scope="module")
def server() -> Iterator[Store]:
    with serve() as store:
        open_store(BUCKET).pipe_file(f"{BUCKET}/a/numbers", CONTENT)
        yield store


@pytest.fixture
def numbers(store: Store) -> StoredObject:
    (found,) = list_objects(f"{BUCKET}/a")
    return found


def test_ranges_are_those_of_the_object(numbers: StoredObject) -> None:
    assert numbers.bytes == len(CONTENT)
    assert read_ranges(numbers, [0, 700, 10_200], 100) == [CONTENT[:100], CONTENT[700:800], CONTENT[10_200:]]
    with open_object(numbers.url) as f:
        assert (f.seek(-6, 2), f.read(), f.seek(3), f.read(4)) == (10_234, CONTENT[-6:], 3, CONTENT[3:7])


@pytest.mark.parametrize("error", ["truncate", slow(b"503 SlowDown")])
def test_a_request_that_fails_twice_is_repeated(
    numbers: StoredObject, store: Store, error: bytes | str
) -> None:
    store.fail = lambda number: error if number < 2 else None
    assert read_ranges(numbers, [5], 1000) == [CONTENT[5:1005]]
    assert store.gets == 3


def test_an_object_that_was_truncated_is_written_again_until_it_is_an_error(store: Store) -> None:
    puts = list[str]()
    store.put = lambda path: puts.append(path) or ("truncate" if len(puts) < 3 else None)
    write_object(f"{BUCKET}/list", CONTENT)
    assert open_store(BUCKET).cat_file(f"{BUCKET}/list") == CONTENT
    assert len(puts) == 3
    store.put = lambda path: "truncate"
    with pytest.raises(UserError, match=f"{BUCKET}/list: truncated in each of 3 uploads"):
        write_object(f"{BUCKET}/list", CONTENT)


def test_a_step_is_split_from_the_url_of_a_mirror() -> None:
    assert split_step(f"{BUCKET}/a@4") == (f"{BUCKET}/a", 4)
    for url in (f"{BUCKET}/a@4/", f"{BUCKET}/a@b", "runs/a@4"):
        assert split_step(url) == (url, None)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        slow((b"500 InternalError", "not readable after several attempts (InternalError); check the")),
        (b"403 InvalidAccessKeyId", "access denied (InvalidAccessKeyId); give credentials"),
        (b"404 NoSuchKey", "no such object; correct the URL"),
    ],
)
def test_an_error_that_stays_is_one_line_without_what_the_store_said(
    numbers: StoredObject, store: Store, error: bytes, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "ATTEMPTS", 2)
    store.fail = lambda number: error
    with pytest.raises(UserError) as raised:
        read_ranges(numbers, [0], 10)
    assert str(raised.value).startswith(f"{numbers.url}: {line}")
    assert "\n" not in str(raised.value)
    assert KEY not in str(raised.value) + repr(raised.value.__cause__)
    assert SECRET not in str(raised.value)


def test_an_object_that_changed_is_not_mixed_with_what_it_was(store: Store) -> None:
    url = f"{BUCKET}/changing"
    open_store(url).pipe_file(url, b"before")
    (before,) = list_objects(url)
    open_store(url).pipe_file(url, b"after!")
    with pytest.raises(UserError, match="changed while it was read"):
        read_ranges(before, [0], 6)


def test_credentials_in_a_url_are_rejected_and_not_repeated() -> None:
    problem = path_problem("data.path", f"s3://{KEY}:{SECRET}@bucket/corpus", Role.STORED)
    assert problem is not None
    assert problem.startswith("data.path: the URL holds credentials")
    assert KEY not in problem
    assert SECRET not in problem
    assert path_problem("data.path", "s3://bucket/corpus", Role.STORED) is None
