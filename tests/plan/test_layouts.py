"""`mlm plan layouts` and `mlm plan memory` as typed: tables, files, and one line for each mistake."""

import csv
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from mlm.cli import main
from mlm.config.paths import CONFIG_DIR
from mlm.plan.cost import PARTS
from mlm.plan.hardware import PeakConfig, preset, preset_of_gpu
from mlm.tracking.peak import table_peak
from tests.slow import slow, thinned

LAYOUTS = ["plan", "layouts", "model=gpt2_355m", "gpus=8", "cp=1"]
OF_TP_2 = [*LAYOUTS, "tp=2"]
"""Fewer ways to split a layer, each of which takes a pass to count."""
MEMORY = ["plan", "memory", "model=gpt2_355m"]
PART_KEYS = {f"{part}_s" for part in PARTS}


def test_tables_fit_a_hundred_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LAYOUTS, "tokens=300e9", "price_per_gpu_hour=2", "model=gpt2_8b"]) == 0
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if re.match(r" *\d+ tp\d+ ", line)]
    assert len(rows) == 10
    assert max(map(len, rows)) <= 100
    for heading in ("MFU", "days", "price", "GiB", "does not fit by"):
        assert heading in printed
    assert "mlm pretrain model=gpt2_8b precision=bf16 tp=" in printed


@pytest.mark.parametrize(
    "line",
    [
        slow(
            "model=llama_tiny model.options.window=16 'model={num_layers: 4}' data.seq_length=64 log.every=3"
        ),
        "model=gpt2_tiny model.num_layers=8 pp=8 name=deep precision=fp16 hardware=dgx_a100_80g",
        "--config-dir=own model=mine out=plan.json tokens=1e9 price_per_gpu_hour=2 tp=2",
    ],
)
def test_the_last_line_runs_the_model_that_was_planned(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own/model").mkdir(parents=True)
    (tmp_path / "own/model/mine.yaml").write_text("num_layers: 3\nhidden_size: 64\nnum_heads: 4\n")
    typed = shlex.split(line)
    ranks = ["gpus=8", "show=1", "train.global_batch_size=8"]
    assert main(["plan", "layouts", *typed, *ranks]) == 0
    (printed,) = re.findall(r"^mlm (pretrain .*)", capsys.readouterr().out, re.MULTILINE)
    words = shlex.split(printed)
    assert main([*words, "data=synthetic", "--check=8"]) == 0
    capsys.readouterr()
    assert main(["plan", "layouts", *typed, *ranks, "--cfg", "job", "--resolve"]) == 0
    planned = yaml.safe_load(capsys.readouterr().out)
    assert main([*words, "--cfg", "job", "--resolve"]) == 0
    trained = yaml.safe_load(capsys.readouterr().out)
    assert {**planned["data"], "kind": trained["data"]["kind"]} == trained["data"]
    for section in ("model", "optimizer", "schedule", "precision"):
        assert trained[section] == planned[section]


def test_files_hold_what_is_printed(tmp_path: Path) -> None:
    for name in ("plan.json", "plan.csv"):
        assert main([*OF_TP_2, f"out={tmp_path / name}"]) == 0
    layouts = json.loads((tmp_path / "plan.json").read_text())["layouts"]
    with open(tmp_path / "plan.csv", newline="") as f:
        rows = list(csv.DictReader(f))
    assert len(layouts) == len(rows) == 10
    assert [float(row["step_s"]) for row in rows] == [layout["step_s"] for layout in layouts]
    first = layouts[0]
    assert main([*OF_TP_2, f"out={tmp_path / 'plan.csv'}"]) == 0  # what mlm wrote is replaced
    parts = [name for name in first if name.endswith("_bytes") and name != "memory_bytes"]
    assert sum(first[name] for name in parts) == pytest.approx(first["memory_bytes"])


def test_a_comparison_leads_from_one_layout_to_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "compare", "tp8 pp1 dp8 mb4", "tp1 pp8 vp3 dp4 zero2 full mb2", "model=gpt2_355m"]
    assert main([*words, f"out={tmp_path / 'c.json'}"]) == 0
    printed = capsys.readouterr().out
    a, b = json.loads((tmp_path / "c.json").read_text())["layouts"]
    assert (a["layout"], b["layout"]) == (words[2], words[3])
    sums = [sum(part for name, part in each.items() if name in PART_KEYS) for each in (a, b)]
    assert sums == pytest.approx([a["step_s"], b["step_s"]])
    differences = re.findall(r" ([+-][\d.,]+(?:e[+-]\d+)?) ms", printed)
    *parts, whole = (float(each.replace(",", "")) for each in differences)
    assert sum(parts) == pytest.approx(whole, rel=2e-3)
    assert whole == pytest.approx(1e3 * (b["step_s"] - a["step_s"]), rel=2e-3)
    ratio = b["step_s"] / a["step_s"]
    assert f"B takes {ratio:.3g} times the time of A and {ratio / 2:.3g} times its GPU-hours" in printed
    for name in ("matmul", "tp", "bubble", "recompute", "optimizer"):
        assert re.search(rf"^ *{re.escape(name)} ", printed, re.MULTILINE), name


