"""The documentation site: its reference is complete, and pages of the repository become pages with links."""

import re
from pathlib import Path

import pytest
import yaml
from links import GATHERED, OWN, ROOT, rewrite
from reference import PAGES, command_uri, group_uri

from mlm.cli.commands import COMMANDS, Command
from mlm.config.tree import choices, leaves

GROUPS = sorted(path for path in (ROOT / "configs").iterdir() if path.is_dir())
CI = ROOT / ".github/workflows/ci.yml"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_reference_has_every_key_of_a_command(command: Command) -> None:
    page = PAGES[command_uri(command)]
    rows = {row[1]: row[0] for row in re.finditer(r"^\| \[`([^`]+)`\].*$", page, re.MULTILINE)}
    known = leaves(command.spec)
    assert known.keys() <= rows.keys()
    for key, leaf in known.items():
        words = rows[key].replace("\\", "")
        assert leaf.doc.replace("`", "").replace("\\", "") in words.replace("`", ""), key
        assert all(f"`{choice}`" in words for choice in choices(leaf.type)), key


def test_the_reference_lists_every_command() -> None:
    listed = re.findall(r"\[`mlm ([^`]+)`\]", PAGES["reference/index.md"])
    assert listed == [command.name for command in COMMANDS]


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_the_reference_shows_every_choice_of_a_group(group: Path) -> None:
    page = PAGES[group_uri(group.name)]
    for choice in group.glob("*.yaml"):
        assert f"## {choice.stem}\n" in page
        assert choice.read_text().rstrip() in page


def test_every_guide_is_a_page_of_the_site() -> None:
    guides = [*ROOT.glob("mlm/**/README.md"), *ROOT.glob("scripts/**/*.md"), *ROOT.glob("*.md")]
    paths = [guide.relative_to(ROOT).as_posix() for guide in guides]
    assert not [path for path in paths if path not in GATHERED and not path.startswith(OWN)]


def test_links_are_rewritten_to_pages_paths_or_the_code_host() -> None:
    text = (
        "[data](../corpus/README.md#input) [layers](../../mlm/parallel/layers.py) [one](loop.py) [x.py](x.py)"
    )
    plain = rewrite(text, "mlm/finetune/README.md")
    assert plain == (
        "[data](data.md#input) [layers](../api/layers.md) one (`mlm/finetune/loop.py`) `mlm/finetune/x.py`"
    )
    hosted = rewrite(text, "mlm/finetune/README.md", "https://host/mlm/")
    assert "[one](https://host/mlm/blob/main/mlm/finetune/loop.py)" in hosted


def test_code_blocks_keep_what_looks_like_a_link() -> None:
    assert rewrite("```\n[a](b.py)\n```", "README.md") == "```\n[a](b.py)\n```"


def test_ci_runs_lint_tests_and_docs_of_the_makefile() -> None:
    steps = [
        step.get("run", "")
        for job in yaml.safe_load(CI.read_text())["jobs"].values()
        for step in job["steps"]
    ]
    targets = set(re.findall(r"make ([a-z-]+)", "\n".join(steps)))
    assert targets == {"lint", "test", "docs"}
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in targets)
