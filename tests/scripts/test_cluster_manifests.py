"""The Kubernetes and SkyPilot files of the cluster tutorial start a run that passes its check."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from tests.cli.doubles import Cli, make_cli
from tests.pages import ROOT, blocks

cli = pytest.fixture(make_cli)
PAGE = "scripts/docs/pages/tutorials/cluster.md"


def shown(name: str) -> dict[str, Any]:
    """The file that a block of the tutorial shows."""
    text = (ROOT / PAGE).read_text()
    (code,) = (block.code for block in blocks(text, PAGE) if block.code.startswith(f"# {name}\n"))
    loaded: dict[str, Any] = yaml.safe_load(code)
    return loaded


def commands(job: dict[str, Any], task: dict[str, Any]) -> list[list[str]]:
    """The command that both files run, without torchrun's name."""
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    line = re.sub(r'"\$\(.*?\)"', "10.0.0.1", task["run"].replace("\\\n", ""))
    line = re.sub(r'"\$SKYPILOT_NODE_RANK"', "0", line)
    return [[*container["command"], *container["args"]], shlex.split(re.sub(r'"\$\w+"', "8", line))]


def test_both_files_start_a_run_that_passes_its_check(cli: Cli, tmp_path: Path) -> None:
    job, task = shown("gpt2-355m.pytorchjob.yaml"), shown("gpt2-355m.sky.yaml")
    corpus = tmp_path / "shared/corpora/web"
    corpus.mkdir(parents=True)
    for name in ("train.bin", "train.idx"):
        (corpus / name).touch()
    for program, *words in commands(job, task):
        assert program == "torchrun"
        options = get_args_parser().parse_args(words)
        assert (options.module, options.training_script) == (True, "mlm")
        command, *settings = options.training_script_args
        settings = [word.replace("=/shared", f"={tmp_path}/shared") for word in settings]
        assert cli(f"{command} {shlex.join(settings)} --check=64") == 0, cli.err
        assert cli.out.startswith("would start ")
