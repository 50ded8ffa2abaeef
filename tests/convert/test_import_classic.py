"""`mlm convert` of Megatron-LM's files of ranks: what it wrote computes what `transformers` computes."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mlm
from mlm.checkpoint.native.save_load import read_manifest, resolve
from mlm.cli.convert.run import run
from mlm.convert.config import ConvertConfig
from mlm.convert.huggingface.mapping import ProbeSamples
from mlm.convert.source import open_source
from mlm.util.errors import CorruptFileError, UserError
from mlm.verify.huggingface import our_outputs, relative_difference
from tests.convert.dcp import llamas
from tests.convert.megatron.classic import FILE, Layout, edit, write_classic
from tests.convert.megatron.written import (
    HIDDEN,
    VOCAB,
    arguments,
    bert_state,
    gpt2_state,
    random_bert,
    random_gpt2,
)

TOKENS = torch.randint(0, VOCAB, (2, 19), generator=torch.Generator().manual_seed(1))
Change = Callable[[dict[str, Any]], Any]


def imported(tmp_path: Path, **settings: Any) -> Path:
    out = tmp_path / "run"
    values = {"source": str(tmp_path / "theirs"), "out": str(out), "vocab_size": VOCAB} | settings
    run(ConvertConfig(**values))
    return out


def written(tmp_path: Path, layout: Layout | None = None, change: Change | None = None) -> Path:
    """Write a GPT-2, with a change made to its first rank's content; return the iter folder."""
    step = write_classic(tmp_path / "theirs", gpt2_state(random_gpt2()), layout or Layout())
    if change is not None:
        edit(sorted(step.iterdir())[0] / FILE, change)
    return step


@torch.no_grad()
def assert_logits(run: Path, model: Any) -> None:
    """Within 1e-4 of the largest: float32 sums in another order."""
    ours, theirs = mlm.load(str(run)).logits(TOKENS), model(TOKENS).logits
    torch.testing.assert_close(ours, theirs[..., :VOCAB], rtol=0, atol=1e-4 * theirs.abs().max().item())


def name_of(layout: Layout) -> str:
    return f"{layout.names}-{layout.version}-{layout.tp}{layout.pp}{layout.vp}"


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, pp=2, vp=2),
        Layout(tp=4, version=1.0, names="transformer"),
        Layout(tp=2, pp=2, version=0, names="transformer"),
        Layout(version=None, names="transformer"),
        Layout(pp=2, names="norm"),
        Layout(tp=2, pp=2, names="core"),
    ],
    ids=name_of,
)
def test_a_gpt2_has_the_logits_of_transformers(tmp_path: Path, layout: Layout) -> None:
    written(tmp_path, layout)
    assert_logits(imported(tmp_path), random_gpt2())


@pytest.mark.parametrize("names", ["encoder", "core"])
def test_a_llama_has_the_logits_of_transformers(tmp_path: Path, names: str) -> None:
    """Gates and inputs lie by ranks."""
    model = llamas.random_llama()
    layout = Layout(tp=2, pp=3, names=names, is_tied=False)
    write_classic(tmp_path / "theirs", llamas.core_state(model), layout, llamas.arguments())
    assert_logits(imported(tmp_path, vocab_size=model.config.vocab_size), model)


@torch.no_grad()
@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2, version=0, names="transformer"), Layout(tp=2, pp=2, vp=2), Layout(pp=2, names="core")],
    ids=name_of,
)
def test_a_bert_says_what_transformers_says(tmp_path: Path, layout: Layout) -> None:
    model = random_bert()
    write_classic(tmp_path / "theirs", bert_state(model), layout)
    run = imported(tmp_path)
    probe = ProbeSamples.of(open_source(str(run)).config.model)
    said = model(probe.tokens, attention_mask=probe.mask.long(), token_type_ids=probe.token_types)
    ours = our_outputs(run)
    assert relative_difference(ours["token logits"], said.prediction_logits[probe.mask]) <= 1e-5
    assert relative_difference(ours["order logits"], said.seq_relationship_logits) <= 1e-5


def test_qkv_rows_of_another_version_are_seen_by_the_comparison(tmp_path: Path) -> None:
    """The yardstick itself."""
    written(tmp_path, Layout(version=1.0), lambda content: content.update(checkpoint_version=3.0))
    with pytest.raises(AssertionError):
        assert_logits(imported(tmp_path), random_gpt2())


def test_files_of_2019_take_the_heads_that_are_named(tmp_path: Path) -> None:
    layout = Layout(version=None, names="transformer")
    written(tmp_path, layout, lambda content: content.pop("args"))
    with pytest.raises(UserError, match=r"does not record args\.num_attention_heads: give num_heads="):
        imported(tmp_path)
    assert_logits(imported(tmp_path, num_heads=4), random_gpt2())


