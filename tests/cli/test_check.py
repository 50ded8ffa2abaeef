"""`--check`, `--cfg job`, cluster lines of the documentation, and what split sequences do not go with."""

import re
import shlex
from pathlib import Path

import pytest

from mlm.cli.compose.composition import load_config
from mlm.cli.verify import check_parity
from mlm.verify.config import ParityConfig
from tests.cli.doubles import Cli, make_cli
from tests.slow import thinned

cli = pytest.fixture(make_cli)
ON_GPUS = "pretrain model=gpt2_8b cluster=slurm data=synthetic"
ROOT = Path(__file__).parents[2] / "scripts"
PAGES = [
    ROOT / "docs/pages/tutorials/cluster.md",
    *(ROOT / "slurm" / name for name in ("README.md", "pretrain.sbatch")),
]
TEXT = "\n".join(page.read_text().replace(" \\\n#  ", "") for page in PAGES)
STARTS = r"^(?:#   )?(?:sbatch \S+|torchrun .* -m mlm pretrain|mlm pretrain) (.*cluster=slurm.*)$"
LINES = sorted({re.sub(r" --check$", "", line) for line in re.findall(STARTS, TEXT, re.MULTILINE)})


@pytest.mark.parametrize(
    "words, line",
    thinned(
        [
            ("tp=8 dp=64 --check", "would start 512 ranks: tp=8 × pp=1 × dp=64; needs 64 nodes of 8 GPUs"),
            ("tp=16 --check=64", "would start 64 ranks: tp=16 × pp=1 × dp=4; needs 64 GPUs"),
            (
                "tp=2 dist.device=cpu dist.backend=gloo --check",
                "would start 2 ranks: tp=2 × pp=1 × dp=1; dp takes what tp * pp leave: "
                "--check=N checks N GPUs",
            ),
        ],
        2,
    ),
)
def test_check_of_sound_settings_says_what_would_start(cli: Cli, words: str, line: str) -> None:
    assert cli(f"{ON_GPUS} {words}") == 0
    assert (cli.out, cli.err) == (f"{line}\n", "")
    assert cli.launched.configs == []


@pytest.mark.parametrize(
    "words, problems",
    [
        (
            "tp=8 pp=3 dp=22 --check",
            "train.global_batch_size=512 is not a multiple of dp=22 * train.micro_batch_size=8",
        ),
        ("tp=8 --check=0", "--check=0: must be a number of GPUs, such as --check=512"),
        ("data=indexed data.path=nowhere tp=8 dp=64 --check", "data.path=nowhere: no such folder"),
    ],
)
def test_check_reports_problems_and_no_missing_gpu(cli: Cli, words: str, problems: str) -> None:
    assert cli(f"{ON_GPUS} {words}") == 2
    assert cli.out == ""
    assert cli.err.startswith(f"mlm pretrain: {problems}")
    assert cli.err.count("\n") == 1


@pytest.mark.parametrize("words", ["data.path=/nowhere", "cluster=slurm tp=7"])
def test_cfg_job_prints_and_checks_nothing(cli: Cli, words: str) -> None:
    assert cli(f"pretrain {words} --cfg job") == 0
    assert (cli.err, cli.out[:5]) == ("", "name:")


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


TINY = ["model=gpt2_tiny", "data=synthetic", "cp=2"]


@pytest.mark.parametrize("words", ["finetune chat data=.", "eval rte"])
def test_commands_reject_what_they_cannot_split(cli: Cli, words: str) -> None:
    assert cli(f"{words} ckpt=. cp=2 dist.device=cpu") == 2
    assert "cp=2 splits the sequences of pretraining and `mlm eval loss` alone; use cp=1" in cli.err


def test_masks_that_a_gpu_draws_are_not_compared_with_masks_of_places() -> None:
    dropout = ["model.attention_dropout=0.1", "dist.device=cuda"]
    parity = load_config("parity", [*TINY, *dropout])
    assert isinstance(parity, ParityConfig)
    expected = "model.attention_dropout=0.1 on a GPU draws other masks at cp=2 than on one process"
    assert check_parity(parity, world_size=None, local_devices=8) == [
        f"{expected}; use model.attention_dropout=0"
    ]
