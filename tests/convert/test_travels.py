"""What travels with the weights: special tokens as declared, settings of generating and reading, the card."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml  # type: ignore[import-untyped]

import mlm
from mlm.cli.entry import main
from mlm.cli.pretrain.run import prepare_directory
from mlm.corpus.build import run_build
from mlm.corpus.config import DataBuildConfig
from mlm.data.config import DataConfig
from mlm.data.corpus_files import tokenizer_beside
from mlm.data.indexed import IndexedDataset
from mlm.data.receipt import read_receipt
from mlm.data.tokenizer import Tokenizer
from mlm.runs.config import PretrainConfig
from tests.convert.declared import CARD, STYLES, write_declared
from tests.convert.hf_models import MODEL, export_model, import_model
from tests.data.chats import CHATML
from tests.finetune.chats import write_llama

PROMPTS = ["To be", "question: whether", "<s>old</s> x"]


@pytest.fixture(scope="module", params=STYLES)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """source: a folder of `transformers`; run: imported; exported: again for `transformers`."""
    folder = tmp_path_factory.mktemp(request.param)
    source = write_declared(folder / "source", request.param)
    run = import_model(source, folder / "run", verify=False)
    return {"source": source, "run": run, "exported": export_model(run, folder / "exported")}


def theirs(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(str(folder))


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.parametrize("place", ["source", "exported"])
def test_special_tokens_are_those_declared(folders: dict[str, Path], place: str) -> None:
    source, config = theirs(folders["source"]), read(folders["source"] / "config.json")
    ours = mlm.load(folders[place], device="cpu").tokenizer
    assert ours.bos_id == config["bos_token_id"]
    assert ours.bos_id in (source.bos_token_id, source.eos_token_id)
    ends = read(folders["source"] / "generation_config.json").get("eos_token_id", config["eos_token_id"])
    assert ours.end_ids == set(ends if isinstance(ends, list) else [ends])
    text = "a To be"
    assert ours.encode_prompt(text) == source(text)["input_ids"]
    assert ours.adds_bos == (source("a")["input_ids"][0] == source.bos_token_id)


def test_an_ordinary_piece_stays_one(tmp_path: Path) -> None:
    """<s> is a piece of its vocabulary, as 128245 of Qwen 2, and no special token before or after."""
    source = write_declared(tmp_path / "source", "qwen")
    exported = export_model(import_model(source, tmp_path / "run", verify=False), tmp_path / "exported")
    ours = Tokenizer.load(source)
    assert "<s>" in ours
    for text in PROMPTS:
        assert ours.encode(text) == theirs(source)(text)["input_ids"] == theirs(exported)(text)["input_ids"]


def test_an_export_declares_what_the_import_did(folders: dict[str, Path]) -> None:
    source, exported = folders["source"], folders["exported"]
    found, want = (read(folder / "tokenizer_config.json") for folder in (exported, source))
    want.pop("chat_template", None)
    assert want.items() <= found.items()
    config, generation = (
        [read(folder / name) for folder in (exported, source)]
        for name in ("config.json", "generation_config.json")
    )
    for key in ("bos_token_id", "pad_token_id"):
        assert config[0].get(key) == config[1].get(key)
    assert generation[1].items() <= generation[0].items()
    tokenizers = [theirs(folder) for folder in (exported, source)]
    assert tokenizers[0].special_tokens_map == tokenizers[1].special_tokens_map
    assert tokenizers[0].chat_template == tokenizers[1].chat_template
    models = [transformers.GenerationConfig.from_pretrained(str(folder)) for folder in (exported, source)]
    assert models[0].eos_token_id == models[1].eos_token_id or "eos_token_id" not in generation[1]
    _, metadata, _ = (exported / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(CARD.split("---\n")[1]).items() <= yaml.safe_load(metadata).items()


def test_a_model_with_anothers_tokenizer_declares_its_tokens_alone(tmp_path: Path) -> None:
    source = write_declared(tmp_path / "source", "qwen")
    data = DataConfig(seq_length=8, tokenizer=str(source))
    config = PretrainConfig(name="run", out=str(tmp_path / "run"), model=MODEL, data=data)
    prepare_directory(config, tmp_path / "run")
    assert not (tmp_path / "run" / "generation_config.json").exists()
    found = read(tmp_path / "run" / "tokenizer_config.json")
    assert "model_max_length" not in found
    assert (found["bos_token"], found["eos_token"]) == (None, "<|endoftext|>")


@pytest.mark.parametrize("place", ["source", "exported"])
def test_texts_go_on_as_in_transformers(folders: dict[str, Path], place: str) -> None:
    """After its own first token, with its penalty, up to any of its ends; greedy, to compare."""
    tokenizer = theirs(folders["source"])
    model = transformers.AutoModelForCausalLM.from_pretrained(str(folders["source"])).eval()
    ours = mlm.load(folders[place], device="cpu")
    found = ours.generate(PROMPTS, max_new_tokens=24, temperature=0.0, top_k=0)
    want = []
    for text in PROMPTS:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        ends = model.generation_config.eos_token_id
        new = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)[
            0, ids.shape[1] :
        ].tolist()
        want.append(
            tokenizer.decode([id for id in new if id not in (ends if isinstance(ends, list) else [ends])])
        )
    assert found == want


def test_declared_sampling_is_used_where_nothing_is_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ckpt = write_declared(tmp_path / "source", "llama3")
    asked = ("generate", f"ckpt={ckpt}", "prompt=To be", "max_new_tokens=12", "dist.threads_per_rank=1")
    assert main([*asked]) == 0
    said = capsys.readouterr()
    assert "as generation_config.json declares: temperature=0.6, top_k=50, top_p=0.9\n" in said.err
    assert said.out.startswith("To be")  # the first token is not part of the text
    assert main([*asked, "temperature=0.6", "top_k=50", "top_p=0.9", "repetition_penalty=1"]) == 0
    assert capsys.readouterr().out == said.out
    model = mlm.load(ckpt, device="cpu")
    assert "To be" + model.generate("To be", max_new_tokens=12) == said.out.removesuffix("\n")


def test_no_token_of_a_class_is_declared_that_the_vocabulary_lacks(tmp_path: Path) -> None:
    """`transformers` would add <unk> of Llama's, with an id beyond the rows of the token table."""
    source = write_declared(tmp_path / "source", "llama3")
    settings = read(source / "tokenizer_config.json") | {"tokenizer_class": "LlamaTokenizerFast"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    run = import_model(source, tmp_path / "run", verify=False)
    exported = export_model(run, tmp_path / "exported", verify=False)
    assert len(theirs(exported)) == len(theirs(source))
    assert theirs(exported)("a <unk>")["input_ids"] == theirs(source)("a <unk>")["input_ids"]


def test_a_declared_setting_that_is_none_is_named_with_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ckpt = write_declared(tmp_path / "source", "qwen")
    (ckpt / "generation_config.json").write_text('{"do_sample": true, "temperature": -1.0}')
    problem = "temperature=-1.0 must be 0 or more"
    asked = ("generate", f"ckpt={ckpt}", "prompt=To be", "max_new_tokens=2", "dist.threads_per_rank=1")
    capsys.readouterr()
    assert main([*asked]) == 2
    assert capsys.readouterr().err == f"mlm generate: generation_config.json: {problem}\n"
    assert main([*asked, "temperature=0", "repetition_penalty=1", "no_repeat_ngram_size=0"]) == 0


def test_a_corpus_says_how_its_sequences_begin(tmp_path: Path) -> None:
    """config.json is not part of the corpus: its receipt says it."""
    model = write_declared(tmp_path / "model", "qwen")
    (tmp_path / "in.jsonl").write_text('{"text": "To be, or not"}\n'.replace("or", "or " * 200))
    out, tokenizer = tmp_path / "out", Tokenizer.load(model)
    run_build(
        DataBuildConfig(
            input=str(tmp_path / "in.jsonl"),
            tokenizer=str(model),
            out=str(out),
            prepend_bos=True,
            split="1,0,0",
        )
    )
    assert (read_receipt(out) or {})["bos_id"] == tokenizer.bos_id
    beside = tokenizer_beside(out)
    assert (beside.bos_id, beside.eod_id) == (tokenizer.bos_id, tokenizer.eod_id)
    assert IndexedDataset(out / "train")[0].tolist()[0] == tokenizer.bos_id


def test_template_that_cannot_be_read_is_left_out_of_an_import(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_llama(tmp_path / "source", CHATML + "{% if %}")
    assert main(["import", "hf", str(source), f"out={tmp_path / 'run'}", "verify=false"]) == 0
    assert "the chat template was not taken: " in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "run" / "chat_template.jinja").exists()
