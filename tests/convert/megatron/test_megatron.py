"""`mlm convert` of Megatron-LM's checkpoints, torch_dist and files of ranks: the models of `transformers`."""

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MegatronBertForPreTraining

import mlm
from mlm.checkpoint.native.save_load import read_manifest, resolve
from mlm.cli.convert.run import run
from mlm.convert.config import ConvertConfig
from mlm.convert.huggingface.mapping import ProbeSamples
from mlm.convert.megatron.distributed import find_step
from mlm.convert.source import open_source
from mlm.models.config import ModelConfig
from mlm.util.errors import CorruptFileError, UserError
from mlm.verify.huggingface import our_outputs, relative_difference
from tests.convert.dcp import llamas
from tests.convert.dcp.llamas import write_torch_dist
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
from tests.hostile.files import Bomb

BOMB = Bomb(Path("ran"))
TOKENS = torch.randint(0, VOCAB, (2, 19), generator=torch.Generator().manual_seed(1))
Change = Callable[[dict[str, Any]], Any]


def settings(tmp_path: Path, **changes: Any) -> ConvertConfig:
    values = {"source": str(tmp_path / "theirs"), "out": str(tmp_path / "run"), "vocab_size": VOCAB}
    return ConvertConfig(**(values | changes))


def imported(tmp_path: Path, **changes: Any) -> Path:
    run(settings(tmp_path, **changes))
    return tmp_path / "run"


def written(
    tmp_path: Path,
    layout: Layout | None,
    state: dict[str, Tensor] | None = None,
    args: argparse.Namespace | None = None,
) -> Path:
    """Write a GPT-2, or `state`, as files of ranks, without a layout as torch_dist; return the step."""
    state, args = gpt2_state(random_gpt2()) if state is None else state, args or arguments()
    if layout is None:
        return write_torch_dist(tmp_path / "theirs", state, args)
    return write_classic(tmp_path / "theirs", state, layout, args)


def edited(tmp_path: Path, change: Change, layout: Layout = Layout()) -> Path:  # noqa: B008
    """Write a GPT-2, with a change made to its first rank's content; return the iter folder."""
    step = written(tmp_path, layout)
    edit(sorted(step.iterdir())[0] / FILE, change)
    return step


def model_of(run: Path) -> ModelConfig:
    return open_source(str(run)).config.model


@torch.no_grad()
def assert_logits(run: Path, model: Any) -> None:
    """Within 1e-4 of the largest: float32 sums in another order."""
    ours, theirs = mlm.load(str(run)).logits(TOKENS), model(TOKENS).logits[..., :VOCAB]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * theirs.abs().max().item())


@torch.no_grad()
def assert_outputs(run: Path, model: MegatronBertForPreTraining, *, order: bool = True) -> None:
    """Logits of tokens, and of the order of sentences, within 1e-5 of the largest."""
    probe, ours = ProbeSamples.of(model_of(run)), our_outputs(run)
    said = model(probe.tokens, attention_mask=probe.mask.long(), token_type_ids=probe.token_types)
    assert relative_difference(ours["token logits"], said.prediction_logits[probe.mask]) <= 1e-5
    if order:
        assert relative_difference(ours["order logits"], said.seq_relationship_logits) <= 1e-5


def name_of(layout: Layout | None) -> str:
    return (
        "torch_dist"
        if layout is None
        else f"{layout.names}-{layout.version}-{layout.tp}{layout.pp}{layout.vp}"
    )


@pytest.mark.parametrize(
    "layout",
    [
        None,
        Layout(tp=2, pp=2, vp=2),
        Layout(tp=4, version=1.0, names="transformer"),
        Layout(tp=2, pp=2, version=0, names="transformer"),
        Layout(version=None, names="transformer"),
        Layout(pp=2, names="norm"),
        Layout(tp=2, pp=2, names="core"),
    ],
    ids=name_of,
)
def test_a_gpt2_has_the_logits_of_transformers(tmp_path: Path, layout: Layout | None) -> None:
    written(tmp_path, layout)
    assert_logits(imported(tmp_path), random_gpt2())


