"""The surface of the command line: commands, help, what Hydra shows."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.hydra import Hydra

import mlm
from mlm.config.cli import main
from mlm.config.cli.commands import COMMANDS, Command, resolve
from mlm.config.cli.tasks import takes_task, task_names, task_summaries
from tests.config.cli.doubles import Cli, make_cli, write

cli = pytest.fixture(make_cli)


class TestSurface:
    """The commands that exist. A change here is a change for users."""

    def test_commands_are_these_in_this_order_besides_newer_ones(self) -> None:
        known = [
            "pretrain",
            "parity",
            "verify-resume",
            "plan schedule",
            "eval loss",
            "eval wikitext103",
            "eval lambada",
            "eval all",
            "generate",
            "finetune",
            "eval",
            "reshard",
            "import hf",
            "import megatron",
            "export hf",
            "ckpt inspect",
            "ckpt verify",
            "ckpt diff",
            "ckpt prune",
            "ckpt rollback",
            "data tokenizer",
            "data build",
            "data inspect",
            "data verify",
        ]
        assert [command.name for command in COMMANDS if command.name in known] == known

    @pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
    def test_targets_exist(self, command: Command) -> None:
        assert callable(resolve(command.target))
        assert command.preflight is None or callable(resolve(command.preflight))

    @pytest.mark.parametrize("line", ["", "--help", "-h", "help"])
    def test_help_lists_the_commands(self, cli: Cli, line: str) -> None:
        assert cli(line) == 0
        shown = [command.usage if takes_task(command) else command.name for command in COMMANDS]
        assert all(f"  {name}  " in cli.out for name in shown)

    def test_help_of_a_first_word_lists_its_commands(self, cli: Cli) -> None:
        assert cli("data --help") == 0
        assert "data build" in cli.out
        assert "pretrain  " not in cli.out

    @pytest.mark.parametrize("line", ["eval --help", "eval race --help", "finetune --help"])
    def test_tasks_are_listed_with_what_they_ask(self, cli: Cli, line: str) -> None:
        assert cli(line) == 0
        assert "  wnli         WNLI (GLUE, arXiv:1804.07461): does a sentence follow" in cli.out
        assert all(f"\n  {name}  " in cli.out for name in task_names())

    def test_every_task_says_what_it_asks(self) -> None:
        assert [name for name, asked in task_summaries() if not asked.endswith("?")] == []

    @pytest.mark.parametrize("word", ["--version", "-V", "version"])
    def test_version_names_hydras_too(self, cli: Cli, word: str) -> None:
        assert cli(word) == 0
        assert cli.out.startswith(f"mlm {mlm.__version__} (hydra 1.3")


class TestHelp:
    """Help of one command."""

    def test_groups_and_their_options_are_listed(self, cli: Cli) -> None:
        assert cli("pretrain --help") == 0
        for shown in ("cluster     local, slurm", "precision   bf16, fp16, fp32, fp64", "gpt2_8b", "sc21_1t"):
            assert shown in cli.out

    @pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
    def test_every_command_shows_examples_keys_and_exit_codes(self, cli: Cli, command: Command) -> None:
        assert cli(f"{command.name}{' race' * takes_task(command)} --help") == 0
        for heading in ("Usage: mlm", "Examples:", "Keys", "Flags:", "Exit codes:"):
            assert heading in cli.out

    def test_keys_show_docstring_and_composed_default(
        self, cli: Cli, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "200")
        cli("pretrain --help tp")
        shown = " ".join(cli.out.split())
        assert "Must divide model.num_heads. (a whole number, greater than 0) [default 1]" in shown
        cli("pretrain --help out")
        assert "[default runs/${name}]" in cli.out

    def test_section_shows_all_its_keys_and_options(self, cli: Cli) -> None:
        assert cli("pretrain --help schedule") == 0
        assert "cosine_v1" in cli.out
        assert "schedule.min_lr" in cli.out

    def test_unknown_section_is_corrected(self, cli: Cli) -> None:
        assert cli("pretrain --help optimiser") == 2
        assert (
            cli.err == "mlm pretrain: --help optimiser: no such section or key; did you mean 'optimizer'?\n"
        )

    def test_options_of_the_users_folder_are_listed(self, cli: Cli, tmp_path: Path) -> None:
        write(tmp_path / "mine/model/my_model.yaml", "num_layers: 1\n")
        cli("pretrain --help --config-dir mine")
        assert "my_model" in cli.out

    def test_tasks_of_the_users_folder_are_listed(self, cli: Cli, tmp_path: Path) -> None:
        write(tmp_path / "mine/task/reviews.yaml", "# Is a book liked?\nname: reviews\n")
        for command in ("finetune", "eval reviews"):
            assert cli(f"{command} --help --config-dir mine") == 0
            assert "  reviews      Is a book liked?\n" in cli.out

    def test_list_of_commands_needs_no_heavy_library(self) -> None:
        heavy = {"torch", "pydantic", "hydra", "omegaconf", "rich"}
        code = (
            "import sys; from mlm.config.cli import main; "
            f"main(['--help']); sys.exit(bool({heavy} & sys.modules.keys()))"
        )
        assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0

    def test_help_needs_no_torch(self) -> None:
        code = (
            "import sys; from mlm.config.cli import main; "
            "main(['pretrain', '--help']); sys.exit('torch' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False)
        assert done.returncode == 0

    @pytest.mark.parametrize(
        "line", [line for command in COMMANDS for _, line in command.examples if line.startswith("mlm ")]
    )
    def test_example_composes(self, cli: Cli, tmp_path: Path, line: str) -> None:
        write(tmp_path / "my_configs/model/my_model.yaml", "num_layers: 1\nhidden_size: 8\nnum_heads: 2\n")
        task = "name: reviews\ncolumns: [text]\nlabels: [bad, good]\n"
        write(tmp_path / "my_configs/task/reviews.yaml", task)
        write(tmp_path / "runs/shakespeare/config.yaml", "name: shakespeare\n")
        write(tmp_path / "runs/race/config.yaml", "name: race\n")
        one_of_a_sweep = re.sub(r" (-m|--multirun)(?= )|(?<=\d),[\d,e-]+", "", line)
        words = one_of_a_sweep.removeprefix("mlm ")
        assert cli(words if "--cfg" in words else f"{words} --cfg job") == 0, cli.err


class TestShowing:
    """Hydra's own flags."""

    def test_cfg_job_prints_the_composition(self, cli: Cli) -> None:
        assert cli("pretrain model=gpt2_8b --tp 8 --cfg job") == 0
        assert "  num_layers: 72\n" in cli.out
        assert "\ntp: 8\n" in cli.out
        assert cli.launched.configs == []

    def test_resolve_fills_in_interpolations(self, cli: Cli) -> None:
        assert cli("pretrain model=gpt2_8b -c job --resolve") == 0
        assert "\nout: runs/gpt2_8b\n" in cli.out

    def test_pipeline_layout_of_the_paper_can_be_shown(self, cli: Cli) -> None:
        assert cli("pretrain model=gpt2_sc21_1t parallel=sc21_1t --cfg job") == 0
        assert "\npp: 64\n" in cli.out

    def test_info_and_hydra_help_work(self, cli: Cli) -> None:
        assert cli("pretrain --info defaults") == 0
        assert "model/gpt2_124m" in cli.out
        assert cli("pretrain --hydra-help") == 0
        assert "Hydra" in cli.out

    def test_unknown_key_is_a_problem_here_too(self, cli: Cli) -> None:
        assert cli("pretrain tpp=2 --cfg job") == 2
        assert cli.err == "mlm pretrain: unknown key 'tpp'; did you mean 'tp'?\n"


@pytest.mark.parametrize(("word", "times"), [("name=a", 1), ("hydra.mode=RUN", 2)])
def test_a_command_is_composed_once_unless_it_may_set_hydras_mode(
    word: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    composed: list[object] = []
    compose = Hydra.compose_config

    def counted(self: Hydra, *args: Any, **given: Any) -> Any:
        composed.append(args)
        return compose(self, *args, **given)

    monkeypatch.setattr(Hydra, "compose_config", counted)
    assert main(["pretrain", "--check", "model=gpt2_tiny", "data=synthetic", word]) == 0
    assert len(composed) == times
