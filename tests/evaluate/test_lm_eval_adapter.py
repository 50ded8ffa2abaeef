"""Our checkpoints in lm-eval: the numbers of its own `hf` model."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mlm
from mlm.checkpoint.native.exchange import Ranks
from mlm.corpus.train_tokenizer import train_bpe
from mlm.evaluate import lm_eval as lm_eval_command
from mlm.evaluate.zero_shot.sources import EvalTexts
from mlm.evaluate.zero_shot.wikitext103 import per_article
from mlm.util.errors import UserError
from tests.convert.declared import write_declared
from tests.convert.hf_models import TEXT, add_tokenizer, export_model, import_model, make_model
from tests.finetune.chats import write_llama

lm_eval = pytest.importorskip("lm_eval", reason="pip install 'mlm[lm-eval]'")

from lm_eval.api.model import CachingLM  # noqa: E402
from lm_eval.config.evaluate_config import EvaluatorConfig  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from mlm.evaluate.lm_eval.adapter import MlmLM, settings  # noqa: E402

WORDS = TEXT.replace("\n", " ").split(" ")
DOCUMENTS = [
    {"text": " ".join(WORDS[i:] * (1 + i % 4)), "choices": [" question", " end", " be"], "gold": i % 3}
    for i in range(7)
] + [{"text": "To be", "choices": [" end", " or not", "x"], "gold": 1}]
COMMON = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
test_split: test
"""
TASKS = {
    "cloze": """
output_type: loglikelihood
doc_to_text: "{{text.split(' ')[:-1]|join(' ')}}"
doc_to_target: "{{' '+text.split(' ')[-1]}}"
metric_list: [{metric: perplexity, aggregation: perplexity, higher_is_better: false}, {metric: acc}]
""",
    "choice": """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: brier_score, higher_is_better: false}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
""",
    "generation": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "be"
generation_kwargs: {until: ["be", "not"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """run: a checkpoint; model: the same for `transformers`; tasks: tasks over a local file."""
    folder = tmp_path_factory.mktemp("lm-eval")
    make_model(folder / "source")
    add_tokenizer(folder / "source")
    import_model(folder / "source", folder / "run", verify=False)
    export_model(folder / "run", folder / "model")
    (folder / "tasks").mkdir()
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    for name, text in TASKS.items():
        common = COMMON.format(data=data, cache=folder / "cache")
        (folder / "tasks" / f"{name}.yaml").write_text(f"task: {name}{common}{text}")
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("RANK", raising=False)


def evaluate(model: Any, folder: Path, **arguments: Any) -> tuple[dict[str, float], list[Any]]:
    found = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments or None,
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
        device="cpu" if arguments else None,
    )
    answers = [sample["resps"] for task in TASKS for sample in found["samples"][task]]
    return metrics_of(found["results"]), answers


def metrics_of(results: dict[str, Any]) -> dict[str, float]:
    return {
        f"{task}/{metric}": value
        for task, metrics in results.items()
        for metric, value in metrics.items()
        if isinstance(value, float) and "stderr" not in metric
    }


@pytest.fixture(scope="module")
def of_one_rank(folder: Path) -> tuple[dict[str, float], list[Any]]:
    return evaluate("mlm", folder, ckpt=str(folder / "run"), batch_size=3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "mixtral"])
def test_numbers_are_those_of_the_hf_model(
    folder: Path, of_one_rank: tuple[dict[str, float], list[Any]], kind: str
) -> None:
    """Texts of 2 to 100 tokens for a model that reads 48; float32 sums in another order.

    The Mixtral is exported with a beginning of texts that both models read.
    """
    pytest.importorskip("accelerate", reason="lm-eval's own hf model needs it: pip install 'lm-eval[hf]'")
    model, (ours, texts) = folder / "model", of_one_rank
    if kind == "mixtral":
        source = write_llama(folder / "mixtral", template=None, kind="Mixtral")
        run = import_model(source, folder / "mixtral-run", verify=False)
        model = export_model(run, folder / "mixtral-model")
        ours, texts = evaluate("mlm", folder, ckpt=str(run), batch_size=3)
    theirs, their_texts = evaluate("hf", folder, pretrained=str(model), batch_size=3)
    assert len(ours) == 8
    assert ours == pytest.approx(theirs, rel=1e-4)
    count = len(DOCUMENTS)
    assert texts[-count:] == their_texts[-count:]  # generated


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> MlmLM:
    return MlmLM(ckpt=str(folder / "run"), device="cpu")


def instances(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=one) for one in arguments]


