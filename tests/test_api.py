"""The public API: its surface, and a loaded model against `transformers` and `mlm generate`."""

import ast
import dataclasses
import inspect
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hatchling.builders.wheel import WheelBuilder
from torch import Tensor
from torch.distributed import ReduceOp

import mlm
from mlm.cli.entry import main
from mlm.inference.scoring import Request, score
from mlm.parallel.mesh import ParallelContext
from tests.convert.hf_berts import make_bert
from tests.convert.hf_models import TEXT, add_tokenizer, make_model
from tests.data.chats import TALK
from tests.finetune.chats import write_llama
from tests.ranks import run_on_ranks

ROOT = Path(__file__).resolve().parent.parent
LINEAR = "(in_features, out_features, *, tp, sequence_parallel=False, init_std=0.02, init_seed=0, bias=True"
STAGE = (
    "(config, *, tp=None, dtype=torch.float32, recompute='none', sequence_parallel=False, stage=None, "
    "cp=None, experts=None)"
)
SURFACE = {
    "AuditSubject": "module",
    "BERT": STAGE,
    "GPT2": STAGE,
    "ColumnParallelLinear": f"{LINEAR}, replicas=1)",
    "GradientReducer": ("(parameters, dp, bucket_bytes=None, late=(), keep_buffers=False, joined=())"),
    "Model": "(trained, ctx, tokenizer=None)",
    "Model.chat": "(self, messages, *, tools=None, chat_template=None, stop=(), **options)",
    "Model.generate": ("(self, prompt, *, stop=(), special_tokens=False, **options)"),
    "Model.logits": "(self, tokens)",
    "Model.predict": "(self, texts, *, batch_size=8)",
    "Model.score": "(self, texts, *, batch_size=8)",
    "ModelConfig": "num_layers, hidden_size, num_heads",
    "ModelFamily": "model, causal, objective, samples, head_products, protocol",
    "OptimizerConfig": "",
    "ParallelContext": "",
    "Replicated": "",
    "RowParallelLinear": f"{LINEAR})",
    "ScheduleConfig": "",
    "Split": "dim",
    "VocabParallelEmbedding": (
        "(vocab_size, padded_vocab_size, hidden_size, *, tp, is_tied_copy=False, sequence_parallel=False, "
        "init_std=0.02, init_seed=0)"
    ),
    "all_reduce": f"(x, axis, op={ReduceOp.SUM!r})",
    "audit": "(build, *, tp=1, pp=1, dp=1, cp=1, steps=2, timeout_s=60.0)",
    "build_mesh": "(*, tp=1, pp=1, cp=1, device='auto', timeout_s=600.0)",
    "build_optimizer": "(shards, config, replicas=None, width=1.0)",
    "clip_factor": "(norm, max_norm)",
    "copy_to_tp": "(x, axis)",
    "export_hf": "(ckpt, out, *, max_file_gb=5.0, verify=True, merge=False)",
    "gather_sequence": "(x, axis)",
    "gradient_norm": "(shards, ctx, prefix='')",
    "init_parameters": "(model, seed, tp=None)",
    "learning_rate": "(step, optimizer, schedule, steps)",
    "parameter_shards": "(model, tp)",
    "scale_gradients": "(shards, factor)",
    "set_lr": "(optimizer, lr)",
    "import_hf": "(source, out, *, base=None, revision=None, verify=True)",
    "linear_cross_entropy": "(hidden, labels, table, scale, chunk_bytes=None)",
    "load": ("(ckpt, *, tp=1, pp=1, precision='fp32', device='auto', tokenizer=None, ctx=None)"),
    "reduce_from_tp": "(x, axis)",
    "scatter_sequence": "(x, axis)",
    "sum_replicated_gradients": "(shards, tp, *, sequence_parallel=True)",
    "trust": "(*modules)",
}
"""Parameters with their defaults; of settings and families, the fields that must be given."""


def parameters_of(found: Any) -> str:
    if dataclasses.is_dataclass(found):
        missing = dataclasses.MISSING
        return ", ".join(
            f.name for f in dataclasses.fields(found) if f.default is missing and f.default_factory is missing
        )
    signature = inspect.signature(found)
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


