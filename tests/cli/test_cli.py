"""The command line: commands, help, what is shown of the config, and the way from words to an exit code."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig

import mlm
from mlm.cli import main
from mlm.cli.command import Command
from mlm.cli.commands import COMMANDS
from mlm.cli.compose.composition import compose
from mlm.cli.compose.groups import takes_task, task_names, task_summaries
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.system import resolve
from tests.cli.doubles import Cli, make_cli, write
from tests.data.corpora import write_corpus
from tests.slow import thinned
from tests.tracking.page.made import started, stepped, write_run

cli = pytest.fixture(make_cli)
EXAMPLES = [line for command in COMMANDS for _, line in command.example_pairs if line.startswith("mlm ")]


def test_commands_are_these() -> None:
    names = """
        pretrain, parity, audit, verify-resume, doctor, replay, report,
        plan layouts, plan compare, plan memory, plan dry-run, plan calibrate, plan schedule,
        eval loss, eval wikitext103, eval lambada, eval all, generate, chat, finetune, eval,
        reshard, convert, import hf, export hf, export gguf,
        ckpt inspect, ckpt verify, ckpt diff, ckpt prune, ckpt rollback,
        data tokenizer, data build, data merge, data split, data inspect, data verify
    """
    assert [command.name for command in COMMANDS] == [name.strip() for name in names.split(",")]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_target_of_a_command_exists(command: Command) -> None:
    assert callable(resolve(command.target))
    assert command.preflight is None or callable(resolve(command.preflight))


@pytest.mark.parametrize("line", ["", "--help"])
def test_help_lists_the_commands(cli: Cli, line: str) -> None:
    assert cli(line) == 0
    shown = [command.usage if takes_task(command) else command.name for command in COMMANDS]
    assert all(f"  {name}  " in cli.out for name in shown)


@pytest.mark.parametrize("line", ["eval --help", "finetune --help"])
def test_tasks_are_listed_with_what_they_ask(cli: Cli, line: str) -> None:
    assert cli(line) == 0
    assert "  wnli         WNLI (GLUE, arXiv:1804.07461): does a sentence follow" in cli.out
    assert all(f"\n  {name}  " in cli.out for name in task_names())


def test_every_task_says_what_it_asks() -> None:
    assert [name for name, asked in task_summaries() if not asked.endswith("?")] == []


@pytest.mark.parametrize("word", ["--version", "version", "pretrain -V"])
def test_version_names_hydras_too(cli: Cli, word: str) -> None:
    assert cli(word) == 0
    assert cli.out.startswith(f"mlm {mlm.__version__} (hydra 1.3")


def test_help_lists_groups_and_their_options(cli: Cli) -> None:
    assert cli("pretrain --help") == 0
    for shown in (
        "cluster     local, slurm",
        "precision   auto, bf16, default, fp16, fp32, fp64",
        "gpt2_8b",
        "sc21_1t",
    ):
        assert shown in cli.out


@pytest.mark.parametrize("command", thinned(COMMANDS, 3), ids=lambda command: command.name)
def test_every_command_shows_examples_keys_and_exit_codes(cli: Cli, command: Command) -> None:
    assert cli(f"{command.name}{' race' * takes_task(command)} --help") == 0
    for heading in ("Usage: mlm", "Examples:", "Keys", "Flags:", "Exit codes:"):
        assert heading in cli.out


def test_help_of_a_key_shows_docstring_and_composed_default(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    cli("pretrain --help tp")
    shown = cli.out
    assert "Must divide model.num_heads. (a whole number, greater than 0) [default 1]" in " ".join(
        shown.split()
    )
    assert cli("help pretrain tp") == 0
    assert cli.out == shown
    cli("pretrain --help out")
    assert "[default runs/${name}]" in cli.out


def test_help_lists_choices_of_the_users_folder(cli: Cli, tmp_path: Path) -> None:
    write(tmp_path / "mine/model/my_model.yaml", "num_layers: 1\n")
    cli("pretrain --help --config-dir mine")
    assert "my_model" in cli.out
    write(tmp_path / "mine/task/reviews.yaml", "# Is a book liked?\nname: reviews\n")
    for command in ("finetune", "eval reviews"):
        assert cli(f"{command} --help --config-dir mine") == 0
        assert "  reviews      Is a book liked?\n" in cli.out


def test_list_of_commands_needs_no_library_of_settings() -> None:
    heavy = {"torch", "numpy", "tokenizers", "pydantic", "hydra", "omegaconf", "rich"}
    code = (
        "import sys; from mlm.cli import main; "
        f"main(['--help']); sys.exit(bool({heavy} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize("line", thinned(EXAMPLES, 5))
def test_example_composes(cli: Cli, tmp_path: Path, line: str) -> None:
    write(tmp_path / "my_configs/model/my_model.yaml", "num_layers: 1\nhidden_size: 8\nnum_heads: 2\n")
    task = "name: reviews\ncolumns: [text]\nlabels: [bad, good]\n"
    write(tmp_path / "my_configs/task/reviews.yaml", task)
    write(tmp_path / "runs/shakespeare/config.yaml", "name: shakespeare\n")
    (tmp_path / "runs/shakespeare/checkpoints/step-00000300").mkdir(parents=True)
    write(tmp_path / "runs/race/config.yaml", "name: race\n")
    words = line.removeprefix("mlm ")
    assert cli(words if "--cfg" in words else f"{words} --cfg job") == 0, cli.err


@pytest.mark.parametrize(
    "line, shown",
    thinned(
        [
            ("pretrain --help model", "[24 layers, hidden size 1024, 16 heads, 336.2M parameters]"),
            ("pretrain --help experiment", "[model=gpt2_demo parallel=cpu_tp2"),
            (
                "pretrain --help optimizer.betas",
                "(a list of 2 numbers, at least 0 and below 1) [default [0.9,0.999]]",
            ),
        ],
        2,
    ),
)
def test_help_of_a_group_or_key_shows_sizes_types_and_values(cli: Cli, line: str, shown: str) -> None:
    assert cli(line) == 0
    assert shown in " ".join(cli.out.split())


WITHOUT_TORCH = """
import contextlib, io, json, os, sys
import mlm.launch.start
from mlm.cli import main
mlm.launch.start.launch_ranks = lambda *_, **__: 0  # after all that the parent of ranks does
for line in json.load(sys.stdin):
    words, said = line.split(), io.StringIO()
    os.environ["COMP_LINE"] = "mlm pretrain model=gpt2_"
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(words)
    if code or "torch" in sys.modules:
        sys.exit(f"{line}: exit code {code}, torch {'torch' in sys.modules}: {said.getvalue()}")