def test_score_of_the_python_api_is_its_rolling_log_likelihood(folder: Path, one_rank: MlmLM) -> None:
    texts = ["To be", TEXT * 2, ""]
    model = mlm.load(folder / "run", device="cpu")
    want = one_rank.loglikelihood_rolling(instances(*((text,) for text in texts)), disable_tqdm=True)
    assert model.score(texts) == pytest.approx(want, rel=1e-6)  # float32


@pytest.mark.parametrize("count", [0, 49])
def test_a_continuation_the_model_cannot_read_is_rejected(one_rank: MlmLM, count: int) -> None:
    with pytest.raises(UserError, match=rf"a continuation of {count} tokens .* max_length=48"):
        one_rank._loglikelihood_tokens([(None, [3], [5] * count)])


def test_ranks_agree_on_all_requests_before_the_first_group_is_generated(
    one_rank: MlmLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank whose cache holds one of two groups would leave the other waiting for it in the second."""
    greedy = {"until": [], "do_sample": False}
    asked = instances(("To be", greedy | {"max_gen_toks": 1}), ("To be", greedy | {"max_gen_toks": 2}))
    of_another_rank: list[Any] = []

    def record(_: Ranks, value: Any) -> list[Any]:
        of_another_rank.append(value)
        return [value]

    monkeypatch.setattr(Ranks, "all_gather", record)
    one_rank.generate_until(asked[:1], disable_tqdm=True)
    others = iter(of_another_rank)
    monkeypatch.setattr(Ranks, "all_gather", lambda _, value: [value, next(others)])
    with pytest.raises(UserError, match="the ranks have different requests"):
        one_rank.generate_until(asked, disable_tqdm=True)


@pytest.mark.parametrize(
    "arguments, problem",
    [
        ({"max_gen_toks": 9, "num_beams": 4}, "num_beams"),
        ({"max_gen_toks": 9, "repetition_penalty": 0}, "repetition_penalty=0 must be greater"),
        ({"max_gen_toks": 48}, "max_gen_toks=48: use 1 to 47"),
    ],
)
def test_generation_we_do_not_have_is_rejected(
    one_rank: MlmLM, arguments: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        one_rank.generate_until(instances(("To be", {"until": ["x"]} | arguments)), disable_tqdm=True)


@pytest.mark.parametrize(
    "arguments, problem",
    [
        ({"tp": 0}, "tp=0 must be greater than 0"),
        ({"batch_size": "many"}, "batch_size"),
        ({"device": "cuda:1"}, "device=cuda:1: .* CUDA_VISIBLE_DEVICES=1"),
    ],
    ids=str,
)
def test_a_mistake_in_the_arguments_names_its_key(
    folder: Path, arguments: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        settings({"ckpt": str(folder / "run")} | arguments)


def test_arguments_say_what_the_flags_of_lm_eval_mean(folder: Path) -> None:
    ckpt = {"ckpt": str(folder / "run")}
    flags = {"precision": "bf16", "batch_size": "16", "max_batch_size": 64, "device": "cpu:0"}
    config, _ = settings(ckpt | flags)
    assert (config.precision.dtype, config.batch_size, config.dist.device) == ("bf16", 16, "cpu")
    # lm-eval's command passes its default device on machines without a GPU too
    default = EvaluatorConfig.__dataclass_fields__["device"].default
    config, _ = settings(ckpt | {"batch_size": "auto:4", "device": default})
    assert (config.batch_size, config.dist.device) == (8, "auto")


@pytest.mark.parametrize("as_text", [False, True])
def test_model_args_count_more_than_the_flags_of_lm_eval(folder: Path, as_text: bool) -> None:
    """Its command passes batch_size and device also where model_args hold them."""
    flags = {"batch_size": 1, "max_batch_size": None, "device": "cuda:0"}
    if as_text:
        model = MlmLM.create_from_arg_string(f"ckpt={folder / 'run'},batch_size=4,device=cpu", flags)
    else:
        said = {"ckpt": str(folder / "run"), "batch_size": 4, "device": "cpu"}
        model = MlmLM.create_from_arg_obj(said, flags)
    assert (model.settings.batch_size, model.settings.dist.device) == (4, "cpu")


def test_a_text_without_context_is_scored_after_the_token_that_mlm_eval_takes(tmp_path: Path) -> None:
    """A vocabulary with a beginning of its own: <s> is not the end of a document."""
    make_model(tmp_path)
    content = json.loads(train_bpe([TEXT] * 5, 300).content)
    content["added_tokens"].append({**content["added_tokens"][0], "id": 300, "content": "<s>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    model = MlmLM(ckpt=str(tmp_path), device="cpu")
    text = EvalTexts(name="x", form="a form", texts=("To be",), locations=("x:1",), digest="xxh3:0")
    article = per_article(text, model.tokenizer, seq_length=9, limit=None)
    assert model.prefix_token_id == article.requests[0].tokens[0] == 300 != model.eot_token_id


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_replicas_share_the_requests_of_one_rank(
    folder: Path, of_one_rank: tuple[dict[str, float], list[Any]], tmp_path: Path
) -> None:
    """Two ranks of torchrun write the samples of one process, once."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "mlm.evaluate.lm_eval", "run", "--model", "mlm", "--model_args"]
    command += [f"ckpt={folder / 'run'},device=cpu", "--tasks", ",".join(TASKS), "--log_samples"]
    command += ["--include_path", str(folder / "tasks"), "--output_path", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("|cloze") == 1
    (receipt,) = tmp_path.rglob("results_*.json")
    metrics, answers = of_one_rank
    assert metrics_of(json.loads(receipt.read_text())["results"]) == pytest.approx(metrics, rel=1e-5)
    found = list[Any]()
    for task in TASKS:
        (samples,) = tmp_path.rglob(f"samples_{task}_*.jsonl")
        found += [json.loads(line)["resps"] for line in samples.read_text().splitlines()]
    for two, one in zip(leaves(*found), leaves(*answers), strict=True):
        assert two == (pytest.approx(one, rel=1e-5) if isinstance(one, float) else one)


def leaves(*values: Any) -> list[float | str]:
    """All numbers and texts of nested answers, in order; lm-eval writes numbers as texts."""
    found = list[float | str]()
    for value in values:
        if isinstance(value, list | tuple):
            found += leaves(*value)
        else:
            try:
                found.append(float(str(value)))
            except ValueError:
                found.append(str(value))
    return found


def test_ranks_of_several_hosts_are_rejected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "1"}
    for key, value in values.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UserError, match="WORLD_SIZE=2: lm-eval runs on the ranks of one host"):
        settings({"ckpt": str(folder / "run")})