class TestSurface:
    """Names, signatures, and the cost of an import."""

    def test_names_and_signatures_are_frozen(self) -> None:
        found = {name: parameters_of(getattr(mlm, name)) for name in mlm.__all__}
        methods = [
            name for name, value in vars(mlm.Model).items() if inspect.isfunction(value) and name[0] != "_"
        ]
        assert (
            found | {f"Model.{name}": parameters_of(getattr(mlm.Model, name)) for name in methods} == SURFACE
        )

    def test_type_checkers_see_the_names_that_are_imported_when_used(self) -> None:
        tree = ast.parse(Path(mlm.__file__).read_text())
        (block,) = [node for node in tree.body if isinstance(node, ast.If)]
        imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
        homes = {name.name: node.module for node in imports for name in node.names}
        assert sorted(homes) == sorted(mlm.__all__)
        for name, module in homes.items():
            assert getattr(mlm, name) is getattr(sys.modules[str(module)], name)

    def test_import_needs_no_torch(self) -> None:
        code = "import sys, mlm, mlm.models; assert mlm.__version__; assert 'torch' not in sys.modules"
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

    def test_wheel_holds_the_marker_of_typed_packages(self) -> None:
        files = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
        assert {"mlm/py.typed", "mlm/__init__.py"} <= files
        assert {
            f"mlm/tracking/page/assets/uPlot.{end}" for end in ("iife.min.js", "min.css", "LICENSE")
        } <= files
        assert "mlm/tracking/page/templates/page.html" in files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random GPT-2 of `transformers` with a tokenizer."""
    folder = tmp_path_factory.mktemp("gpt2")
    make_model(folder, initializer_range=0.3)
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> mlm.Model:
    return mlm.load(folder, device="cpu")


def tokens_of(length: int = 20) -> Tensor:
    return torch.randint(331, (3, length), generator=torch.Generator().manual_seed(0))


PROMPTS = ["To be", "or not", ""]


class TestLogits:
    """[B, S] -> [B, S, V]."""

    def test_they_are_those_of_transformers(self, folder: Path, model: mlm.Model) -> None:
        theirs = make_model(folder, initializer_range=0.3)  # the same seed: the same weights
        with torch.no_grad():
            want = theirs(tokens_of()).logits
        found = model.logits(tokens_of())
        assert (found.shape, found.dtype) == ((3, 20, 331), torch.float32)
        # float32 sums in another order
        torch.testing.assert_close(found, want, rtol=0, atol=1e-5 * float(want.abs().max()))

    @pytest.mark.parametrize("precision", ["bf16", "torch.bfloat16", torch.bfloat16])
    def test_half_precision_keeps_half_the_weights_and_gives_float32(
        self, folder: Path, model: mlm.Model, precision: str | torch.dtype
    ) -> None:
        half = mlm.load(folder, device=torch.device("cpu"), precision=precision)
        assert (half.device, half.dtype) == (torch.device("cpu"), torch.bfloat16)
        assert (half.config.num_layers, half.config.vocab_size) == (3, 331)
        assert not any(module.training for chunk in half.chunks for module in chunk.modules())
        assert {p.dtype for chunk in half.chunks for p in chunk.parameters()} == {torch.bfloat16}
        found, want = half.logits(tokens_of()), model.logits(tokens_of())
        assert found.dtype == torch.float32
        # bfloat16 has eight bits, in each of some ten operations
        assert (found - want).abs().max() < 0.1 * want.abs().max()


class TestMaskedLogits:
    """Logits of a BERT's masked-LM head."""

    @pytest.mark.parametrize(
        ("family", "name"), [("bert", "ForPreTraining"), ("megatron-bert", "ForMaskedLM")]
    )
    def test_they_are_those_of_transformers(self, tmp_path: Path, family: str, name: str) -> None:
        theirs = make_bert(tmp_path, family, name, initializer_range=0.3)
        with torch.no_grad():
            found = theirs(tokens_of())
        want = found.prediction_logits if name == "ForPreTraining" else found.logits
        logits = mlm.load(tmp_path, device="cpu").logits(tokens_of())
        assert (logits.shape, logits.dtype) == ((3, 20, 331), torch.float32)
        # float32 sums in another order
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-5 * float(want.abs().max()))


Used = tuple[Tensor, list[str], list[float]]


def used(model: mlm.Model) -> Used:
    return model.logits(tokens_of()), model.generate(PROMPTS, max_new_tokens=12), model.score(PROMPTS)


def used_on_rank(ctx: ParallelContext, folder: Path) -> Used:
    model = mlm.load(folder, tp=ctx.tp.size, pp=ctx.pp.size, precision="fp64", device="cpu")
    layout = [(c.tp.size, c.pp.size, c.dp.size) for c in (model.ctx, ctx)]
    assert layout[0] == layout[1]
    return used(model)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_results_are_equal_on_every_rank_and_layout(folder: Path, layout: dict[str, int]) -> None:
    logits, texts, scores = used(mlm.load(folder, precision="fp64", device="cpu"))
    for found in run_on_ranks(used_on_rank, folder, **layout):
        torch.testing.assert_close(found[0], logits)  # float64
        assert found[1] == texts
        assert found[2] == pytest.approx(scores, rel=1e-12)


