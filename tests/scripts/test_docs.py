"""The documentation site: its reference is complete, and pages of the repository become pages with links."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from links import GATHERED, OWN, ROOT, rewrite
from reference import command_uri, group_uri, pages

import mlm
from mlm.cli.command import Command
from mlm.cli.commands import COMMANDS
from mlm.config.tree import choices, leaves

GROUPS = sorted(path for path in (ROOT / "configs").iterdir() if path.is_dir())


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_reference_has_every_key_of_a_command(command: Command) -> None:
    page = pages()[command_uri(command)]
    rows = {row[1]: row[0] for row in re.finditer(r"^\| \[`([^`]+)`\].*$", page, re.MULTILINE)}
    known = leaves(command.spec)
    assert known.keys() <= rows.keys()
    for key, leaf in known.items():
        words = rows[key].replace("\\", "")
        assert leaf.doc.replace("`", "").replace("\\", "") in words.replace("`", ""), key
        assert all(f"`{choice}`" in words for choice in choices(leaf.type)), key


def test_the_reference_lists_every_command() -> None:
    listed = re.findall(r"\[`mlm ([^`]+)`\]", pages()["reference/index.md"])
    assert listed == [command.name for command in COMMANDS]


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_the_reference_shows_every_choice_of_a_group(group: Path) -> None:
    page = pages()[group_uri(group.name)]
    for choice in group.glob("*.yaml"):
        assert f"## {choice.stem}\n" in page
        assert choice.read_text().rstrip() in page


def test_every_guide_is_a_page_of_the_site() -> None:
    guides = [*ROOT.glob("mlm/**/README.md"), *ROOT.glob("scripts/**/*.md"), *ROOT.glob("*.md")]
    paths = [guide.relative_to(ROOT).as_posix() for guide in guides]
    assert not [path for path in paths if path not in GATHERED and not path.startswith(OWN)]


def test_links_are_rewritten_to_pages_paths_or_the_code_host() -> None:
    text = (
        "[data](pages/guides/data.md#input) [layers](../../mlm/parallel/layers.py) [one](one.py) [x.py](x.py)"
    )
    plain = rewrite(text, "scripts/docs/design.md")
    assert plain == (
        "[data](../guides/data.md#input) [layers](../api/layers.md) "
        "one (`scripts/docs/one.py`) `scripts/docs/x.py`"
    )
    hosted = rewrite(text, "scripts/docs/design.md", "https://host/mlm/")
    assert "[one](https://host/mlm/blob/main/scripts/docs/one.py)" in hosted


def targets(text: str) -> set[str]:
    """Targets of the Makefile that a text calls."""
    return {word for line in re.findall(r"make((?: [a-z-]+)+)", text) for word in line.split()}


def test_ci_and_contributors_run_the_same_targets() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"].values()
    steps = "\n".join(step.get("run", "") for job in jobs for step in job["steps"])
    local = "\n".join(re.findall("^make .*", (ROOT / ".ci/run").read_text(), re.MULTILINE))
    asked = re.findall("`(make lint test[a-z -]*)`", (ROOT / "CONTRIBUTING.md").read_text())[-1]
    shown = re.findall("`(make lint test[a-z -]*)`", (ROOT / "README.md").read_text())[-1]
    assert targets(steps) == targets(local) == targets(asked) == targets(shown)
    assert targets(shown) == {"lint", "test", "test-slow", "docs"}
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in targets(local))


def test_the_public_names_are_on_the_page_of_the_module() -> None:
    page = (ROOT / OWN / "api/mlm.md").read_text()
    shown = re.findall(r"^::: mlm\.(\w+)$", page, re.MULTILINE)
    assert sorted(shown) == sorted(mlm.__all__)


def test_the_version_is_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    changelog = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert mlm.__version__ == project["version"] == changelog[0] == citation["version"]
