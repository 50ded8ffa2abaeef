"""The command lines for a cluster in the documentation: complete, and without problems on GPUs."""

import re
import shlex
from pathlib import Path

import pytest

from tests.config.cli.doubles import Cli, make_cli

cli = pytest.fixture(make_cli)
ROOT = Path(__file__).parents[3] / "scripts"
PAGES = [
    *(ROOT / "docs/pages/tutorials" / name for name in ("cluster.md", "from-megatron.md")),
    *(ROOT / "slurm" / name for name in ("README.md", "pretrain.sbatch")),
]
TEXT = "\n".join(page.read_text().replace(" \\\n#  ", "") for page in PAGES)
STARTS = r"^(?:#   )?(?:sbatch \S+|torchrun .* -m mlm pretrain|mlm pretrain) (.*cluster=slurm.*)$"
LINES = sorted({re.sub(r" --check$", "", line) for line in re.findall(STARTS, TEXT, re.MULTILINE)})


def test_every_page_shows_a_line() -> None:
    starts = re.findall(r"^(?:#   )?sbatch scripts/slurm/pretrain.sbatch (.*)$", TEXT, re.MULTILINE)
    assert len(starts) == len(PAGES)
    assert set(starts) <= set(LINES)  # all complete


@pytest.mark.parametrize("line", LINES)
def test_line_passes_its_check(cli: Cli, tmp_path: Path, line: str) -> None:
    corpus = tmp_path / "shared/corpora/web"
    corpus.mkdir(parents=True)
    for name in ("train.bin", "train.idx"):
        (corpus / name).touch()
    words = [word.replace("=/shared", f"={tmp_path}/shared") for word in shlex.split(line)]
    if not any(word.startswith("--check") for word in words):
        words.append("--check" if any(word.startswith("dp=") for word in words) else "--check=64")
    assert cli(f"pretrain {shlex.join(words)}") == 0, cli.err
    assert cli.out.startswith("would start ")