class TestGenerate:
    """Continuations, which are those of the command."""

    @pytest.mark.parametrize(
        "options",
        [{"temperature": 0.0, "stop": ["e"]}, {"top_k": 5, "seed": 7}, {"no_repeat_ngram_size": 2}],
        ids=str,
    )
    def test_texts_are_those_of_the_command(
        self, folder: Path, model: mlm.Model, tmp_path: Path, options: dict[str, Any]
    ) -> None:
        (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"text": p}) + "\n" for p in PROMPTS))
        typed = [f"{key}={json.dumps(value)}" for key, value in options.items()]
        files = [f"prompts={tmp_path}/prompts.jsonl", f"out={tmp_path}/out.jsonl"]
        command = ["generate", f"ckpt={folder}", *files, "max_new_tokens=12", "dist.device=cpu", *typed]
        assert main([*command, "dist.threads_per_rank=1"]) == 0
        want = [
            json.loads(line)["continuation"] for line in (tmp_path / "out.jsonl").read_text().splitlines()
        ]
        assert model.generate(PROMPTS, max_new_tokens=12, **options) == want

    def test_a_repeated_prompt_is_sampled_anew(self, model: mlm.Model) -> None:
        one, other = model.generate(["To be", "To be"], max_new_tokens=8)
        assert one == model.generate("To be", max_new_tokens=8) != other


class TestScore:
    """Log-likelihoods of documents."""

    def test_it_is_the_sum_of_log_probabilities(self, folder: Path) -> None:
        model = mlm.load(folder, precision="fp64", device="cpu")
        ids = model.tokenizer.encode("To be, or not to be")
        read = torch.tensor([[model.tokenizer.prefix_id, *ids[:-1]]])
        logs = model.logits(read)[0].log_softmax(-1)
        want = logs.gather(1, torch.tensor(ids)[:, None]).sum().item()
        assert model.score("To be, or not to be") == pytest.approx(want, rel=1e-12)

    def test_each_token_of_a_long_document_is_scored_once(self, folder: Path) -> None:
        """Windows of max_positions=48: two whole ones, and the last moved back to be full."""
        model = mlm.load(folder, precision="fp64", device="cpu")
        ids = model.tokenizer.encode(TEXT * 3)
        assert 96 < len(ids) < 144
        starts = [
            ([model.tokenizer.prefix_id, *ids[:48]], 1),
            (ids[47:96], 1),
            (ids[-49:], 49 - len(ids[96:])),
        ]
        requests = [Request(np.array(tokens), first) for tokens, first in starts]
        scores = score(model.trained, requests, batch_size=1, ctx=model.ctx)
        assert sum(s.tokens for s in scores) == len(ids)
        assert model.score([TEXT * 3]) == [pytest.approx(-sum(s.loss for s in scores), rel=1e-12)]

    def test_an_empty_document_has_zero(self, model: mlm.Model) -> None:
        assert model.score(["", "To be"]) == [0.0, pytest.approx(model.score("To be"), rel=1e-6)]
        assert math.copysign(1, model.score("")) == 1


