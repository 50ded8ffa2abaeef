"""The numbers of lm-eval's protocols are those of lm-eval's own `hf` model on the same files."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlm.cli.evaluate import zero_shot as evaluate
from mlm.cli.evaluate.settings import AllDataConfig, EvalAllConfig
from mlm.evaluate.zero_shot import sources
from mlm.parallel.mesh import ParallelContext
from tests.evaluate.zero_shot.texts import (
    PASSAGES,
    SEQ_LENGTH,
    WIKITEXT,
    write_lambada,
    write_trained_model,
    write_wikitext,
)

pytest.importorskip("lm_eval", reason="lm-eval is not installed")
pytest.importorskip("accelerate", reason="lm-eval's `hf` model needs accelerate, which is not installed")
MIXED = (*PASSAGES, "of the\nsea floor", "one\ntwo")
LOWER = ("the cat sat on the mat", "`` late , '' she said , `` late ''", "more and more and more")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learnt some of the passages, and the files."""
    made = tmp_path_factory.mktemp("lm_eval")
    write_trained_model(made / "model", PASSAGES[::2])
    write_wikitext(made)
    write_lambada(made, MIXED)
    write_lambada(made, LOWER, "standard.jsonl")
    return made


@pytest.fixture(scope="module")
def theirs(folder: Path) -> dict[str, dict[str, Any]]:
    """lm-eval's scores, by task. Its task files are used unchanged; only the data is local."""
    import lm_eval.tasks
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

    pages = "".join(json.dumps({"page": page}) + "\n" for page in sources.articles(WIKITEXT))
    (folder / "pages.jsonl").write_text(pages)
    shipped = Path(lm_eval.tasks.__file__).parent
    tasks = folder / "tasks"
    tasks.mkdir()
    for name, file, data in (
        ("wikitext", "wikitext/wikitext.yaml", "pages.jsonl"),
        ("lambada_openai", "lambada/lambada_openai.yaml", "lambada.jsonl"),
        ("lambada_standard", "lambada/lambada_standard.yaml", "standard.jsonl"),
    ):
        (tasks / f"{name}.yaml").write_text(
            f"include: {shipped / file}\ntask: local_{name}\ntag: []\n"
            f"dataset_path: json\ndataset_name: null\ntraining_split: null\nvalidation_split: null\n"
            f"dataset_kwargs:\n  data_files:\n    test: {folder / data}\n"
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "model" / "tokenizer.json"),
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
    )
    model = HFLM(
        pretrained=GPT2LMHeadModel.from_pretrained(folder / "model").eval(),
        tokenizer=tokenizer,
        max_length=SEQ_LENGTH,
        batch_size=2,
    )
    names = ["local_wikitext", "local_lambada_openai", "local_lambada_standard"]
    manager = lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISABLE_MULTIPROC", "1")  # forks of this process could wait for locks of its threads
        found = simple_evaluate(model=model, tasks=names, task_manager=manager, bootstrap_iters=200)
    return {name.removeprefix("local_"): found["results"][name] for name in names}


@pytest.fixture(scope="module")
def ours(folder: Path) -> dict[str, dict[str, Any]]:
    """Scores of `mlm eval all` by lm-eval's protocol, by task."""
    config = EvalAllConfig(
        ckpt=str(folder / "model"),
        out=str(folder / "eval-all.json"),
        overlapping_eval=5,
        seq_length=SEQ_LENGTH,
        data=AllDataConfig(
            wikitext103=str(folder / "wiki.test.tokens"),
            lambada=str(folder / "lambada.jsonl"),
            lambada_standard=str(folder / "standard.jsonl"),
        ),
    )
    assert evaluate.preflight(config) == []
    evaluate.run(config, ParallelContext())
    results = json.loads((folder / "eval-all.json").read_text())["results"]
    return {r["task"]: r["metrics"] for r in results if r["protocol"] == "lm-eval"}


METRICS = {
    "wikitext": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    **dict.fromkeys(("lambada_openai", "lambada_standard"), ("acc", "perplexity")),
}


def test_metrics_and_the_error_of_accuracy_are_those_of_lm_eval(
    ours: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]]
) -> None:
    found = {f"{task} {name}": ours[task][name]["value"] for task in METRICS for name in METRICS[task]}
    want = {f"{task} {name}": theirs[task][f"{name},none"] for task in METRICS for name in METRICS[task]}
    assert found == pytest.approx(want, rel=1e-4)
    assert 0 < want["lambada_openai acc"] < 1
    expected = theirs["lambada_openai"]["acc_stderr,none"]
    assert ours["lambada_openai"]["acc"]["standard_error"] == pytest.approx(expected, rel=1e-9)