def test_memory_of_both_ends_and_of_a_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*MEMORY, "pp=4", "tp=2", "dp=2", "rank=5", f"out={tmp_path / 'm.json'}"]
    assert main([*words, "train.global_batch_size=16", "train.micro_batch_size=1"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"stage +0 +1 +3 ", printed)
    assert re.search(r"in flight +4 +3 +1 ", printed)
    assert "fits" in printed
    assert [row["rank"] for row in json.loads((tmp_path / "m.json").read_text())["ranks"]] == [0, 5, 12]


def test_one_rank_of_a_cpu_host_has_all_of_it_in_every_command(tmp_path: Path) -> None:
    """It equals a host of one device with the memory, peak and power of all four."""
    values = yaml.safe_load((CONFIG_DIR / "hardware/dgx_a100_80g.yaml").read_text())
    scaled = ("memory_gib", "memory_gbps")
    hosts = [{**values, "device": "cpu", "devices_per_node": 4, "memory_gib": 2}]
    hosts.append({**hosts[0], "devices_per_node": 1, **{key: 4 * hosts[0][key] for key in scaled}})
    hosts[1]["peak_tflops"] = {name: 4 * peak for name, peak in values["peak_tflops"].items()}
    commands = [["layouts", "gpus=1", "tokens=1e9"], ["compare", "tp1", "tp1 mb2"], ["memory"]]
    for command in commands:
        found = []
        for host in hosts:
            (tmp_path / "host.yaml").write_text(yaml.safe_dump(host))
            words = ["model=gpt2_tiny", f"hardware={tmp_path / 'host.yaml'}", "precision=fp32"]
            assert main(["plan", *command, *words, f"out={tmp_path / 'out.json'}"]) == 0
            found.append({**json.loads((tmp_path / "out.json").read_text()), "settings": None})
        assert found[0] == found[1]


NAMES = {
    "dgx2h_v100_32g": "Tesla V100-SXM3-32GB",
    "dgx_a100_40g": "NVIDIA A100-SXM4-40GB",
    "dgx_a100_80g": "NVIDIA A100-SXM4-80GB",
    "dgx_b200": "NVIDIA B200",
    "dgx_h100": "NVIDIA H100 80GB HBM3",
    "dgx_h200": "NVIDIA H200",
    "mi300x": "AMD Instinct MI300X",
    "rtx_4090": "NVIDIA GeForce RTX 4090",
}
"""Names that torch gives the GPUs of presets."""


@pytest.mark.parametrize("path", sorted((CONFIG_DIR / "hardware").glob("*.yaml")), ids=lambda path: path.stem)
def test_each_preset_and_each_number_in_it_name_their_sources(path: Path) -> None:
    """In a comment of its line; peaks and constants in that of the first line of their section."""
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert lines[1].startswith("# ")
    assert any(line.startswith("efficiency:  # ") for line in lines)
    numbers = [line for line in lines if re.match(r"[a-z_]+: [0-9.]+(  #|$)", line)]
    assert all(line.startswith("devices_per_node") for line in numbers if " # " not in line)


@pytest.mark.parametrize("path", sorted((CONFIG_DIR / "hardware").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_preset_is_found_by_its_gpu_and_has_the_peaks_that_mfu_is_stated_against(path: Path) -> None:
    found = preset_of_gpu(NAMES[path.stem])
    assert found == preset(path.stem)
    assert found.peak_tflops.fp16
    for unit in PeakConfig.__slots__:
        peak = table_peak(NAMES[path.stem], unit)
        assert getattr(found.peak_tflops, unit) == (peak and pytest.approx(peak.flops / 1e12)), unit


@pytest.mark.parametrize(
    ("words", "line"),
    thinned(
        [
            ([*LAYOUTS, "hardware=dgx_a100"], "choose dgx_a100_40g or dgx_a100_80g"),
            ([*LAYOUTS, "gpus=509"], "use gpus=512"),
            ([*LAYOUTS, "train.micro_batch_size=999"], "leave train.micro_batch_size=999 or cp=1"),
            ([*LAYOUTS, "model=gpt2_8b", "gpus=1"], "no layout fits into 79.1 GiB per GPU"),
            ([*LAYOUTS, "tp=3"], "gpus=8: no layout is valid (tp=3 does not divide model.num_heads=16)"),
            (["plan", "compare", "tp1", "tp2 zero4"], "b=tp2 zero4: zero4 is not a word of a layout"),
            ([*MEMORY, "tp=2", "rank=2"], "use rank=0 to 1"),
        ],
        5,
    ),
)
def test_a_mistake_is_one_line_with_its_fix(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    printed = capsys.readouterr().err.strip()
    assert printed.count("\n") == 0
    assert line in printed


A100 = yaml.safe_load((CONFIG_DIR / "hardware/dgx_a100_80g.yaml").read_text())
HALF = ("name", "device", "devices_per_node", "memory_gib", "reserved_gib")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"a: 1\nb: [1, 2\n{yaml.safe_dump(A100)}", ".yaml: line "),
        (
            yaml.safe_dump({key: A100[key] for key in HALF}),
            "lacks memory_gbps, node_gbps, node_latency_us, network_gbps, network_latency_us; add them",
        ),
        (
            yaml.safe_dump({**A100, "peak_tflops": {"bf16": float("inf")}}),
            "hardware.peak_tflops.bf16=Infinity must be finite",
        ),
    ],
    ids=["no YAML", "incomplete", "infinite"],
)
def test_hardware_that_cannot_be_is_one_line(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    assert main([*LAYOUTS, f"hardware={tmp_path / 'mine.yaml'}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    if ": line " in message:
        assert f"{tmp_path / 'mine.yaml'}: line " in line
        assert "correct it" in line
        assert "unicode string" not in line