class TestErrors:
    """Mistakes, each a ValueError of one line."""

    @pytest.mark.parametrize("name", ["ForPreTraining", "Model"])
    def test_a_bert_continues_no_text_and_without_its_head_predicts_no_tokens(
        self, tmp_path: Path, name: str
    ) -> None:
        make_bert(tmp_path, "bert", name)
        model = mlm.load(tmp_path, device="cpu")
        uses = [lambda: model.generate("To be"), lambda: model.score("To be")]
        for use in uses if name == "ForPreTraining" else [*uses, lambda: model.logits([[1]])]:
            with pytest.raises(ValueError, match=r"predicts no tokens|does not read from left to right"):
                use()

    def test_a_pretrained_model_has_no_answers(self, model: mlm.Model) -> None:
        with pytest.raises(ValueError, match="was not finetuned on a task"):
            model.predict("To be")

    @pytest.mark.parametrize("name", ["runs/nothere", "corpus/train.bin"])
    def test_what_is_no_model_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        (tmp_path / "corpus").mkdir()
        (tmp_path / "corpus/train.bin").touch()
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ValueError, match=name) as caught:
            mlm.load(name)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("call", "begins"),
        [
            (lambda model: model.logits(torch.zeros(1, 3)), "tokens: float32 [1, 3], not int64"),
            (lambda model: model.logits([[0.5]]), "tokens: float32 [1, 1], not int64"),
            (
                lambda model: model.logits(torch.zeros(1, 49).long()),
                "tokens: S=49 is more than max_positions=48",
            ),
            (lambda model: model.logits(torch.full((1, 3), 331)), "tokens: ids must be 0 to 330"),
            (
                lambda model: model.logits(torch.zeros(0, 3).long()),
                "tokens: an empty batch, int64 [0, 3]; give a sequence",
            ),
            (lambda model: model.generate("", max_new_tokens=0), "max_new_tokens=0 must be greater than 0"),
            (
                lambda model: model.generate("", max_new_tokens=3, min_new_tokens=4),
                "min_new_tokens=4 is more than max_new_tokens=3",
            ),
            (lambda model: model.generate("", temperature=-1.0), "temperature=-1.0 must be 0 or more"),
            (lambda model: model.generate("", stop=""), 'stop="": would end'),
            (lambda model: model.generate(["To be", 7]), "prompt: "),
            (lambda model: model.score(None), "texts: "),
            (lambda model: mlm.load(model.path, tp=2), "tp=2 pp=1: does not divide world_size=1; start 2"),
            (
                lambda model: mlm.load(model.path, precision="fp8"),
                "precision=fp8: no such number format; use",
            ),
            (lambda model: mlm.load(model.path, device="tpu"), "device=tpu: no such device; use auto, cpu"),
            (lambda model: mlm.load(model.path, tokenizer="none.json"), "no tokenizer at none"),
            (lambda model: mlm.load(model.path, ctx=7), "ctx: an integer"),
            (lambda model: mlm.load(model), "ckpt: a Model"),
            (lambda model: mlm.load(model.path, device=0), "device: an integer, not one of auto, cpu, cuda"),
            (lambda model: mlm.load("s3://bucket/run"), "ckpt=s3://bucket/run: "),
            (lambda model: mlm.export_hf(model.path, None), "out: null"),
            (lambda model: model.logits(None), "tokens: "),
            (lambda model: model.score("To be", batch_size="8"), "batch_size='8': "),
            (lambda model: model.score(["\ud800"]), "texts: holds half a surrogate pair (U+D800)"),
            (lambda model: mlm.ColumnParallelLinear(4, 8, tp=None), "tp: null, not an Axis"),
        ],
    )
    def test_a_wrong_argument_is_named_in_one_line(
        self, model: mlm.Model, call: Callable[[mlm.Model], object], begins: str
    ) -> None:
        with pytest.raises((TypeError, ValueError)) as caught:
            call(model)
        assert str(caught.value).startswith(begins)
        assert "\n" not in str(caught.value)

    def test_a_prompt_of_which_only_the_end_is_read_is_named(
        self, model: mlm.Model, caplog: pytest.LogCaptureFixture
    ) -> None:
        model.generate(["a", "be or not to " * 200], max_new_tokens=1)
        assert re.search(r"prompt 1: of its \d+ tokens the last \d+ are read", caplog.text)
        assert "prompt 0" not in caplog.text

    def test_without_a_tokenizer_there_are_logits_and_no_text(self, tmp_path: Path) -> None:
        make_model(tmp_path)
        model = mlm.load(tmp_path, device="cpu")
        assert model.logits(tokens_of()).isfinite().all()
        problem = (
            "no tokenizer is saved with it; pass tokenizer=FILE or FOLDER of the tokenizer it was trained"
        )
        with pytest.raises(ValueError, match=problem):
            model.generate("To be")


