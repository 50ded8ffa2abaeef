"""`mlm import hf`: the same model as `transformers` has, whole or not at all."""

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from tokenizers import Tokenizer as Backend
from torch import Tensor
from transformers import GPT2Config, PreTrainedTokenizerFast

import mlm
from mlm.checkpoint.native.format import read_manifest
from mlm.cli.convert.run import preflight_import_hf
from mlm.cli.convert.settings import ImportHFConfig
from mlm.convert.huggingface.folder import read_model
from mlm.convert.huggingface.mapping import ProbeSamples
from mlm.convert.locations import Location
from mlm.data.tokenizer import Tokenizer
from mlm.runs.saved import trained_config
from mlm.util.errors import CheckFailedError, CorruptFileError, UserError
from mlm.verify.huggingface import our_outputs
from tests.convert.hf_models import (
    MODEL,
    TEXT,
    add_tokenizer,
    edit_config,
    hub_cache,
    import_model,
    make_model,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model(tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    return tmp_path / "model"


def test_folder_that_transformers_saved_with_its_defaults_is_imported(tmp_path: Path) -> None:
    """A tokenizer without a length says model_max_length=10^30, as the whole number of that float."""
    model = make_model(tmp_path / "model", shard=20_000)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == 6
    add_tokenizer(tmp_path / "model")
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "model/tokenizer.json"))
    theirs.save_pretrained(tmp_path / "model")
    saved = json.loads((tmp_path / "model/tokenizer_config.json").read_bytes())
    assert saved["model_max_length"] == int(1e30)
    run = import_model(tmp_path / "model", tmp_path / "run")
    assert Tokenizer.load(run / "tokenizer.json").encode(TEXT) == theirs(TEXT)["input_ids"]
    with torch.no_grad():  # by the model that was never saved
        want = model(ProbeSamples.of(MODEL).tokens).logits.flatten(0, 1)
    found = our_outputs(run)["logits"]
    assert found.shape == want.shape
    assert (found - want).abs().max() <= 1e-5 * want.abs().max()  # sums of 60 numbers in another order


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_large_number_that_nothing_reads_does_no_harm_and_endless_digits_are_rejected(
    tmp_path: Path, name: str
) -> None:
    make_model(tmp_path / "model", shard=20_000)
    add_tokenizer(tmp_path / "model")
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "model/tokenizer.json"))
    theirs.save_pretrained(tmp_path / "model")
    edited = tmp_path / "model" / name
    content = edited.read_text().rstrip().removesuffix("}")
    edited.write_text(f'{content}, "some_length": {"9" * 300}, "some_float": 1e999}}')
    import_model(tmp_path / "model", tmp_path / "run", verify=False)
    edited.write_text(f'{content}, "some_length": {"9" * 301}}}')
    with pytest.raises(UserError, match=edited.name) as caught:
        mlm.import_hf(tmp_path / "model", tmp_path / "other", verify=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "note"),
    [
        (["<|endoftext|>"], None),
        (["<|user|>", "<|tool|>", "<|end|>"], "holds the token <|user|>, one of 3 not kept"),
    ],
)
def test_tokens_that_only_the_settings_hold_are_said(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[str], note: str | None
) -> None:
    tokens = {str(300 + n): {"content": name, "special": True} for n, name in enumerate(names)}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": tokens}))
    import_model(folder, tmp_path / "run", verify=False)
    lines = [line for line in capsys.readouterr().out.splitlines() if "note: tokenizer_config.json" in line]
    assert len(lines) == (note is not None)
    assert note is None or note in lines[0]


class TestCheckpoint:
    """The files written besides the weights."""

    def test_it_holds_weights_alone_a_run_spec_and_its_source(self, folder: Path, tmp_path: Path) -> None:
        path = import_model(folder, tmp_path / "run", verify=False) / "checkpoints/step-00000000"
        manifest = read_manifest(path)
        config = trained_config(manifest, path)
        assert (manifest.step, manifest.state["weights_only"]) == (0, True)
        assert (config.model, config.data.seq_length) == (MODEL, 48)
        assert all(entry.dtype == torch.float32 and entry.split for entry in manifest.tensors.values())
        source = manifest.state["source"]
        assert (source["kind"], source["name"]) == ("huggingface", "model")
        read = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
        assert source["files"].keys() == read

    def test_tokenizer_is_made_of_vocabulary_and_merges(self, folder: Path, tmp_path: Path) -> None:
        want = Tokenizer.load(folder).encode(TEXT)
        Backend.from_file(str(folder / "tokenizer.json")).model.save(str(folder))
        (folder / "tokenizer.json").unlink()
        run = import_model(folder, tmp_path / "run", verify=False)
        assert Tokenizer.load(run).encode(TEXT) == want