"""


@pytest.mark.slow
def test_these_commands_start_without_torch(tmp_path: Path) -> None:
    """Importing torch takes longer than all else that they do. Ranks start in `launch_ranks`."""
    write_corpus(tmp_path / "train", [range(300)] * 40)
    run = write_run(tmp_path / "run", started(), stepped(1))
    tiny = f"model=gpt2_tiny data.train={tmp_path / 'train'} train.global_batch_size=8 out={tmp_path / 'new'}"
    lines = [f"{command.name} --help" for command in COMMANDS]
    lines += ["pretrain --help model", "pretrain --help experiment", "--version"]
    lines += [f"pretrain model={name}_tiny data=synthetic --check" for name in ("gpt2", "bert", "llama")]
    lines += [f"pretrain {tiny} --check"]
    lines += ["plan layouts model=gpt2_8b gpus=64 --check", "plan memory model=gpt2_8b --check"]
    lines += ["plan dry-run model=gpt2_8b --check", "plan schedule pp=4 micro_batches=8", "doctor --check"]
    lines += [f"report {run} out={tmp_path / 'report.html'}"]
    lines += [f"pretrain {tiny} tp=2 dist.device={device}" for device in ("cpu", "auto")]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], input=json.dumps(lines), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_cfg_job_prints_the_composition(cli: Cli) -> None:
    assert cli("pretrain model=gpt2_8b --tp 8 --cfg job") == 0
    assert "  num_layers: 72\n" in cli.out
    assert "\ntp: 8\n" in cli.out
    assert cli.launched.configs == []


@pytest.mark.parametrize("flags", ["-c job --resolve", "--resolve"])
def test_resolve_fills_in_interpolations(cli: Cli, flags: str) -> None:
    assert cli(f"pretrain model=gpt2_8b {flags}") == 0
    assert "\nout: runs/gpt2_8b\n" in cli.out


def test_one_key_resolves_in_a_process_that_has_resolved_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ckpt=` asks for `out`, which names the model's choice, before all keys are resolved."""
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    assert compose("pretrain", ["model=gpt2_tiny"]).tree.out == "runs/gpt2_tiny"


SOUND = "pretrain model=gpt2_tiny data=synthetic"


def raising(error: BaseException) -> Callable[[], int]:
    def run() -> int:
        raise error

    return run


def test_composed_config_reaches_its_target(cli: Cli, tmp_path: Path) -> None:
    assert cli(f"{SOUND} tp=2 seed=7") == 0
    assert cli.launched.targets == ["mlm.cli.pretrain.run:run"]
    assert (cli.launched.config.parallel.tp, cli.launched.config.seed) == (2, 7)
    assert cli.launched.outs == [Path("runs/gpt2_tiny")]
    assert (list(tmp_path.iterdir()), cli.out, cli.err) == ([], "", "")


