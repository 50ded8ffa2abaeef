"""`mlm import megatron` from end to end: what it wrote computes what `transformers` computes."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2LMHeadModel

from mlm.checkpoint.native.save_load import read_manifest, resolve
from mlm.cli.convert.run import preflight, run
from mlm.cli.convert.settings import ImportMegatronConfig
from mlm.convert.source import open_source
from mlm.inference.trained import load_trained
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.cross_entropy import full_logits
from mlm.parallel.mesh import shape_context
from mlm.util.errors import CorruptFileError
from tests.convert.megatron.written import FILE, VOCAB, Layout, edit, random_gpt2, write
from tests.slow import thinned

TOKENS = torch.randint(0, VOCAB, (2, 19), generator=torch.Generator().manual_seed(1))


@cache
def reference() -> tuple[GPT2LMHeadModel, Tensor]:
    """transformers' model and its logits of TOKENS, [2, 19, VOCAB]."""
    model = random_gpt2()
    with torch.no_grad():
        return model, model(TOKENS).logits


def imported(tmp_path: Path, layout: Layout, **settings: Any) -> Path:
    """Write the reference in a layout, import it; the run directory."""
    write(tmp_path / "theirs", reference()[0], layout)
    run(config(tmp_path, **settings))
    return tmp_path / "run"


def config(tmp_path: Path, **settings: Any) -> ImportMegatronConfig:
    values = {"source": str(tmp_path / "theirs"), "out": str(tmp_path / "run"), "vocab_size": VOCAB}
    return ImportMegatronConfig(**(values | settings))


@torch.no_grad()
def logits(folder: Path) -> Tensor:
    """Ours, [2, 19, VOCAB], by the way that scores and samples trained models."""
    trained = load_trained(open_source(str(folder)), ParallelConfig(), PrecisionConfig(), shape_context())
    model = trained.model.chunks[0]
    hidden = model.hidden_states(TOKENS)  # [S, B, H]
    return full_logits(hidden.flatten(0, 1), model.token).view(19, 2, VOCAB).transpose(0, 1)


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """Within 1e-4 of the largest: float32 sums in another order."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * theirs.abs().max().item())


LAYOUTS = [
    Layout(),
    Layout(tp=4),
    Layout(pp=2),
    Layout(tp=2, pp=2, vp=2),
    Layout(tp=2, pp=2, version=2.0),
    Layout(version=1.0, names="transformer"),
    Layout(tp=4, version=1.0, names="transformer"),
    Layout(version=None, names="transformer"),
    Layout(tp=4, version=0, names="transformer"),
    Layout(tp=2, pp=2, version=0, names="transformer"),
    Layout(tp=2, names="norm", args={"norm_epsilon": 1e-5, "layernorm_epsilon": ...}),
    Layout(tp=2, pp=2, vp=2, names="core"),
]


@pytest.mark.parametrize(
    "layout", thinned(LAYOUTS, 3), ids=lambda x: f"{x.names}-{x.version}-{x.tp}{x.pp}{x.vp}"
)
def test_logits_are_those_of_transformers(tmp_path: Path, layout: Layout) -> None:
    assert_same(logits(imported(tmp_path, layout)), reference()[1])


def test_wrong_qkv_order_is_seen_by_the_comparison(tmp_path: Path) -> None:
    """The yardstick itself: version 1.0's rows read as 3.0's give other logits."""
    folder = write(tmp_path / "theirs", reference()[0], Layout(version=1.0))
    edit(folder / "mp_rank_00" / FILE, lambda content: content.update(checkpoint_version=3.0))
    run(config(tmp_path))
    with pytest.raises(AssertionError):
        assert_same(logits(tmp_path / "run"), reference()[1])


def test_half_precision_weights_become_their_float32(tmp_path: Path) -> None:
    folder = imported(tmp_path, Layout(tp=2, dtype=torch.float16))
    rounded = random_gpt2().half().float()
    with torch.no_grad():
        assert_same(logits(folder), rounded(TOKENS).logits)


def test_checkpoint_is_of_weights_at_step_0(tmp_path: Path) -> None:
    path = resolve(str(imported(tmp_path, Layout(tp=2))))
    manifest = read_manifest(path)
    assert path.name == "step-00000000"
    assert manifest.state["weights_only"] is True
    assert all(name.startswith("model.") for name in manifest.tensors)
    assert manifest.state["source"]["iteration"] == 1000
    assert sorted(manifest.state["source"]["files"]) == [f"mp_rank_00/{FILE}", f"mp_rank_01/{FILE}"]


def test_checkpoint_of_2019_takes_the_heads_that_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "theirs", reference()[0], Layout(version=None, names="transformer"))
    edit(folder / "mp_rank_00" / FILE, lambda content: content.pop("args"))
    run(config(tmp_path, num_heads=4))
    assert_same(logits(tmp_path / "run"), reference()[1])


def test_flipped_bit_of_a_weight_is_found(tmp_path: Path) -> None:
    """torch does not look at the checksums of what it maps into memory."""
    path = write(tmp_path / "theirs", reference()[0], Layout()) / "mp_rank_00" / FILE
    content = bytearray(path.read_bytes())
    weight = reference()[0].state_dict()["transformer.h.2.mlp.c_fc.weight"].t().contiguous()
    at = content.index(weight.numpy().tobytes()) + 1000
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"mp_rank_00/model_optim_rng.pt: damaged.*CRC"):
        run(config(tmp_path))
    assert not (tmp_path / "run").exists()


def test_failed_import_leaves_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path / "theirs", reference()[0], Layout())

    def spoil(content: dict[str, Any]) -> None:
        content["model"]["language_model"]["encoder"]["layers.3.mlp.dense_4h_to_h.bias"][5] = float("nan")

    edit(folder / "mp_rank_00" / FILE, spoil)
    with pytest.raises(CorruptFileError, match=r"layers\.3\.mlp\.down\.bias is not finite"):
        run(config(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_preflight_names_every_problem(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    problems = preflight(config(tmp_path, tokenizer=str(tmp_path / "none")))
    assert [problem.split(":")[0].split("=")[0] for problem in problems] == [
        "out",
        f"no tokenizer at {tmp_path / 'none'}",
        "source",
    ]
    assert all("\n" not in problem for problem in problems)


def test_a_run_of_ours_is_not_taken_for_one_of_megatron(tmp_path: Path) -> None:
    run_folder = imported(tmp_path, Layout())
    problems = preflight(config(tmp_path, source=str(run_folder), out=str(tmp_path / "again")))
    assert problems == [
        f"source={run_folder}: is a checkpoint of mlm already, not Megatron-LM's; convert it by mlm convert"
    ]