def test_heads_that_are_recorded_are_not_named(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(UserError, match=r"num_heads=8: .* records 4: leave it out"):
        imported(tmp_path, num_heads=8)


def test_the_checkpoint_records_files_and_iteration(tmp_path: Path) -> None:
    written(tmp_path, Layout(tp=2))
    source = read_manifest(resolve(str(imported(tmp_path)))).state["source"]
    assert source["iteration"] == 7
    assert sorted(source["files"]) == [f"mp_rank_00/{FILE}", f"mp_rank_01/{FILE}"]


def test_model_of_a_distributed_optimizer_is_found(tmp_path: Path) -> None:
    """model_rng.pt, and beside it mp_rank_00_000/optim.pt of each data-parallel rank."""
    step = written(tmp_path)
    (step / "mp_rank_00" / FILE).rename(step / "mp_rank_00/model_rng.pt")
    (step / "mp_rank_00_000").mkdir()
    (step / "mp_rank_00_000/optim.pt").touch()
    assert_logits(imported(tmp_path), random_gpt2())


def test_a_flipped_bit_of_a_weight_is_found(tmp_path: Path) -> None:
    """torch does not look at the checksums of what it maps into memory."""
    path = written(tmp_path) / "mp_rank_00" / FILE
    content = bytearray(path.read_bytes())
    weight = random_gpt2().state_dict()["transformer.h.2.mlp.c_fc.weight"].t().contiguous()
    content[content.index(weight.numpy().tobytes()) + 1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"mp_rank_00/model_optim_rng.pt: damaged.*CRC"):
        imported(tmp_path)
    assert not (tmp_path / "run").exists()


def layers(content: dict[str, Any]) -> dict[str, Any]:
    encoder: dict[str, Any] = content["model"]["language_model"]["encoder"]
    return encoder


class Hostile:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def endless() -> dict[str, Any]:
    loop: dict[str, Any] = {}
    loop.update({str(n): loop for n in range(50)})
    return loop


BIAS = "layers.2.mlp.dense_4h_to_h.bias"
PROBLEMS: dict[str, tuple[Change, str]] = {
    "a call": (lambda c: c.update(note=Hostile()), "which is not data; nothing was executed"),
    "a call for a tensor": (lambda c: layers(c).update({BIAS: Hostile()}), "nothing was executed"),
    "strides": (lambda c: layers(c).update({BIAS: torch.zeros(1).expand(HIDDEN)}), "is not a plain tensor"),
    "integers": (lambda c: layers(c).update({BIAS: torch.zeros(32, dtype=torch.int64)}), "is not a plain"),
    "a list": (lambda c: layers(c).update({BIAS: [0.0] * HIDDEN}), "is not a plain tensor"),
    "no end": (lambda c: c["model"]["language_model"].update(encoder=endless()), "no dictionary of names"),
    "no model": (lambda c: c.pop("model"), "holds no model"),
    "version": (lambda c: c.update(checkpoint_version=4.0), "checkpoint_version=4.0"),
    "args": (lambda c: c.update(args={"num_layers": 4}), "args are dict, not a Namespace"),
    "unknown": (lambda c: layers(c).update({"layers.0.adapter.weight": torch.zeros(3)}), "is no part of GPT"),
    "missing": (lambda c: layers(c).pop(BIAS), r"layers\.2\.mlp\.down\.bias is missing"),
    "shape": (
        lambda c: layers(c).update({"layers.1.self_attention.dense.weight": torch.zeros(3, 3)}),
        r"attention\.out\.weight is \[3, 3\], \[32, 32\] is needed",
    ),
    "escapes": (lambda c: layers(c).update({"layers.0.\x1b[2J\nall is well": torch.zeros(3)}), "x1b"),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_a_problem_of_a_file_is_named_in_one_line_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    change, message = PROBLEMS[case]
    path = written(tmp_path) / "mp_rank_00" / FILE
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)
    with pytest.raises(UserError, match=message) as raised:
        imported(tmp_path)
    assert str(raised.value).isprintable()
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(iteration=2000), "iteration=7, but 2000 in mp_rank_00_000"),
        (lambda c: c.update(checkpoint_version=2.0), "checkpoint_version=3.0, but 2.0"),
        (lambda c: layers(c)["layers.0.input_layernorm.bias"].add_(1), "norm.bias differs between"),
        (
            lambda c: c["model"]["language_model"]["embedding"]["word_embeddings"]["weight"].add_(1),
            "output layer differs from the token table",
        ),
    ],
    ids=["iteration", "version", "norm", "head"],
)
def test_ranks_that_do_not_belong_together_are_rejected(tmp_path: Path, change: Change, message: str) -> None:
    written(tmp_path, Layout(tp=2, pp=2), change)
    with pytest.raises(UserError, match=message):
        imported(tmp_path)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("mp_rank_00_001", r"mp_rank_00_001/model_optim_rng\.pt is missing, of tp=2 pp=2 ranks"),
        ("mp_rank_01_000", r"mp_rank_01_000/\S+ is missing"),
    ],
)
def test_a_missing_rank_is_named(tmp_path: Path, missing: str, message: str) -> None:
    shutil.rmtree(written(tmp_path, Layout(tp=2, pp=2)) / missing)
    with pytest.raises(CorruptFileError, match=message):
        imported(tmp_path)


def test_a_missing_last_rank_is_seen_by_the_shapes(tmp_path: Path) -> None:
    shutil.rmtree(written(tmp_path, Layout(tp=2)) / "mp_rank_01")
    with pytest.raises(CorruptFileError, match=r"attention\.qkv\.weight is \[48, 32\], \[96, 32\] is needed"):
        imported(tmp_path)


def test_the_folder_of_one_rank_is_rejected(tmp_path: Path) -> None:
    source = written(tmp_path) / "mp_rank_00"
    with pytest.raises(UserError, match="one rank of a checkpoint: name its parent"):
        imported(tmp_path, source=str(source))


def test_a_file_of_an_expert_rank_names_the_other_way(tmp_path: Path) -> None:
    step = written(tmp_path, Layout(tp=2, pp=2))
    (step / "mp_rank_00_000").rename(step / "mp_rank_00_000_000")
    with pytest.raises(UserError, match=r"of one expert-parallel rank: .*Megatron Bridge"):
        imported(tmp_path)


def test_arguments_of_another_model_are_rejected(tmp_path: Path) -> None:
    args = arguments(position_embedding_type="rope")
    write_classic(tmp_path / "theirs", gpt2_state(random_gpt2()), Layout(), args)
    with pytest.raises(UserError, match=r"args\.position_embedding_type=rope"):
        imported(tmp_path)
