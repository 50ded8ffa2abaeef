"""`mlm pretrain exact=4`: digests of saves, and `mlm ckpt verify` of them."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from mlm.checkpoint.native.compare import tensors_digest
from mlm.checkpoint.native.format import read_manifest
from mlm.cli import main
from tests.training.records import records

WORDS = """
    model=gpt2_tiny data=synthetic data.seq_length=32 train.steps=2 train.global_batch_size=8
    train.micro_batch_size=2 train.validate_every=0 exact=4 checkpoint.save_every=1
""".split()  # noqa: SIM905


def test_digests_of_saves_are_those_of_one_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    digests = []
    for name, layout in (("one", ["dist.threads_per_rank=2"]), ("two", ["tp=2"])):
        out = tmp_path / name
        assert main(["pretrain", *WORDS, *layout, f"out={out}"]) == 0
        digests.append([record["digest"] for record in records(out, "saved")])
        assert digests[0][1] in capfd.readouterr().out
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 2
    report = tmp_path / "verify.json"
    assert main(["ckpt", "verify", str(tmp_path / "two"), f"out={report}"]) == 0
    shown = [checkpoint["exact"] for checkpoint in json.loads(report.read_text())["checkpoints"]]
    assert shown == digests[0]
    assert f"step-00000002 {digests[0][1]}\n" in capfd.readouterr().out


def test_digest_is_sha256_of_names_forms_and_bytes(tmp_path: Path) -> None:
    from mlm.checkpoint.native.save_load import TensorShard, save_checkpoint

    b, a = torch.arange(6.0).view(2, 3), torch.tensor([1.0, -0.0], dtype=torch.bfloat16)
    shards = {name: TensorShard(x, tuple(x.shape), (0,) * x.dim()) for name, x in (("b", b), ("a", a))}
    path = save_checkpoint(tmp_path, 1, shards, state={}, keep_last=1, keep_every=0)
    expected = hashlib.sha256(
        b"a BF16 [2]\n" + bytes.fromhex("803f0080") + b"b F32 [2, 3]\n" + b.numpy().tobytes()
    )
    assert tensors_digest(path, read_manifest(path)) == f"sha256:{expected.hexdigest()}"
