"""The Kubernetes and SkyPilot files of the cluster tutorial have the fields of their published schemas.

PYTORCH_JOB: kubeflow/training-operator, manifests/base/crds/kubeflow.org_pytorchjobs.yaml, and the checks of
its webhook (pytorchjob_webhook.go). SKY: skypilot-org/skypilot, sky/utils/schemas.py, get_task_schema and
get_resources_schema. Here are names, types and requirements of the fields that our files use, and of their
neighbours, so that a misspelt one shows.
"""

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


class Closed(dict[str, Any]):
    """Fields of an object that may have no others; those that end with ! are required."""


class Open(dict[str, Any]):
    """The same, but others are allowed."""


POD = Open(
    {
        "containers!": [
            Open(
                {
                    "name!": str,
                    "image": str,
                    "command": [str],
                    "args": [str],
                    "env": [Open({"name!": str, "value": str})],
                    "resources": Closed({"limits": dict, "requests": dict}),
                    "volumeMounts": [Open({"name!": str, "mountPath!": str})],
                }
            )
        ],
        "terminationGracePeriodSeconds": int,
        "volumes": [
            Open({"name!": str, "emptyDir": dict, "persistentVolumeClaim": Open({"claimName!": str})})
        ],
    }
)
REPLICA = Closed({"replicas": int, "restartPolicy": str, "template": Closed({"metadata": dict, "spec": POD})})
PYTORCH_JOB = Closed(
    {
        "apiVersion!": str,
        "kind!": str,
        "metadata!": Open({"name!": str}),
        "spec!": Closed(
            {
                "nprocPerNode": str,
                "elasticPolicy": Closed(
                    {
                        **dict.fromkeys(("minReplicas", "maxReplicas", "maxRestarts", "rdzvPort"), int),
                        **dict.fromkeys(("rdzvBackend", "rdzvHost", "rdzvId"), str),
                        "standalone": bool,
                        "rdzvConf": [Closed({"key": str, "value": str})],
                    }
                ),
                "runPolicy": Closed(
                    {
                        "cleanPodPolicy": str,
                        "suspend": bool,
                        "schedulingPolicy": dict,
                        **dict.fromkeys(
                            ("activeDeadlineSeconds", "backoffLimit", "ttlSecondsAfterFinished"), int
                        ),
                    }
                ),
                "pytorchReplicaSpecs!": Closed({"Master": REPLICA, "Worker": REPLICA}),
            }
        ),
    }
)
SKY = Closed(
    {
        **dict.fromkeys(("name", "workdir", "setup", "run"), str),
        **dict.fromkeys(("file_mounts", "volumes", "envs", "config", "service"), dict),
        "num_nodes": int,
        "resources": Closed(
            {
                **dict.fromkeys(("infra", "accelerators", "instance_type", "disk_tier", "network_tier"), str),
                **dict.fromkeys(("cpus", "memory", "image_id"), (str, int)),
                "use_spot": bool,
                "disk_size": (str, int),
                "job_recovery": Open(
                    {"strategy": str, "max_restarts_on_errors": int, "recover_on_exit_codes": (int, list)}
                ),
            }
        ),
    }
)


def shown(name: str) -> dict[str, Any]:
    """The file that a block of the tutorial shows."""
    text = (ROOT / PAGE).read_text()
    (code,) = (block.code for block in blocks(text, PAGE) if block.code.startswith(f"# {name}\n"))
    loaded: dict[str, Any] = yaml.safe_load(code)
    return loaded


@pytest.fixture
def job() -> dict[str, Any]:
    return shown("gpt2-355m.pytorchjob.yaml")


@pytest.fixture
def task() -> dict[str, Any]:
    return shown("gpt2-355m.sky.yaml")


def commands(job: dict[str, Any], task: dict[str, Any]) -> list[list[str]]:
    """The command that both files run, without torchrun's name."""
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    line = re.sub(r'"\$\(.*?\)"', "10.0.0.1", task["run"].replace("\\\n", ""))
    line = re.sub(r'"\$SKYPILOT_NODE_RANK"', "0", line)
    return [[*container["command"], *container["args"]], shlex.split(re.sub(r'"\$\w+"', "8", line))]


def test_both_files_start_a_run_that_passes_its_check(
    job: dict[str, Any], task: dict[str, Any], cli: Cli, tmp_path: Path
) -> None:
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
