"""The validation set of a run, which `mlm eval loss` takes by default."""

from pathlib import Path

import pytest

from mlm.cli.compose.composition import load_config
from mlm.cli.evaluate.loss import corpus_prefix
from mlm.runs.config import PretrainConfig
from mlm.util.errors import UserError
from tests.cli.doubles import write


class TestValidationSetOfARun:
    """`mlm eval loss` with path=null, started in another folder than the run."""

    @pytest.fixture
    def trained(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PretrainConfig:
        write(tmp_path / "work/corpus/validation.bin", "")
        write(tmp_path / "work/corpus/validation.idx", "")
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        spec: PretrainConfig = load_config("pretrain", ["out=runs/a", "data.path=corpus"])
        return spec

    def test_one_that_is_not_there_is_said_to_be_elsewhere(
        self, trained: PretrainConfig, tmp_path: Path
    ) -> None:
        step = tmp_path / "moved/step-00000001"
        step.mkdir(parents=True)
        with pytest.raises(
            UserError, match=r"data.path=corpus is not below .*elsewhere; start in the folder"
        ):
            corpus_prefix(load_config("eval_loss", [f"ckpt={step}"]), trained)