class TestRefusals:
    """One line, and nothing left behind."""

    @pytest.mark.parametrize("broken", ["qkv order", "transposition"])
    def test_weights_in_another_order_are_found_out_by_their_logits(
        self, folder: Path, tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        right = Location.from_stored

        def wrong(place: Location, values: list[Tensor]) -> Tensor:
            if broken == "qkv order":
                return right(Location(place.names, place.transposed), values)
            square = place.names[0].endswith("attn.c_proj.weight")
            return values[0] if square else right(place, values)

        monkeypatch.setattr(Location, "from_stored", wrong)
        with pytest.raises(CheckFailedError, match="logits differ from those of transformers"):
            import_model(folder, tmp_path / "run")
        assert [path.name for path in tmp_path.iterdir()] == ["model"]

    @pytest.mark.parametrize(
        ("name", "value"),
        [("transformer.ln_f.bias", torch.nan), ("transformer.h.1.attn.c_attn.weight", -torch.inf)],
    )
    def test_weights_that_are_not_finite_are_named(self, tmp_path: Path, name: str, value: float) -> None:
        """On import, compared or not, and on load, at each layout."""
        model = make_model(tmp_path / "model")
        with torch.no_grad():
            model.get_parameter(name).view(-1)[-1] = value
        model.save_pretrained(tmp_path / "model")
        said = rf"model\.safetensors: {name.removeprefix('transformer.')} is not finite"
        for verify in (True, False):
            with pytest.raises(CorruptFileError, match=said):
                import_model(tmp_path / "model", tmp_path / "run", verify=verify)
        assert not (tmp_path / "run").exists()
        with pytest.raises(CorruptFileError, match=said):
            mlm.load(tmp_path / "model", device="cpu")

    def test_what_transformers_alone_rejects_is_one_line(self, folder: Path, tmp_path: Path) -> None:
        """When it reads the settings, whose errors are of its own classes, and when it computes with them."""
        for key, value, said in (("initializer_range", 1, "load"), ("output_hidden_states", 0.5, "run")):
            kept = (folder / "config.json").read_text()
            edit_config(folder, **{key: value})
            with pytest.raises(CheckFailedError, match=f"does not {said} it") as caught:
                import_model(folder, tmp_path / "run")
            assert "\n" not in str(caught.value)
            (folder / "config.json").write_text(kept)

    def test_of_two_names_of_a_setting_the_one_that_transformers_takes_counts(self, folder: Path) -> None:
        edit_config(folder, num_attention_heads=2)
        assert read_model(folder).config.num_heads == GPT2Config.from_pretrained(folder).n_head == 2

    def test_base_of_what_is_not_a_folder_of_adapters_is_rejected(self, folder: Path, tmp_path: Path) -> None:
        for source in (str(folder), "someone/tiny"):
            config = ImportHFConfig(source=source, out=str(tmp_path / "run"), base="runs/base", verify=False)
            (problem,) = preflight_import_hf(config)
            assert problem.startswith(f"base=runs/base: source={source} is not a folder that holds adapters")


class TestHub:
    """A source that is not a folder but an id."""

    ID = "someone/tiny"

    @pytest.fixture(autouse=True)
    def elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)  # where no folder has the name of the id

    def test_snapshot_is_imported_under_its_commit(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Which is asked for JSON, text and safetensors only."""
        snapshot, patterns = hub_cache(folder), []

        def download(repo: str, allow_patterns: list[str], **settings: Any) -> str:
            assert (repo, settings["revision"]) == (self.ID, "v1")
            patterns.extend(allow_patterns)
            return str(snapshot)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        run = import_model(self.ID, tmp_path / "run", revision="v1", verify=False)
        source = read_manifest(run / "checkpoints/step-00000000").state["source"]
        assert (source["name"], source["revision"]) == (self.ID, snapshot.name)
        offered = ["pytorch_model.bin", "modeling_gpt2.py", "model.h5", "model-00001-of-00002.safetensors"]
        assert [name for name in offered if any(fnmatch(name, p) for p in patterns)] == offered[-1:]

    @pytest.mark.parametrize("removed", ["config.json", None])
    def test_adapters_of_the_hub_are_named_before_any_weights_are_fetched(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: str | None
    ) -> None:
        """Alone or beside their base, whose weights transformers would change by them."""
        (folder / "adapter_config.json").write_text("{}")
        (folder / (removed or "generation_config.json")).unlink()

        def download(repo: str, allow_patterns: list[str], **_: Any) -> str:
            copy = tmp_path / "fetched"
            copy.mkdir()
            for path in folder.iterdir():
                if any(fnmatch(path.name, pattern) for pattern in allow_patterns):
                    shutil.copy(path, copy)
            return str(copy)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        with pytest.raises(UserError, match=r"adapter_config.json: holds an adapter.* hf download"):
            import_model(self.ID, tmp_path / "run", verify=False)
        assert not (tmp_path / "fetched/model.safetensors").exists()