def test_ranks_with_other_caches_are_an_error(
    one_rank: MlmLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm-eval does not call the model of a rank whose cache holds all requests."""
    monkeypatch.setattr(Ranks, "all_gather", lambda _, value: [value, "of another rank"])
    with pytest.raises(UserError, match="delete the caches"):
        CachingLM(one_rank, str(tmp_path / "cache.db"))


def test_a_mistake_ends_the_command_with_2_and_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    command = SimpleNamespace(cli_evaluate=lambda: MlmLM(ckpt=str(folder / "run"), batch_size=0))
    monkeypatch.setattr(lm_eval_command, "import_module", lambda name: command)
    assert lm_eval_command.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mlm-lm-eval: batch_size=0")


@pytest.mark.parametrize(
    ("style", "add_bos_token"), [("qwen", None), ("qwen", True), ("llama3", None), ("llama3", False)]
)
def test_a_text_begins_as_in_the_hf_model(tmp_path: Path, style: str, add_bos_token: bool | None) -> None:
    """With the tokenizer's own first token or without, by lm-eval's own model on the same folder."""
    pytest.importorskip("accelerate", reason="lm-eval's own hf model needs it: pip install 'lm-eval[hf]'")
    from lm_eval.models.huggingface import HFLM

    source = write_declared(tmp_path / "source", style)
    ours = MlmLM(ckpt=str(source), device="cpu", add_bos_token=add_bos_token)
    theirs = HFLM(pretrained=str(source), device="cpu", batch_size=1, add_bos_token=add_bos_token)
    texts = ["To be, or not", "question", "whether 'tis nobler"]
    assert [ours.tok_encode(text) for text in texts] == [theirs.tok_encode(text) for text in texts]
    assert (ours.prefix_token_id, ours.eot_token_id) == (theirs.prefix_token_id, theirs.eot_token_id)
    pairs = instances(*((text, " end") for text in texts), ("", " end"))
    found, want = (each.loglikelihood(pairs, disable_tqdm=True) for each in (ours, theirs))
    assert [score for score, _ in found] == pytest.approx([score for score, _ in want], rel=1e-5)
    rolling = instances(*((text,) for text in texts))
    found, want = (each.loglikelihood_rolling(rolling, disable_tqdm=True) for each in (ours, theirs))
    assert found == pytest.approx(want, rel=1e-5)
    asked = instances(
        *((text, {"until": ["\n\n\n"], "max_gen_toks": 16, "do_sample": False}) for text in texts)
    )
    assert ours.generate_until(asked, disable_tqdm=True) == theirs.generate_until(asked, disable_tqdm=True)
