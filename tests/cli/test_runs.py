"""From a sound command line to its target: spellings, the user's own YAML, exit codes."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlm.cli import main
from mlm.util.errors import CorruptFileError, UserError
from tests.cli.doubles import Cli, make_cli, write
from tests.slow import thinned

cli = pytest.fixture(make_cli)
SOUND = "pretrain model=gpt2_tiny data=synthetic"


def raising(error: BaseException) -> Callable[[], int]:
    def run() -> int:
        raise error

    return run


class TestRuns:
    """From a sound command line to its target."""

    def test_composed_config_reaches_its_target(self, cli: Cli, tmp_path: Path) -> None:
        assert cli(f"{SOUND} tp=2 seed=7") == 0
        assert cli.launched.targets == ["mlm.cli.pretrain.run:run"]
        assert (cli.launched.config.parallel.tp, cli.launched.config.seed) == (2, 7)
        assert cli.launched.outs == [Path("runs/gpt2_tiny")]
        assert (list(tmp_path.iterdir()), cli.out, cli.err) == ([], "", "")

    @pytest.mark.parametrize(
        "spelled", ["tp=4 compile=true name=a", "--compile tp=4 --name a", "--tp=4 --compile=true --name=a"]
    )
    def test_three_spellings_mean_the_same(self, cli: Cli, spelled: str) -> None:
        cli(f"{SOUND} {spelled}")
        config = cli.launched.config
        assert (config.parallel.tp, config.compile, config.name) == (4, True, "a")

    def test_dashes_in_a_long_key_are_underscores(self, cli: Cli, tmp_path: Path) -> None:
        cli(f"generate --ckpt {tmp_path} --prompt x --max-new-tokens 5")
        assert cli.launched.config.max_new_tokens == 5

    def test_negative_number_is_a_value(self, cli: Cli) -> None:
        assert cli(f"{SOUND} --optimizer.lr -1") == 2
        assert "optimizer.lr=-1.0 must be greater than 0" in cli.err

    @pytest.mark.parametrize(
        "text",
        thinned(
            ["To be, or not", "it's", "x=y", "'a' or 'b'", "{a: 1}", "a\\", "", "null", "1", "ROMEO:\n"], 2
        ),
    )
    def test_text_is_taken_literally(self, cli: Cli, tmp_path: Path, text: str) -> None:
        assert main(["generate", f"ckpt={tmp_path}", f"prompt={text}"]) == 0
        assert cli.launched.config.prompt == text

    def test_quoted_text_keeps_hydras_meaning(self, cli: Cli, tmp_path: Path) -> None:
        assert cli(f"""generate ckpt={tmp_path} "prompt='a, b'" """) == 0
        assert cli.launched.config.prompt == "a, b"

    def test_users_yaml_stands_beside_the_shipped(self, cli: Cli, tmp_path: Path) -> None:
        write(tmp_path / "mine/model/my_model.yaml", "num_layers: 1\nhidden_size: 8\nnum_heads: 2\n")
        assert cli("pretrain --config-dir mine model=my_model data=synthetic precision=bf16") == 0
        assert (cli.launched.config.model.hidden_size, cli.launched.config.name) == (8, "my_model")

    @pytest.mark.parametrize("plus", ["", "+", "++"])
    def test_users_group_that_nothing_chooses_is_added(self, cli: Cli, tmp_path: Path, plus: str) -> None:
        write(tmp_path / "mine/size/small.yaml", "# @package _global_\nseed: 5\n")
        assert cli(f"pretrain --config-dir mine {plus}size=small model=gpt2_tiny data=synthetic") == 0
        assert cli.launched.config.seed == 5

    def test_users_experiment_names_its_run_and_needs_its_header(self, cli: Cli, tmp_path: Path) -> None:
        text = "defaults:\n  - override /model: gpt2_tiny\n  - override /data: synthetic\n"
        write(tmp_path / "cfg/experiment/mine.yaml", text)
        assert cli("pretrain --config-dir cfg experiment=mine") == 2
        assert cli.err.endswith("let its first line be `# @package _global_`\n")
        write(tmp_path / "cfg/experiment/mine.yaml", f"# @package _global_\n{text}")
        assert cli("pretrain --config-dir cfg experiment=mine") == 0
        assert cli.launched.config.out == "runs/mine"

    def test_values_of_a_section_can_be_set_together(self, cli: Cli) -> None:
        assert cli(f"{SOUND} 'optimizer={{lr: 0.1, eps: 1e-6}}'") == 0
        assert (cli.launched.config.optimizer.lr, cli.launched.config.optimizer.eps) == (0.1, 1e-6)

    def test_module_equals_command(self, tmp_path: Path) -> None:
        line = [sys.executable, "-m", "mlm", "plan", "schedule", "pp=4", "--cfg", "job"]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout.startswith("pp: 4\n")


class TestExitCodes:
    """Exit codes and messages of ended runs."""

    def test_exit_code_of_the_job_is_ours(self, cli: Cli) -> None:
        cli.launched.run = lambda: 143
        assert cli(SOUND) == 143
        assert cli.err == ""

    @pytest.mark.parametrize("error, code", [(UserError("disk full"), 2), (CorruptFileError("disk full"), 1)])
    def test_mistake_found_while_running_is_one_line(self, cli: Cli, error: Exception, code: int) -> None:
        cli.launched.run = raising(error)
        assert cli(SOUND) == code
        assert cli.err == "mlm pretrain: disk full\n"

    def test_interrupt_is_130(self, cli: Cli) -> None:
        cli.launched.run = raising(KeyboardInterrupt())
        assert cli(SOUND) == 130

    def test_defect_keeps_its_traceback(self, cli: Cli) -> None:
        cli.launched.run = raising(ZeroDivisionError("ours"))
        with pytest.raises(ZeroDivisionError, match="ours"):
            cli(SOUND)