@pytest.mark.parametrize(
    "spelled", ["tp=4 compile=true name=a", "--compile tp=4 --name a", "--tp=4 --compile=true --name=a"]
)
def test_three_spellings_mean_the_same(cli: Cli, spelled: str) -> None:
    cli(f"{SOUND} {spelled}")
    config = cli.launched.config
    assert (config.parallel.tp, config.compile, config.name) == (4, True, "a")


def test_negative_numbers_and_sections_are_values(cli: Cli) -> None:
    assert cli(f"{SOUND} --optimizer.lr -1") == 2
    assert "optimizer.lr=-1.0 must be greater than 0" in cli.err
    assert cli(f"{SOUND} 'optimizer={{lr: 0.1, eps: 1e-6}}'") == 0
    assert (cli.launched.config.optimizer.lr, cli.launched.config.optimizer.eps) == (0.1, 1e-6)


@pytest.mark.parametrize("text", ["To be, or not", "it's", "{a: 1}", "a\\", "", "null"])
def test_text_is_taken_literally_unless_it_is_quoted(cli: Cli, tmp_path: Path, text: str) -> None:
    assert main(["generate", f"ckpt={tmp_path}", f"prompt={text}", "--max-new-tokens", "5"]) == 0
    assert (cli.launched.config.prompt, cli.launched.config.max_new_tokens) == (text, 5)
    cli.launched.configs.clear()
    assert cli(f"""generate ckpt={tmp_path} "prompt='a, b'" """) == 0  # as Hydra means it
    assert cli.launched.config.prompt == "a, b"


@pytest.mark.parametrize("name", ["ü.txt", "it's.txt", "a(1).txt", "#1.txt", "a,b.txt", "x{1}.txt"])
def test_text_where_a_list_may_stand_is_taken_literally_too(cli: Cli, name: str) -> None:
    """A file's name is no syntax; brackets make a list of them."""
    words = ["data", "build", "tokenizer=tokenizer.json", "out=corpus"]
    assert main([*words, f"data={name}"]) == 0
    assert cli.launched.config.input == name
    cli.launched.configs.clear()
    assert main([*words, f'data=["{name}",b.txt]']) == 0
    assert cli.launched.config.input == (name, "b.txt")


def test_list_of_texts_that_cannot_be_read_asks_for_quotes(cli: Cli) -> None:
    assert cli("data build data=[ü.txt] tokenizer=tokenizer.json out=corpus") == 2
    assert "quote the value: \"input=['…','…']\"" in cli.err


def test_users_yaml_stands_beside_the_shipped(cli: Cli, tmp_path: Path) -> None:
    write(tmp_path / "mine/model/my_model.yaml", "num_layers: 1\nhidden_size: 8\nnum_heads: 2\n")
    assert cli("pretrain --config-dir mine model=my_model data=synthetic precision=bf16") == 0
    assert (cli.launched.config.model.hidden_size, cli.launched.config.name) == (8, "my_model")


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_users_group_that_nothing_chooses_is_added(cli: Cli, tmp_path: Path, plus: str) -> None:
    write(tmp_path / "mine/size/small.yaml", "# @package _global_\nseed: 5\n")
    assert cli(f"pretrain --config-dir mine {plus}size=small model=gpt2_tiny data=synthetic") == 0
    assert cli.launched.config.seed == 5


def test_users_experiment_names_its_run_and_needs_its_header(cli: Cli, tmp_path: Path) -> None:
    text = "defaults:\n  - override /model: gpt2_tiny\n  - override /data: synthetic\n"
    write(tmp_path / "cfg/experiment/mine.yaml", text)
    assert cli("pretrain --config-dir cfg experiment=mine") == 2
    assert cli.err.endswith("let its first line be `# @package _global_`\n")
    write(tmp_path / "cfg/experiment/mine.yaml", f"# @package _global_\n{text}")
    assert cli("pretrain --config-dir cfg experiment=mine") == 0
    assert cli.launched.config.out == "runs/mine"


def test_exit_code_of_the_job_is_ours_and_a_defect_keeps_its_traceback(cli: Cli) -> None:
    cli.launched.run = lambda: 143
    assert cli(SOUND) == 143
    assert cli.err == ""
    cli.launched.run = raising(ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError, match="ours"):
        cli(SOUND)


@pytest.mark.parametrize("error, code", [(UserError("disk full"), 2), (CorruptFileError("disk full"), 1)])
def test_mistake_found_while_running_is_one_line(cli: Cli, error: Exception, code: int) -> None:
    cli.launched.run = raising(error)
    assert cli(SOUND) == code
    assert cli.err == "mlm pretrain: disk full\n"
