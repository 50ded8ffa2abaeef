"""The Dockerfile copies what a wheel is built of; where docker runs, the image is built."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / "scripts/docker/Dockerfile"
COPIED = {
    path for line in re.findall(r"^COPY (.*) \S+$", FILE.read_text(), re.MULTILINE) for path in line.split()
}


def test_copies_what_a_wheel_is_built_of_and_installs_extras_that_there_are() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert all((ROOT / path).exists() for path in COPIED)
    needed = {"pyproject.toml", project["project"]["readme"], *wheel["packages"], *wheel["force-include"]}
    assert {*needed, *project["project"]["license-files"]} <= COPIED
    (extras,) = re.findall(r'"/source\[(.*)\]"', FILE.read_text())
    assert set(extras.split(",")) <= project["project"]["optional-dependencies"].keys()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_image_trains() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True).returncode:
        pytest.skip("docker does not run")
    subprocess.run([docker, "build", "-q", "-f", FILE, "-t", "mlm-test", ROOT], check=True)
    words = ["pretrain", "model=gpt2_tiny", "data=synthetic", "train.steps=2", "tp=2", "dist.device=cpu"]
    subprocess.run([docker, "run", "--rm", "mlm-test", *words, "out=runs/try"], check=True)