def test_half_precision_weights_are_read_as_their_float32(tmp_path: Path) -> None:
    written(tmp_path, None, {name: value.half() for name, value in gpt2_state(random_gpt2()).items()})
    model = type(random_gpt2())(random_gpt2().config).eval()
    model.load_state_dict({name: value.half().float() for name, value in random_gpt2().state_dict().items()})
    assert_logits(imported(tmp_path), model)


@pytest.mark.parametrize(
    ("layout", "stacked"),
    [
        (None, True),
        (None, False),
        (Layout(tp=2, pp=3, is_tied=False), True),
        (Layout(tp=2, pp=3, names="core", is_tied=False), True),
    ],
    ids=["torch_dist, stacked", "torch_dist, numbered", "ranks", "ranks, names of Megatron Core"],
)
def test_a_llama_has_the_logits_of_transformers(tmp_path: Path, layout: Layout | None, stacked: bool) -> None:
    """In files of ranks gates and inputs lie by ranks. Its arguments record the vocabulary."""
    model = llamas.random_llama()
    written(tmp_path, layout, llamas.core_state(model, stacked=stacked), llamas.arguments())
    assert_logits(imported(tmp_path, vocab_size=None), model)


@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2, version=0, names="transformer"), Layout(tp=2, pp=2, vp=2), Layout(pp=2, names="core")],
    ids=name_of,
)
def test_a_bert_says_what_transformers_says(tmp_path: Path, layout: Layout) -> None:
    written(tmp_path, layout, bert_state(random_bert()))
    assert_outputs(imported(tmp_path), random_bert())