class TestChat:
    """Answers to conversations, which are those of `mlm generate chat=true`."""

    @pytest.fixture(scope="class")
    @staticmethod
    def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_llama(tmp_path_factory.mktemp("chat") / "llama")

    def test_answers_are_those_of_the_command(self, llama: Path, tmp_path: Path) -> None:
        talks = [TALK[:3], [{"role": "system", "content": "a cat"}, *TALK[:1]]]
        (tmp_path / "talks.jsonl").write_text("".join(json.dumps({"messages": t}) + "\n" for t in talks))
        files = [f"prompts={tmp_path}/talks.jsonl", f"out={tmp_path}/out.jsonl", "dist.device=cpu"]
        command = ["generate", f"ckpt={llama}", "chat=true", "max_new_tokens=8", "top_k=5", *files]
        assert main([*command, "dist.threads_per_rank=1"]) == 0
        lines = (tmp_path / "out.jsonl").read_text().splitlines()
        want = [json.loads(line)["continuation"] for line in lines]
        assert mlm.load(llama, device="cpu").chat(talks, max_new_tokens=8, top_k=5) == want

    def test_a_text_is_a_message_of_the_user_and_a_list_of_messages_one_conversation(
        self, llama: Path
    ) -> None:
        model, talk = mlm.load(llama, device="cpu"), [{"role": "user", "content": "sat?"}]
        answer = model.chat("sat?", max_new_tokens=8)
        assert isinstance(answer, str)
        assert model.chat(talk, max_new_tokens=8) == answer
        assert model.chat([talk], max_new_tokens=8) == [answer] == model.chat(["sat?"], max_new_tokens=8)
        assert answer != model.generate("sat?", max_new_tokens=8)

    @pytest.mark.parametrize(
        ("messages", "problem"),
        [
            ([], "messages: no list of messages"),
            ([{"role": "robot", "content": "sat?"}], "messages: message 1: role='robot' is unknown"),
            ([[{"role": "user"}]], "messages: message 1: its 'content' is not text"),
        ],
    )
    def test_what_is_no_conversation_is_one_line(self, llama: Path, messages: Any, problem: str) -> None:
        with pytest.raises(ValueError, match=problem) as caught:
            mlm.load(llama, device="cpu").chat(messages)
        assert "\n" not in str(caught.value)

    def test_a_model_without_a_template_takes_one_from_a_file(self, model: mlm.Model, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="holds no chat template"):
            model.chat("To be")
        file = tmp_path / "plain.jinja"
        file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
        want = model.generate("To be", max_new_tokens=5)
        assert model.chat("To be", chat_template=file, max_new_tokens=5) == want


def mesh_on_rank(ctx: ParallelContext, folder: Path) -> str:
    """The error of loading on ranks that share sequences."""
    assert (ctx.cp.size, ctx.replicas.size) == (2, 2)
    mesh = mlm.build_mesh(cp=2, device="cpu")
    assert (mesh.cp.rank, mesh.cp.size, mesh.dp.size) == (ctx.cp.rank, 2, 1)
    with pytest.raises(ValueError, match="tp=1 pp=1 cp=4: does not divide world_size=2; start 4 ranks"):
        mlm.build_mesh(cp=4)
    with pytest.raises(ValueError) as caught:
        mlm.load(folder, ctx=mesh)
    return str(caught.value)


def test_a_mesh_may_split_sequences_and_a_loaded_model_reads_whole_ones(folder: Path) -> None:
    said = "ctx: cp=2: loaded models read whole sequences; build a mesh with cp=1"
    assert run_on_ranks(mesh_on_rank, folder, cp=2) == [said] * 2


def test_import_and_export_keep_the_logits_and_print_nothing(
    folder: Path, model: mlm.Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = mlm.import_hf(folder, tmp_path / "run")
    back = mlm.export_hf(run, tmp_path / "back")
    assert capsys.readouterr().out == ""
    for path in (run, back):
        assert torch.equal(mlm.load(path, device="cpu").logits(tokens_of()), model.logits(tokens_of()))
    with pytest.raises(ValueError, match="is there already"):
        mlm.export_hf(run, back)
    with pytest.raises(ValueError, match="is there already"):
        mlm.import_hf(folder, run)


def test_gpt2_of_one_process_trains_without_layout_or_scale() -> None:
    """A model made of its settings alone returns the mean loss of the scored tokens."""
    config = mlm.ModelConfig(num_layers=1, hidden_size=16, num_heads=2, max_positions=8, vocab_size=100)
    model = mlm.GPT2(config)
    mlm.init_parameters(model, seed=1)
    tokens = torch.arange(14).view(2, 7)
    labels = tokens.roll(-1, 1).index_fill(1, torch.tensor([6]), -100)  # [B, S]
    loss = model(tokens, labels)
    loss.backward()
    assert loss.item() == pytest.approx(model.losses(tokens, labels).sum().item() / 12, rel=1e-6)
    assert model.position.weight.grad.abs().sum() > 0


@pytest.mark.slow
def test_groups_are_destroyed_as_the_program_ends(tmp_path: Path) -> None:
    """Threads of gloo that outlive it abort it now and then: exit code 134."""
    program = tmp_path / "program.py"
    program.write_text(
        "import atexit, os, torch.distributed as d, mlm\n"
        "atexit.register(lambda: os.write(1, f'initialised {d.is_initialized()}\\n'.encode()))\n"
        "mlm.build_mesh(tp=2, device='cpu')\n"
    )
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launcher, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.count("initialised False") == 2
