"""Mistakes on the command line: one line each, exit code 2, nothing started."""

from pathlib import Path

import pytest

from mlm.config.cli import reporting
from mlm.config.cli.commands import COMMANDS
from mlm.config.cli.tasks import task_names
from mlm.util.errors import UserError
from tests.config.cli.doubles import Cli, Facts, make_cli, write

cli = pytest.fixture(make_cli)
SOUND = "pretrain model=gpt2_tiny data=synthetic"
TASKS = ", ".join(task_names())
EVALUATIONS = ", ".join(
    command.words[1] for command in COMMANDS if command.words[0] == "eval" and command.words[1:]
)


class TestMistakes:
    """One line each, exit code 2."""

    @pytest.mark.parametrize(
        "line, message",
        [
            ("pretrian", "mlm: unknown command 'pretrian'; did you mean 'pretrain'? (list: mlm --help)"),
            ("xyz", "mlm: unknown command 'xyz' (list: mlm --help)"),
            ("eval", f"mlm eval: name a task: {EVALUATIONS}, {TASKS}"),
            ("eval ckpt=a", f"mlm eval: name a task: {EVALUATIONS}, {TASKS}"),
            ("eval rac", "mlm eval: unknown task 'rac'; did you mean 'race'?"),
            ("finetune", f"mlm finetune: name a task: {TASKS}"),
            ("finetune ckpt=a", f"mlm finetune: name a task: {TASKS}"),
            (
                "finetune rac ckpt=a",
                "mlm finetune: task=rac: no such choice; did you mean race? (list: mlm finetune --help)",
            ),
            ("data", "mlm data: name a task: tokenizer, build, inspect, verify"),
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
            *(
                (
                    words,
                    f"{problem}; write your settings to DIR/experiment/NAME.yaml and type "
                    "--config-dir DIR experiment=NAME",
                )
                for words, problem in (
                    ("config/mine.py", "cannot read 'config/mine.py': no file of settings is read"),
                    ("mine.yaml", "cannot read 'mine.yaml': no file of settings is read"),
                    ("--config mine.yaml", "unknown key 'config'"),
                )
            ),
            (
                "train.global_batch_size=4",
                "train.global_batch_size=4 is not a multiple of dp=1 * train.micro_batch_size=8 = 8; "
                "use train.global_batch_size=8, or train.micro_batch_size=4",
            ),
            ("tp=x", "tp=x must be a whole number"),
            ("--zero 1", "zero=1 must be 0, 2 or 3"),
            ("pipeline=1f2b", "pipeline=1f2b must be 1f1b, gpipe or zb_h1; did you mean pipeline=1f1b?"),
            ("pp=9", "pp=9 stages are more than model.num_layers=2; use pp=2"),
            (
                "--pp=2 --zero 3",
                "zero=3 would gather the weights again for each micro-batch of a pipeline (pp=2); use zero=2",
            ),
            (
                "out='${nme}'",
                r"out: Interpolation key 'nme' not found; correct ${…}, or write \${…} for text",
            ),
            ("-cn foo", "Cannot find primary config 'foo'. Check that it's in your config search path."),
            (
                "--experimental-rerun x",
                "--experimental-rerun reads a pickle, and mlm reads none; give the overrides again",
            ),
            (
                "~precision=bf16",
                "~precision=bf16: precision has another value; use precision=bf16 to set it, or leave "
                "~precision=bf16 out",
            ),
            ("~foo", "unknown key 'foo'; --help lists the keys"),
            ("modle@y=1", "modle@y=1: no config group 'modle'; did you mean 'model'?"),
            (
                "model@x=gpt2_8b",
                "model@x=gpt2_8b: a config group has one place, and @ names another; use model=gpt2_8b",
            ),
            (
                "+schedule=cosine",
                "+schedule=cosine: schedule has a value, and + adds what has none; use schedule=cosine",
            ),
            ("++tp=7 +pp=2", "+pp=2: pp has a value, and + adds what has none; use pp=2"),
            *(
                (
                    f"hydra/launcher={choice}",
                    f"hydra/launcher={choice}: no such choice; name one of Hydra's, or leave it out",
                )
                for choice in ("0", "null")
            ),
            ("hydra/launcher=x", "hydra/launcher=x: no such choice; choose basic, or leave it out"),
            *(
                (
                    f"{group}={'x' * 300}",
                    f"{group}={'x' * 40}…: a name of 305 bytes is too long for a file system; shorten it",
                )
                for group in ("hydra/job_logging", "hydra/launcher")
            ),
            (f"hydra.run.dir={'x' * 299}", f"{'x' * 100}…{'x' * 19}: File name too long"),
            (
                "incident.threshold=10",
                "incident.threshold=10.0 must be 1000 or more clean steps for a false alarm, or 0 for no "
                "outliers",
            ),
            ("--resolve", "The --resolve flag can only be used in conjunction with --cfg or --help"),
        ],
    )
    def test_mistake_is_one_line(self, cli: Cli, words: str, message: str) -> None:
        assert cli(f"{SOUND} {words}") == 2
        assert cli.err == f"mlm pretrain: {message}\n"
        assert cli.launched.configs == []

    @pytest.mark.parametrize("key", ["tp", "precision", "optimizer.lr", "hydra/env", "++hydra.run"])
    @pytest.mark.parametrize("value", ["9" * 600, "'" + "a b " * 150 + "'"], ids=["word", "words"])
    def test_long_value_is_shortened(self, cli: Cli, key: str, value: str) -> None:
        """The problem, which stands first, and the fix, which stands last, stay legible."""
        assert cli(f'{SOUND} "{key}={value}"') == 2
        assert cli.err.count("\n") == 1
        assert "…" in cli.err
        assert value not in cli.err
        assert len(cli.err) < 650

    @pytest.mark.parametrize(
        "line",
        [
            "eval ckpt=~nobody-of-this-name",
            "eval all ckpt=~nobody-of-this-name data.wikitext103=a data.lambada=b",
            "pretrain resume=~nobody-of-this-name",
            "pretrain ckpt=~nobody-of-this-name data=synthetic",
        ],
    )
    def test_home_of_no_user_is_one_line(self, cli: Cli, line: str) -> None:
        assert cli(line) == 2
        assert cli.err.count("\n") == 1

    def test_generation_has_no_windows_whose_length_one_could_set(self, cli: Cli) -> None:
        assert cli("generate ckpt=. prompt=a seq_length=4096") == 2
        assert cli.err.startswith("mlm generate: unknown key 'seq_length'")

    def test_group_of_another_command_is_unknown(self, cli: Cli) -> None:
        assert cli("eval loss model=gpt2_8b ckpt=.") == 2
        assert cli.err == "mlm eval loss: unknown key 'model'; --help lists the keys\n"

    def test_place_of_a_group_is_rejected_by_a_command_without_groups(self, cli: Cli) -> None:
        assert cli("ckpt prune . model@x=gpt2_tiny") == 2
        assert cli.err == "mlm ckpt prune: model@x=gpt2_tiny: no config group 'model'; leave it out\n"

    def test_pretrain_alone_says_that_data_is_missing(self, cli: Cli) -> None:
        assert cli("pretrain") == 2
        assert cli.err.startswith("mlm pretrain: data.path is not set")

    def test_all_problems_come_in_one_report(self, cli: Cli) -> None:
        assert cli("pretrain sed=1 precision=fp12 compile=x tp=5 data.seq_length=9999") == 2
        starts = [
            "unknown key 'sed'",
            "precision=fp12: no such",
            "compile=x must",
            "tp=5 does",
            "data.seq_length=9999",
            "data.path is",
        ]
        lines = cli.err.splitlines()
        assert [
            line.startswith(f"mlm pretrain: {start}") for line, start in zip(lines, starts, strict=True)
        ] == [True] * 6

    def test_problems_of_a_command_without_ranks_come_in_one_report(self, cli: Cli) -> None:
        assert cli("plan schedule sed=1 pp=x micro_batches=0 out=a") == 2
        starts = ["unknown key 'sed'", "pp=x must", "micro_batches=0 must", "out=a must end"]
        lines = cli.err.splitlines()
        assert [
            line.startswith(f"mlm plan schedule: {start}") for line, start in zip(lines, starts, strict=True)
        ] == [True] * 4
        assert cli.launched.configs == []

    def test_problem_that_follows_from_a_misspelling_is_left_out(self, cli: Cli) -> None:
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

    def test_launcher_of_the_wrong_size_is_a_problem(self, cli: Cli) -> None:
        cli.launched.facts = Facts(joined=True, world_size=6, local_devices=None)
        assert cli(f"{SOUND} tp=4") == 2
        assert "does not divide the 6 ranks" in cli.err

    def test_surroundings_that_make_no_sense_are_one_problem_among_others(
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
        monkeypatch.setattr(reporting, "HEAD_START_S", 0)
        for name, value in {"RANK": "8", "WORLD_SIZE": "16", "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, value)
        assert cli(f"{SOUND} sed=1") == 2
        assert cli.err.count("\n") == lines