def imported_bert(tmp_path: Path, state: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    """Write a BERT as torch_dist, import it; the run directory."""
    written(tmp_path, None, bert_state(random_bert()) if state is None else state, arguments(**changes))
    return imported(tmp_path)


def test_exact_gelu_is_computed_where_it_was_trained_with(tmp_path: Path) -> None:
    model = random_bert(hidden_act="gelu")
    found = imported_bert(tmp_path, bert_state(model), openai_gelu=False, bias_gelu_fusion=False)
    assert model_of(found).activation == "gelu"
    assert_outputs(found, model)


def test_two_kinds_of_gelu_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron-LM's default: the fused kernel in the layers, torch's in the masked-LM head."""
    found = imported_bert(tmp_path, openai_gelu=False)
    assert model_of(found).activation == "gelu_tanh"
    assert "its masked-LM head was trained with the exact gelu" in capsys.readouterr().out


def test_without_a_binary_head_its_parts_are_filled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--bert-no-binary-head: no pooler, and no token types, which is a table of zeros."""
    found, model = imported_bert(tmp_path, bert_state(random_bert(), binary_head=False)), random_bert()
    out = capsys.readouterr().out
    for note in ("it knows no token types", "no pooler is there", "no sop_head is there"):
        assert note in out
    filled = read_manifest(resolve(str(found))).state["source"]["filled"]
    assert filled == ["pooler.bias", "pooler.weight", "sop_head.bias", "sop_head.weight"]
    with torch.no_grad():
        model.bert.embeddings.token_type_embeddings.weight.zero_()
    assert_outputs(found, model, order=False)


@pytest.mark.parametrize(("rows", "wanted"), [(30592, 30522), (30720, None)])
def test_vocabulary_is_berts_where_it_fits(tmp_path: Path, rows: int, wanted: int | None) -> None:
    written(tmp_path, None, bert_state(random_bert(), rows=rows))
    if wanted is None:
        with pytest.raises(UserError, match="BERT's 30522 or 28996 tokens do not fill"):
            imported(tmp_path, vocab_size=None)
    else:
        assert model_of(imported(tmp_path, vocab_size=None)).vocab_size == wanted


def test_files_of_2019_take_the_heads_that_are_named(tmp_path: Path) -> None:
    edited(tmp_path, lambda content: content.pop("args"), Layout(version=None, names="transformer"))
    with pytest.raises(UserError, match=r"does not record args\.num_attention_heads: give num_heads="):
        imported(tmp_path)
    assert_logits(imported(tmp_path, num_heads=4), random_gpt2())


@pytest.mark.parametrize(
    ("layout", "files"),
    [(None, ["__0_0.distcp"]), (Layout(tp=2), [f"mp_rank_00/{FILE}", f"mp_rank_01/{FILE}"])],
    ids=["torch_dist", "ranks"],
)
def test_the_checkpoint_is_of_weights_and_records_files_and_iteration(
    tmp_path: Path, layout: Layout | None, files: list[str]
) -> None:
    written(tmp_path, layout)
    path = resolve(str(imported(tmp_path)))
    manifest = read_manifest(path)
    assert path.name == "step-00000000"
    assert manifest.state["weights_only"] is True
    assert all(name.startswith("model.") for name in manifest.tensors)
    source = manifest.state["source"]
    assert (source["iteration"], sorted(source["files"])) == (7, files)


def test_model_of_a_distributed_optimizer_is_found(tmp_path: Path) -> None:
    """model_rng.pt, and beside it mp_rank_00_000/optim.pt of each data-parallel rank."""
    step = written(tmp_path, Layout())
    (step / "mp_rank_00" / FILE).rename(step / "mp_rank_00/model_rng.pt")
    (step / "mp_rank_00_000").mkdir()
    (step / "mp_rank_00_000/optim.pt").touch()
    assert_logits(imported(tmp_path), random_gpt2())


def test_the_iteration_is_the_named_the_only_or_the_given(tmp_path: Path) -> None:
    step = written(tmp_path, None)
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


def test_a_flipped_bit_of_a_weight_is_found(tmp_path: Path) -> None:
    """torch does not look at the checksums of what it maps into memory."""
    path = written(tmp_path, Layout()) / "mp_rank_00" / FILE
    content = bytearray(path.read_bytes())
    weight = random_gpt2().state_dict()["transformer.h.2.mlp.c_fc.weight"].t().contiguous()
    content[content.index(weight.numpy().tobytes()) + 1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"mp_rank_00/model_optim_rng.pt: damaged.*CRC"):
        imported(tmp_path)
    assert not (tmp_path / "run").exists()


COMMON: dict[str, tuple[Any, str]] = {
    "a call": ({"args": BOMB}, r"common\.pt: refers to .*mkdir, which is not data; nothing was executed"),
    "a call in args": ({"args": arguments(save=BOMB)}, "which is not data; nothing was executed"),
    "no arguments": ({"iteration": 7}, "its args are NoneType, not a Namespace"),
    "heads that do not fit": ({"args": arguments(num_attention_heads=5)}, "5 heads of 6 columns do not make"),
    "norms behind the sums": (
        {"args": arguments(apply_residual_connection_post_layernorm=True)},
        r"args\.apply_residual_connection_post_layernorm=True: mlm imports GPT-2, BERT and Llama",
    ),
}
"""Content of common.pt in torch_dist."""


def layers(content: dict[str, Any]) -> dict[str, Any]:
    encoder: dict[str, Any] = content["model"]["language_model"]["encoder"]
    return encoder


def endless() -> dict[str, Any]:
    loop: dict[str, Any] = {}
    loop.update({str(n): loop for n in range(50)})
    return loop


BIAS = "layers.2.mlp.dense_4h_to_h.bias"
RANKS: dict[str, tuple[Change, str]] = {
    "a call": (lambda c: c.update(note=BOMB), "which is not data; nothing was executed"),
    "a call for a tensor": (lambda c: layers(c).update({BIAS: BOMB}), "nothing was executed"),
    "strides": (lambda c: layers(c).update({BIAS: torch.zeros(1).expand(HIDDEN)}), "is not a plain tensor"),
    "a list": (lambda c: layers(c).update({BIAS: [0.0] * HIDDEN}), "is not a plain tensor"),
    "no end": (lambda c: c["model"]["language_model"].update(encoder=endless()), "not a dictionary of names"),
    "version": (lambda c: c.update(checkpoint_version=4.0), "checkpoint_version=4.0"),
    "escapes": (lambda c: layers(c).update({"layers.0.\x1b[2J\nall is well": torch.zeros(3)}), "x1b"),
}
"""Changes of a file of a rank."""


@pytest.mark.parametrize(
    ("file", "name"), [("common", name) for name in COMMON] + [("rank", name) for name in RANKS]
)
def test_a_problem_of_a_file_is_named_in_one_line_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if file == "common":
        content, message = COMMON[name]
        torch.save(content, written(tmp_path, None) / "common.pt")
    else:
        change, message = RANKS[name]
        edited(tmp_path, change)
    with pytest.raises(UserError, match=message) as raised:
        imported(tmp_path)
    assert str(raised.value).isprintable()
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("output_layer.bias"), "output_layer.bias is missing"),
        (lambda s: s.update({"binary_head.weight": torch.ones(3, 32)}), r"binary_head.weight is \[3, 32\]"),
        (lambda s: s.update({"output_layer.weight": torch.ones(64, 32)}), "differs from the token table"),
        (lambda s: s.update({"pooler.dense.bias": torch.ones(32).int()}), "only floating-point numbers are"),
        (lambda s: s.update({"encoder.layers.mlp.router.weight": torch.ones(4, 8)}), "Megatron Bridge"),
        (
            lambda s: s.update({"encoder.layers.mlp.odd.weight": torch.ones(4, 8)}),
            "is not part of GPT-2, BERT",
        ),
    ],
    ids=["bias", "classes", "a head", "integers", "a mixture", "an unknown name"],
)
def test_problem_of_a_tensor_is_named(tmp_path: Path, change: Change, message: str) -> None:
    state = bert_state(random_bert())
    change(state)
    with pytest.raises(UserError, match=message):
        imported_bert(tmp_path, state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(iteration=2000), "iteration=7, but 2000 in mp_rank_00_000"),
        (lambda c: c.update(checkpoint_version=2.0), "checkpoint_version=3.0, but 2.0"),
        (lambda c: layers(c)["layers.0.input_layernorm.bias"].add_(1), "norm_bias differs between"),
        (
            lambda c: c["model"]["language_model"]["embedding"]["word_embeddings"]["weight"].add_(1),
            "output layer differs from the token table",
        ),
    ],
    ids=["iteration", "version", "norm", "head"],
)
def test_ranks_that_do_not_belong_together_are_rejected(tmp_path: Path, change: Change, message: str) -> None:
    edited(tmp_path, change, Layout(tp=2, pp=2))
    with pytest.raises(UserError, match=message):
        imported(tmp_path)


@pytest.mark.parametrize(
    ("layout", "missing", "message"),
    [
        (
            Layout(tp=2, pp=2),
            "mp_rank_00_001",
            r"mp_rank_00_001/model_optim_rng\.pt is missing, of tp=2 pp=2 ranks",
        ),
        (Layout(tp=2), "mp_rank_01", r"linear_qkv\.weight is \[48, 32\], \[96, 32\] is needed"),
    ],
    ids=["between others", "the last"],
)
def test_a_missing_rank_is_seen(tmp_path: Path, layout: Layout, missing: str, message: str) -> None:
    shutil.rmtree(written(tmp_path, layout) / missing)
    with pytest.raises(CorruptFileError, match=message):
        imported(tmp_path)


def test_the_folder_of_one_rank_is_rejected(tmp_path: Path) -> None:
    source = written(tmp_path, Layout()) / "mp_rank_00"
    with pytest.raises(UserError, match="one rank of a checkpoint: name its parent"):
        imported(tmp_path, source=str(source))
