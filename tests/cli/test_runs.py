"""From a sound command line to its target: spellings, the user's own YAML, sweeps, exit codes."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlm.cli import main
from mlm.config.paths import CONFIG_DIR
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


class TestSweeps:
    """--multirun."""

    def test_each_job_gets_its_own_folder_named_by_what_varies(self, cli: Cli) -> None:
        assert cli(f"{SOUND} -m optimizer.lr=1e-4,1e-3 train.steps=9 out=o") == 0
        outs = [str(config.out) for config in cli.launched.configs]
        assert outs == ["o/optimizer.lr=0.0001", "o/optimizer.lr=0.001"]

    @pytest.mark.parametrize("flags", thinned(["-m --config-dir own", "--config-dir=own --multirun"], 2))
    def test_own_yaml_is_swept(self, cli: Cli, tmp_path: Path, flags: str) -> None:
        """Values, and choices that only the user's folder has; the folder's name is relative."""
        write(tmp_path / "own/model/mine.yaml", "num_layers: 1\nhidden_size: 32\nnum_heads: 2\n")
        assert cli(f"pretrain data=synthetic {flags} optimizer.lr=1e-4,1e-3 model=mine,gpt2_tiny") == 0
        assert cli.err.count("job ") == 4
        runs = [(c.optimizer.lr, c.model.hidden_size) for c in cli.launched.configs]
        assert runs == [(1e-4, 32), (1e-4, 64), (1e-3, 32), (1e-3, 64)]

    @pytest.mark.parametrize("tasks", thinned(["own_a,own_b", "task=glob(own_*)"], 2))
    def test_own_tasks_are_swept(self, cli: Cli, tmp_path: Path, tasks: str) -> None:
        for name in ("own_a", "own_b"):
            write(tmp_path / f"own/task/{name}.yaml", (CONFIG_DIR / "task/race.yaml").read_text())
        assert cli(f"finetune {tasks} -m --config-dir own ckpt={tmp_path} optimizer.lr=1e-4,1e-3") == 0
        assert cli.err.count("job ") == len(cli.launched.configs) == 4

    @pytest.mark.slow
    def test_slashes_and_long_names_stay_one_folder_each(self, cli: Cli) -> None:
        names = ",".join("x" * 200 + end for end in "ab")
        assert cli(f"{SOUND} -m out=o dist.device=cpu data.cache=a/b,a_b log.wandb_project={names}") == 0
        folders = {Path(c.out) for c in cli.launched.configs}
        assert len(folders) == 4
        assert {folder.parent for folder in folders} == {Path("o")}
        assert all(len(folder.name) < 200 for folder in folders)

    @pytest.mark.parametrize(
        "line, name",
        [
            ("eval loss -m ckpt=. batch_size=1,2", "eval_loss.json"),
            ("plan schedule -m pp=2,4 out=o/a.json", "a.json"),
        ],
    )
    def test_result_files_do_not_collide(self, cli: Cli, line: str, name: str) -> None:
        assert cli(line) == 0
        outs = {Path(c.out) for c in cli.launched.configs}
        assert len(outs) == 2
        assert {out.name for out in outs} == {name}
        assert cli.out == ""  # no table: each has its own result

    def test_failed_job_decides_the_exit_code_and_stops_no_other(self, cli: Cli) -> None:
        assert cli(f"{SOUND} -m tp=3,2 out=o") == 2
        assert [c.parallel.tp for c in cli.launched.configs] == [2]
        assert "tp=3 does not divide" in cli.err
        rows = [line.split() for line in cli.out.splitlines() if "o/tp=" in line]
        assert rows == [["3", "failed", "(exit", "code", "2)", "o/tp=3"], ["2", "finished", "o/tp=2"]]

    @pytest.mark.parametrize("wrong", ["tp=2,3", "optimizer.lr=1e-3,abc", "model=gpt2_tiny,broken"])
    def test_mistakes_of_all_jobs_are_reported_before_the_first_starts(
        self, cli: Cli, tmp_path: Path, wrong: str
    ) -> None:
        write(tmp_path / "own/model/broken.yaml", "defaults: [no_such]\n")
        reported = list[str]()
        cli.launched.run = lambda: reported.append(cli.capsys.readouterr().err) or 0
        assert cli(f"{SOUND} -m --config-dir own {wrong} out=o") == 2
        (before_the_only_run,) = reported
        assert re.search("tp=3 does not|lr=abc must be|no_such", before_the_only_run)

    def test_an_interrupt_while_jobs_are_checked_starts_none(
        self, cli: Cli, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("mlm.cli.run.path_problems", lambda _: raising(KeyboardInterrupt())())
        assert cli(f"{SOUND} -m seed=1,2 out=o") == 130
        assert cli.launched.configs == []

    @pytest.mark.parametrize("line", [f"{SOUND} -m tp=1,2 out=o", "plan schedule -m pp=2,4 out=o/a.json"])
    def test_an_interrupt_starts_no_further_job(self, cli: Cli, line: str) -> None:
        cli.launched.run = raising(KeyboardInterrupt())
        assert cli(line) == 130
        assert len(cli.launched.configs) == 1
        if line.startswith("pretrain"):
            assert [line.split()[1] for line in cli.out.splitlines() if "o/tp=" in line] == ["interrupted"]
            assert "not started" in cli.out

    @pytest.mark.parametrize("check", [False, True])
    def test_a_job_that_writes_a_file_finds_its_folder(self, cli: Cli, check: bool) -> None:
        """The sweep makes it; `--check` makes none and finds nothing wrong."""
        assert cli("plan layouts -m model=gpt2_tiny gpus=2,4" + " --check" * check) == 0
        assert len(list(Path("runs").glob("sweeps/*/gpus=[24]"))) == (0 if check else 2)
        assert len(list(Path("runs").glob("sweeps/*"))) == (0 if check else 1)

    def test_misspelled_sweep_starts_nothing(self, cli: Cli) -> None:
        assert cli(f"{SOUND} -m tp=1,2 sed=3") == 2
        assert cli.launched.configs == []

    def test_each_job_is_shown(self, cli: Cli) -> None:
        assert cli(f"{SOUND} -m seed=1,2 --cfg job") == 0
        assert [line for line in cli.out.splitlines() if line.startswith("seed: ")] == ["seed: 1", "seed: 2"]


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
