"""The command line: what runs, what is printed, which code comes back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlm.cli.commands import COMMANDS, resolve
from mlm.config.errors import CorruptFileError, UserError
from tests.cli_doubles import Cli, Facts, make_cli

cli = pytest.fixture(make_cli)
SOUND = "pretrain model=gpt2_tiny data=synthetic"


def raising(error: BaseException):
    def run() -> int:
        raise error

    return run


class TestSurface:
    """What exists. A change here is a change for users."""

    def test_commands_are_these(self) -> None:
        names = [command.name for command in COMMANDS]
        assert names == ["pretrain", "eval loss", "generate", "data tokenizer", "data build"]

    @pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
    def test_targets_exist(self, command) -> None:
        assert callable(resolve(command.target))
        assert command.preflight is None or callable(resolve(command.preflight))

    @pytest.mark.parametrize("line", ["", "--help", "-h", "help"])
    def test_help_lists_the_commands(self, cli: Cli, line: str) -> None:
        assert cli(line) == 0
        assert all(f"  {command.name}  " in cli.out for command in COMMANDS)

    def test_help_of_a_first_word_lists_its_commands(self, cli: Cli) -> None:
        assert cli("data --help") == 0
        assert "data build" in cli.out
        assert "pretrain  " not in cli.out

    def test_version_names_hydras_too(self, cli: Cli) -> None:
        assert cli("--version") == 0
        assert cli.out.startswith("mlm 0.1.0 (hydra 1.3")


class TestHelp:
    """Help of one command."""

    def test_groups_and_their_options_are_listed(self, cli: Cli) -> None:
        assert cli("pretrain --help") == 0
        for shown in ("cluster     local, slurm", "precision   bf16, fp16, fp32, fp64", "gpt2_8b", "sc21_1t"):
            assert shown in cli.out

    @pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
    def test_every_command_shows_examples_keys_and_exit_codes(self, cli: Cli, command) -> None:
        assert cli(f"{command.name} --help") == 0
        for heading in ("Usage: mlm", "Examples:", "Keys", "Flags:", "Exit codes:"):
            assert heading in cli.out

    def test_keys_show_docstring_and_composed_default(
        self, cli: Cli, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "200")
        cli("pretrain --help tp")
        assert "ranks that split each layer. Must divide model.num_heads. [default 1]" in cli.out
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

    def test_help_needs_no_torch(self) -> None:
        code = "import sys, mlm.cli; mlm.cli.main(['pretrain', '--help']); sys.exit('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False)
        assert done.returncode == 0

    @pytest.mark.parametrize(
        "line", [line for command in COMMANDS for _, line in command.examples if line.startswith("mlm ")]
    )
    def test_example_composes(self, cli: Cli, tmp_path: Path, line: str) -> None:
        write(tmp_path / "my_configs/model/my_model.yaml", "num_layers: 1\nhidden_size: 8\nnum_heads: 2\n")
        words = line.removeprefix("mlm ").replace("pretrain -m ", "pretrain ").replace("3e-4,1e-3", "3e-4")
        assert cli(words if "--cfg" in words else f"{words} --cfg job") == 0, cli.err


class TestRuns:
    """From a sound command line to its target."""

    def test_composed_config_reaches_its_target(self, cli: Cli) -> None:
        assert cli(f"{SOUND} tp=2 seed=7") == 0
        assert cli.launched.targets == ["mlm.train.pretrain:run"]
        assert (cli.launched.config.parallel.tp, cli.launched.config.seed) == (2, 7)
        assert cli.launched.outs == [Path("runs/gpt2_tiny")]

    @pytest.mark.parametrize(
        "spelled", ["tp=4 compile=true name=a", "--tp 4 --compile --name a", "--tp=4 --compile=true --name=a"]
    )
    def test_three_spellings_mean_the_same(self, cli: Cli, spelled: str) -> None:
        cli(f"{SOUND} {spelled}")
        config = cli.launched.config
        assert (config.parallel.tp, config.compile, config.name) == (4, True, "a")

    def test_switch_leaves_the_next_override_alone(self, cli: Cli) -> None:
        cli(f"{SOUND} --compile tp=2")
        assert (cli.launched.config.compile, cli.launched.config.parallel.tp) == (True, 2)

    def test_group_is_chosen_in_every_spelling(self, cli: Cli) -> None:
        cli("pretrain --model gpt2_tiny --data=synthetic")
        assert cli.launched.config.model.hidden_size == 64

    def test_dashes_in_a_long_key_are_underscores(self, cli: Cli, tmp_path: Path) -> None:
        cli(f"generate --ckpt {tmp_path} --prompt x --max-new-tokens 5")
        assert cli.launched.config.max_new_tokens == 5

    def test_negative_number_is_a_value(self, cli: Cli) -> None:
        assert cli(f"{SOUND} --optimizer.lr -1") == 2
        assert "optimizer.lr=-1.0 must be greater than 0" in cli.err

    @pytest.mark.parametrize(
        "text", ["To be, or not", "it's", "x=y", "'a' or 'b'", "{a: 1}", "a\\", "", "null", "1", "ROMEO:\n"]
    )
    def test_text_is_taken_literally(self, cli: Cli, tmp_path: Path, text: str) -> None:
        from mlm.cli import main

        assert main(["generate", f"ckpt={tmp_path}", f"prompt={text}"]) == 0
        assert cli.launched.config.prompt == text

    def test_quoted_text_keeps_hydras_meaning(self, cli: Cli, tmp_path: Path) -> None:
        assert cli(f"""generate ckpt={tmp_path} "prompt='a, b'" """) == 0
        assert cli.launched.config.prompt == "a, b"

    def test_data_command_runs_in_this_process(self, cli: Cli) -> None:
        assert cli("data build input=a tokenizer=b out=c split=0.9,0.1,0") == 0
        assert cli.launched.targets == ["mlm.data.build:run_build"]
        assert cli.launched.config.split == "0.9,0.1,0"

    def test_users_yaml_stands_beside_the_shipped(self, cli: Cli, tmp_path: Path) -> None:
        write(tmp_path / "mine/model/my_model.yaml", "num_layers: 1\nhidden_size: 8\nnum_heads: 2\n")
        assert cli("pretrain --config-dir mine model=my_model data=synthetic precision=bf16") == 0
        assert (cli.launched.config.model.hidden_size, cli.launched.config.name) == (8, "my_model")

    def test_users_primary_config_extends_ours(self, cli: Cli, tmp_path: Path) -> None:
        write(tmp_path / "mine/run.yaml", "defaults: [pretrain, _self_]\nseed: 5\ndata: {kind: synthetic}\n")
        assert cli("pretrain -cd mine -cn run model=gpt2_tiny") == 0
        assert cli.launched.config.seed == 5

    def test_hydra_leaves_no_trace(self, cli: Cli, tmp_path: Path) -> None:
        before = os.getcwd()
        cli(SOUND)
        assert list(tmp_path.iterdir()) == []
        assert os.getcwd() == before
        assert (cli.out, cli.err) == ("", "")

    def test_module_equals_command(self, tmp_path: Path) -> None:
        line = [sys.executable, "-m", "mlm", "generate", "--cfg", "job", "--package", "seed"]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout == "1234\n"


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

    def test_unknown_key_is_a_fault_here_too(self, cli: Cli) -> None:
        assert cli("pretrain tpp=2 --cfg job") == 2
        assert cli.err == "mlm pretrain: unknown key 'tpp'; did you mean 'tp'?\n"


class TestSweeps:
    """--multirun."""

    def test_each_job_gets_its_own_folder(self, cli: Cli) -> None:
        assert cli(f"{SOUND} -m tp=1,2 out=o") == 0
        assert [c.out for c in cli.launched.configs] == [
            "o/data=synthetic,model=gpt2_tiny,tp=1",
            "o/data=synthetic,model=gpt2_tiny,tp=2",
        ]

    def test_slashes_and_long_names_stay_one_folder_each(self, cli: Cli) -> None:
        names = ",".join("x" * 200 + end for end in "ab")
        assert cli(f"{SOUND} -m out=o dist.device=cpu data.cache=a/b,a_b log.wandb_project={names}") == 0
        folders = {Path(c.out) for c in cli.launched.configs}
        assert len(folders) == 4
        assert {folder.parent for folder in folders} == {Path("o")}
        assert all(len(folder.name) < 200 for folder in folders)

    def test_result_files_of_an_evaluation_do_not_collide(self, cli: Cli, tmp_path: Path) -> None:
        cli(f"eval loss -m ckpt={tmp_path} batch_size=1,2")
        outs = {Path(c.out) for c in cli.launched.configs}
        assert len(outs) == 2
        assert {out.name for out in outs} == {"eval_loss.json"}

    def test_failed_job_decides_the_exit_code_and_stops_no_other(self, cli: Cli) -> None:
        assert cli(f"{SOUND} -m tp=3,2") == 2
        assert [c.parallel.tp for c in cli.launched.configs] == [2]
        assert "tp=3 does not divide" in cli.err

    def test_misspelled_sweep_starts_nothing(self, cli: Cli) -> None:
        assert cli(f"{SOUND} -m tp=1,2 sed=3") == 2
        assert cli.launched.configs == []

    def test_sweep_without_the_flag_is_explained(self, cli: Cli) -> None:
        assert cli(f"{SOUND} tp=1,2") == 2
        assert cli.err == "mlm pretrain: tp=1,2 is a sweep: add --multirun, or quote the value\n"


class TestMistakes:
    """One line each, exit code 2."""

    @pytest.mark.parametrize(
        "line, message",
        [
            ("pretrian", "mlm: unknown command 'pretrian'; did you mean 'pretrain'? (list: mlm --help)"),
            ("xyz", "mlm: unknown command 'xyz' (list: mlm --help)"),
            ("eval", "mlm eval: name a task: mlm eval loss"),
            ("data bild", "mlm data: unknown task 'bild'; did you mean 'build'?"),
        ],
    )
    def test_wrong_command_is_one_line(self, cli: Cli, line: str, message: str) -> None:
        assert cli(line) == 2
        assert cli.err == f"{message}\n"

    @pytest.mark.parametrize(
        "words, message",
        [
            ("-x", "unknown flag '-x' (list: mlm pretrain --help)"),
            ("--cfg jop", "--cfg jop: no such choice; did you mean 'job'? (of job, hydra, all)"),
            ("--cfg", "--cfg needs a value: one of job, hydra, all"),
            ("--seed", "--seed needs a value: Weights, dropout and sample order are functions of it."),
            ("modle.hidden_size=1", "unknown key 'modle.hidden_size'; did you mean 'model.hidden_size'?"),
            ("modle=gpt2_8b", "unknown key 'modle'; did you mean 'model'?"),
            ("+lr=1", "unknown key 'lr'; did you mean 'optimizer.lr'?"),
            ("train=9", "'train' is a section: set its keys, such as train.steps=…"),
            (
                "model=gpt2_9b",
                "model=gpt2_9b: no such choice; did you mean gpt2_8b? (list: mlm pretrain --help)",
            ),
            ("tp", "cannot read 'tp': expected key=value; did you mean tp=…?"),
            ("tp=x", "tp=x must be a whole number"),
            ("out='${nme}'", "out: Interpolation key 'nme' not found"),
            ("-cn foo", "Cannot find primary config 'foo'. Check that it's in your config search path."),
            (
                "--experimental-rerun x",
                "--experimental-rerun reads a pickle, and mlm reads none; give the overrides again",
            ),
            ("--resolve", "The --resolve flag can only be used in conjunction with --cfg or --help"),
        ],
    )
    def test_mistake_is_one_line(self, cli: Cli, words: str, message: str) -> None:
        assert cli(f"{SOUND} {words}") == 2
        assert cli.err == f"mlm pretrain: {message}\n"
        assert cli.launched.configs == []

    def test_group_of_another_command_is_unknown(self, cli: Cli) -> None:
        assert cli("eval loss model=gpt2_8b ckpt=.") == 2
        assert cli.err == "mlm eval loss: unknown key 'model'\n"

    def test_pretrain_alone_says_that_data_is_missing(self, cli: Cli) -> None:
        assert cli("pretrain") == 2
        assert cli.err.startswith("mlm pretrain: data.path is not set")

    def test_all_faults_come_in_one_report(self, cli: Cli) -> None:
        assert cli("pretrain sed=1 precision=fp8 compile=x tp=5 data.seq_length=9999") == 2
        starts = [
            "unknown key 'sed'",
            "precision=fp8: no such",
            "compile=x must",
            "tp=5 does",
            "data.seq_length=9999",
            "data.path is",
        ]
        lines = cli.err.splitlines()
        assert [
            line.startswith(f"mlm pretrain: {start}") for line, start in zip(lines, starts, strict=True)
        ] == [True] * 6

    def test_fault_that_follows_from_a_misspelling_is_left_out(self, cli: Cli) -> None:
        assert cli("pretrain data=sinthetic model=gpt2_tinny tp=3") == 2
        assert [line.split()[2] for line in cli.err.splitlines()] == ["data=sinthetic:", "model=gpt2_tinny:"]

    def test_broken_yaml_is_named(self, cli: Cli, tmp_path: Path) -> None:
        write(tmp_path / "mine/model/broken.yaml", "a: [1\n")
        assert cli("pretrain -cd mine model=broken") == 2
        assert cli.err.count("\n") == 1
        assert "mine/model/broken.yaml" in cli.err

    def test_unknown_key_in_the_users_yaml_is_named(self, cli: Cli, tmp_path: Path) -> None:
        write(tmp_path / "mine/train/x.yaml", "step: 3\n")
        assert cli(f"{SOUND} -cd mine +train=x") == 2
        assert cli.err == "mlm pretrain: unknown key 'train.step'; did you mean 'train.steps'?\n"

    def test_launcher_of_the_wrong_size_is_a_fault(self, cli: Cli) -> None:
        cli.launched.facts = Facts(joined=True, world_size=6, local_devices=None)
        assert cli(f"{SOUND} tp=4") == 2
        assert "does not divide the 6 ranks" in cli.err

    def test_surroundings_that_make_no_sense_are_one_fault_among_others(
        self, cli: Cli, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Senseless:
            @property
            def facts(self):
                raise UserError("WORLD_SIZE=x is no number")

        monkeypatch.setattr(type(cli.launched), "facts", Senseless.facts)
        assert cli(f"{SOUND} tp=3") == 2
        assert [line.split()[2] for line in cli.err.splitlines()] == ["WORLD_SIZE=x", "tp=3"]

    def test_preflight_is_asked_before_anything_starts(self, cli: Cli) -> None:
        cli.launched.preflight = ["a.bin is truncated", "b is absent"]
        assert cli(SOUND) == 2
        assert cli.err == "mlm pretrain: a.bin is truncated\nmlm pretrain: b is absent\n"
        assert cli.launched.configs == []

    @pytest.mark.parametrize("rank, lines", [("0", 1), ("3", 0)])
    def test_one_rank_of_a_host_reports(
        self, cli: Cli, monkeypatch: pytest.MonkeyPatch, rank: str, lines: int
    ) -> None:
        for name, value in {"RANK": "8", "WORLD_SIZE": "16", "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, value)
        assert cli(f"{SOUND} sed=1") == 2
        assert cli.err.count("\n") == lines


class TestExitCodes:
    """What a run's end becomes."""

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

    def test_value_error_of_the_run_is_no_mistake_of_the_user(self, cli: Cli) -> None:
        cli.launched.run = raising(ValueError("ours"))
        with pytest.raises(ValueError, match="ours"):
            cli(SOUND)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
