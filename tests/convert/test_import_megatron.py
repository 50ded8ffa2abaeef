"""`mlm convert` from end to end: what it wrote computes what `transformers` computes."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mlm
from mlm.checkpoint.native.save_load import read_manifest, resolve
from mlm.cli.convert.run import run
from mlm.convert.config import ConvertConfig
from mlm.convert.conversion import preflight
from mlm.convert.megatron.distributed import find_step
from mlm.util.errors import CorruptFileError, UserError
from tests.convert.dcp.llamas import write_torch_dist
from tests.convert.megatron.written import VOCAB, arguments, gpt2_state, random_gpt2

TOKENS = torch.randint(0, VOCAB, (2, 19), generator=torch.Generator().manual_seed(1))


def written(tmp_path: Path, state: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    """Write a GPT-2; return the folder of its iteration."""
    return write_torch_dist(tmp_path / "theirs", state or gpt2_state(random_gpt2()), arguments(**changes))


def imported(tmp_path: Path, **settings: Any) -> Path:
    run(config(tmp_path, **settings))
    return tmp_path / "run"


def config(tmp_path: Path, **settings: Any) -> ConvertConfig:
    values = {"source": str(tmp_path / "theirs"), "out": str(tmp_path / "run"), "vocab_size": VOCAB}
    return ConvertConfig(**(values | settings))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_logits_are_those_of_transformers(tmp_path: Path, dtype: torch.dtype) -> None:
    """Within 1e-4 of the largest: float32 sums in another order; half-precision weights as their float32."""
    written(tmp_path, {name: value.to(dtype) for name, value in gpt2_state(random_gpt2()).items()})
    ours = mlm.load(str(imported(tmp_path))).logits(TOKENS)
    model = type(random_gpt2())(random_gpt2().config).eval()
    model.load_state_dict(
        {name: value.to(dtype).float() for name, value in random_gpt2().state_dict().items()}
    )
    theirs = model(TOKENS).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * theirs.abs().max().item())


def test_checkpoint_is_of_weights_at_step_0(tmp_path: Path) -> None:
    written(tmp_path)
    path = resolve(str(imported(tmp_path)))
    manifest = read_manifest(path)
    assert path.name == "step-00000000"
    assert manifest.state["weights_only"] is True
    assert all(name.startswith("model.") for name in manifest.tensors)
    assert manifest.state["source"]["iteration"] == 7
    assert list(manifest.state["source"]["files"]) == ["__0_0.distcp"]


def test_failed_import_leaves_nothing(tmp_path: Path) -> None:
    state = gpt2_state(random_gpt2())
    state["decoder.layers.mlp.linear_fc2.bias"][3, 5] = float("nan")
    written(tmp_path, state)
    with pytest.raises(CorruptFileError, match=r"layers\.3\.mlp\.down\.bias is not finite"):
        imported(tmp_path)
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


def test_the_iteration_is_the_named_the_only_or_the_given(tmp_path: Path) -> None:
    step = written(tmp_path)
    assert find_step(step) == find_step(step.parent) == step
    latest = step.parent / "latest_checkpointed_iteration.txt"
    latest.unlink()
    assert find_step(step.parent) == step
    (step.parent / "iter_0000008").mkdir()
    with pytest.raises(UserError, match=r"selects one of iter_0000007, iter_0000008: name one"):
        find_step(step.parent)
    latest.write_text("9")
    with pytest.raises(CorruptFileError, match="names '9', which is not there"):
        find_step(step.parent)


class Hostile:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


HOSTILE: dict[str, tuple[Any, str]] = {
    "a call": (
        {"args": Hostile()},
        r"common\.pt: refers to .*system, which is not data; nothing was executed",
    ),
    "a call in args": ({"args": arguments(save=Hostile())}, "which is not data; nothing was executed"),
    "no arguments": ({"iteration": 7}, "its args are NoneType, not a Namespace"),
    "other arguments": ({"args": {"num_layers": 4}}, "its args are dict, not a Namespace"),
    "a list": ([1], "holds no named parts"),
    "heads of a text": ({"args": arguments(num_attention_heads="4")}, "args.num_attention_heads=4 is out of"),
    "no heads": ({"args": arguments(num_attention_heads=None)}, "does not record args.num_attention_heads"),
    "heads that do not fit": ({"args": arguments(num_attention_heads=5)}, "5 heads of 6 columns do not make"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_common_values_that_are_no_arguments_are_named_and_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    content, message = HOSTILE[name]
    torch.save(content, written(tmp_path) / "common.pt")
    with pytest.raises(UserError, match=message) as raised:
        imported(tmp_path)
    assert "\n" not in str(raised.value)
    assert not Path("ran").exists()
