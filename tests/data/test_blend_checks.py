"""data.blend: entries, names, and every problem with its remedy."""

from pathlib import Path

import pytest

from mlm.cli.compose.composition import load_config
from mlm.data.blend_checks import corpus_names, parse_entry
from mlm.runs.checks import check_pretrain


@pytest.fixture(autouse=True)
def corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders a, b, c with the files of a corpus, and a pair x.bin/.idx; the working folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("a/train", "b/train", "c/train", "half/train", "x"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(f"{name}.bin").touch()
        Path(f"{name}.idx").touch()
    Path("half/train.bin").unlink()
    Path("link").symlink_to("a")
    return tmp_path


def problems(blend: str, *overrides: str) -> list[str]:
    config = load_config("pretrain", ["model=gpt2_tiny", f"data.blend={blend}", *overrides])
    return check_pretrain(config, world_size=None, local_devices=None)


@pytest.mark.parametrize("blend", ["[0.3 a,0.7 b]", "[1e-3 ./a,7 x]"])
def test_a_sound_blend_has_no_problem(blend: str) -> None:
    assert problems(blend) == []


@pytest.mark.parametrize(
    "blend, said",
    [
        ("[0.3 nowhere,0.7 b]", "'0.3 nowhere': no folder nowhere, no pair nowhere.bin/.idx; write one"),
        ("[1 x.bin,1 b]", "'1 x.bin': give the prefix of .bin and .idx, which is x"),
        ("[-1 a,1 b]", "'-1 a' has the weight -1, which must be above 0 and finite; write data.blend="),
        ("[inf a,1 b]", "'inf a' has the weight inf, which must be above 0"),
        ("['0.5',1 b]", "'0.5' names no corpus; write data.blend=[0.3 corpora/wiki,0.7 corpora/web]"),
        ("[1 a,2 ./a]", "'1 a' and '2 ./a' are the same corpus; name it once, with the sum of the weights"),
        ("[1 a,2 a/train]", "'1 a' and '2 a/train' are the same corpus"),
    ],
)
def test_a_problem_names_entry_and_remedy(blend: str, said: str) -> None:
    (problem,) = problems(blend)
    assert problem.startswith("data.blend: ")
    assert said in problem
    assert "\n" not in problem


@pytest.mark.parametrize("key", ["data.path", "data.train"])
def test_a_blend_and_a_corpus_are_too_much(key: str) -> None:
    (problem,) = problems("[1 a,1 b]", f"{key}=a")
    assert problem.startswith(f"data.blend and {key}=a both name what to train on; leave one")


@pytest.mark.parametrize(
    "text, weight, path",
    [("0.3 a/b", 0.3, "a/b"), ("1e-3   a", 1e-3, "a"), ("my corpora/b", None, "my corpora/b")],
)
def test_an_entry_is_a_weight_and_a_path(text: str, weight: float | None, path: str) -> None:
    found = parse_entry(text)
    assert (found.weight, found.path) == (weight, path)


@pytest.mark.parametrize(
    "prefixes, expected",
    [
        (["corpora/wiki/train", "corpora/web/train"], ["wiki", "web"]),
        (["one/wiki/train", "two/wiki/train"], ["one-wiki", "two-wiki"]),
        (["wiki_text_document", "a b/train"], ["wiki_text_document", "a_b"]),
        (["c/loss/train", "c/web/train"], ["c-loss", "c-web"]),  # validation/loss is that of the blend
        (["/a b/train", "/a_b/train"], ["a_b-0", "a_b-1"]),
    ],
)
def test_names_are_those_of_the_folders_and_differ(prefixes: list[str], expected: list[str]) -> None:
    assert corpus_names([Path(prefix) for prefix in prefixes]) == expected
