"""Slips that were seen, and words of other programs: one line with the fix, and no library's insides."""

import io
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from mlm.config.cli.compose import load_config
from mlm.config.suggest import around, divisors
from mlm.corpus.build import print_split_of_one_text, with_min_tokens
from mlm.corpus.config import DataBuildConfig
from mlm.evaluate.loss import corpus_prefix
from mlm.inference.hf_source import download
from mlm.training.config import PretrainConfig
from mlm.util import hub
from mlm.util.errors import UserError
from mlm.util.system import writable_streams
from mlm.util.terminal import console
from tests.config.cli.doubles import Cli, make_cli, write

cli = pytest.fixture(make_cli)
SOUND = "pretrain model=gpt2_tiny data=synthetic"
PRECISIONS = "choose bf16, fp16, fp32, fp64, fp8 or tf32"


@pytest.mark.parametrize(
    "words, message",
    [
        ("out=null", "out=null: names no path; name one, or ./null if it is called so"),
        ("hydra=1", "hydra=1: hydra is a section; set its keys, such as hydra.sweep.dir=…"),
        (
            "'out=${oc.env:NOT_SET}'",
            r"out: Environment variable 'NOT_SET' not found; correct ${…}, or write \${…} for text",
        ),
        (
            "train.sample_prompts=once",
            "train.sample_prompts=once must be a list of texts; use 'train.sample_prompts=[once]'",
        ),
        (
            f"tp={'1' * 4400}",
            f"cannot read 'tp={'1' * 96}…{'1' * 18}': tp must be a whole number, such as 'tp=1'",
        ),
        ("precision=[1]", f"precision=1: no such choice; {PRECISIONS}"),
        ("model=[1,2]", "model=1: no such choice; list: mlm pretrain --help"),
        ("precision=16", "precision=16: no such choice; did you mean fp16? (list: mlm pretrain --help)"),
        ("precision=null", f"precision=null: no such choice; {PRECISIONS}"),
        ("~precision=inf", f"~precision=Infinity: no such choice; {PRECISIONS}"),
        (
            "'optimizer.betas=(0.9,0.95)'",
            "cannot read 'optimizer.betas=(0.9,0.95)': optimizer.betas must be a list of 2 numbers, such as "
            "'optimizer.betas=[0.9,0.999]'",
        ),
        ("+++x=1", "cannot read '+++x=1': + adds a key, ++ adds or replaces one; use ++x=…"),
        ("'optimizer={lr: 0.1, foo: 2}'", "unknown key 'optimizer.foo'; did you mean 'optimizer.options'?"),
        ("-m 'model=range(1,3)'", "model=range(1,3): no such choice; list: mlm pretrain --help"),
        ("tp={}", "tp={} must be a whole number"),
        ("optimizer.lr={}", "optimizer.lr={} must be a number"),
        (
            f"model={'x' * 300}",
            f"model={'x' * 94}…{'x' * 19}: no such choice; list: mlm pretrain --help",
        ),
        (
            f"data.path={'x' * 300}",
            f"data.path={'x' * 40}…: a name of 300 bytes is too long for a file system; shorten it",
        ),
        *(
            (
                f"{flag} {'x' * length}",
                f"{flag}={'x' * 40}…: a name of 256 bytes is too long for a file system; shorten it",
            )
            for flag, length in (("--config-name", 251), ("-cn", 251), ("--config-dir", 256), ("-cp", 256))
        ),
        ("model.num_heads=10000000019", "model.num_heads=10000000019 must be at most 2147483647"),
    ],
)
def test_slip_is_one_line_without_a_librarys_insides(cli: Cli, words: str, message: str) -> None:
    assert cli(f"{SOUND} {words}") == 2
    assert cli.err == f"mlm pretrain: {message}\n"


def test_values_of_a_section_can_be_set_together(cli: Cli) -> None:
    assert cli(f"{SOUND} 'optimizer={{lr: 0.1, eps: 1e-6}}'") == 0
    assert (cli.launched.config.optimizer.lr, cli.launched.config.optimizer.eps) == (0.1, 1e-6)


@pytest.mark.parametrize(
    "typed, hint",
    [
        ("block_size=8", "unknown key 'block_size'; did you mean 'data.seq_length'?"),
        ("learning_rate=1", "unknown key 'learning_rate'; did you mean 'optimizer.lr'?"),
        ("--learning-rate 1", "unknown key 'learning_rate'; did you mean 'optimizer.lr'?"),
        ("max_iters=5", "unknown key 'max_iters'; did you mean 'train.steps'?"),
        ("train.max_iters=5", "unknown key 'train.max_iters'; did you mean 'train.steps'?"),
        ("n_layer=3", "unknown key 'n_layer'; did you mean 'model.num_layers'?"),
        ("dropout=0.1", "unknown key 'dropout'; did you mean 'model.hidden_dropout'?"),
        ("--dry-run", "unknown key 'dry_run'; --check checks the settings, and starts nothing"),
        ("model=gpt2", "model=gpt2: no such choice; did you mean gpt2_124m? (list: mlm pretrain --help)"),
        ("optimizer=lion", "optimizer=lion: no such choice; choose adamw_bert, adamw_demo or adamw_v1"),
    ],
)
def test_names_of_other_programs_lead_to_ours(cli: Cli, typed: str, hint: str) -> None:
    assert cli(f"{SOUND} {typed}") == 2
    assert cli.err == f"mlm pretrain: {hint}\n"


def test_commands_of_other_programs_lead_to_ours(cli: Cli) -> None:
    assert cli("sample") == 2
    assert cli.err == "mlm: unknown command 'sample'; did you mean 'generate'? (list: mlm --help)\n"


@pytest.mark.parametrize("line", ["-sc", "pretrain -sc", "-sc nonsense"])
def test_completion_names_its_actions(cli: Cli, line: str) -> None:
    assert cli(line) == 2
    assert cli.err.endswith("-sc needs an action: use -sc install=bash (or zsh, fish), or uninstall=bash\n")


@pytest.mark.parametrize(
    "line, same",
    [
        ("help pretrain", "pretrain --help"),
        ("help eval loss", "eval loss --help"),
        ("help data", "data --help"),
        ("help pretrain tp", "pretrain --help tp"),
    ],
)
def test_help_takes_a_command(cli: Cli, line: str, same: str) -> None:
    assert cli(line) == 0
    shown = cli.out
    assert cli(same) == 0
    assert shown == cli.out
    assert "Commands:" not in shown or line == "help data"


def test_help_of_an_unknown_command_is_a_mistake(cli: Cli) -> None:
    assert cli("help pretrian") == 2
    assert "did you mean 'pretrain'?" in cli.err


def test_large_primes_cost_no_time() -> None:
    assert divisors(2147483647) == [1, 2147483647]
    assert around(10**15, range(3, 10**16, 3)) == [10**15 - 1, 10**15 + 2]


def test_folder_in_the_place_of_a_file_is_called_a_folder(cli: Cli, tmp_path: Path) -> None:
    write(tmp_path / "texts/a.jsonl", "")
    assert cli("eval lambada ckpt=. data.path=texts") == 2
    assert cli.err == (
        "mlm eval lambada: data.path=texts is a folder; name a file in it: data.path=texts/a.jsonl\n"
    )


def test_folders_of_a_sweep_are_named_by_what_it_varies(cli: Cli) -> None:
    assert cli(f"{SOUND} -m optimizer.lr=1e-4,1e-3 train.steps=9") == 0
    assert [str(config.out) for config in cli.launched.configs] == [
        "runs/gpt2_tiny/optimizer.lr=0.0001",
        "runs/gpt2_tiny/optimizer.lr=0.001",
    ]


class TestStreams:
    """Standard output as a shell may leave it."""

    def test_text_that_an_encoding_lacks_is_written_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
        with writable_streams():
            print("80 × 2 …")
        assert raw.getvalue() == b"80 \\xd7 2 \\u2026\n"

    def test_closed_streams_take_text(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdout", None)
        monkeypatch.setattr(sys, "stderr", None)
        with writable_streams():
            assert not sys.stdout.isatty()
            print("nobody reads this", file=sys.stderr)
        assert sys.stdout is None

    @pytest.mark.parametrize(
        "line, code, said",
        [
            ('"$0" -m mlm help pretrain', 0, ""),
            ('"$0" -m mlm help pretrain | true; exit "${PIPESTATUS[0]}"', 0, ""),
            ('"$0" -m mlm plan schedule pp=2 | true; exit "${PIPESTATUS[0]}"', 0, ""),
            (
                '"$0" -m mlm help pretrain > /dev/full',
                1,
                "mlm: standard output: No space left on device; what follows is not shown\n",
            ),
        ],
    )
    def test_command_survives_its_standard_output(self, line: str, code: int, said: str) -> None:
        env = {"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin:/bin", "PYTHONUNBUFFERED": "1"}
        found = subprocess.run(
            ["bash", "-c", line, sys.executable], capture_output=True, text=True, env=env, timeout=120
        )
        assert (found.returncode, found.stderr) == (code, said)


@pytest.mark.parametrize(
    "line, shown",
    [
        ("pretrain --help model", "[24 layers, hidden size 1024, 16 heads, 336.2M parameters]"),
        (
            "pretrain --help optimizer",
            "[lr=0.002 betas=[0.9,0.95] eps=1e-08 weight_decay=0.1 clip_grad_norm=1.0]",
        ),
        ("pretrain --help schedule", "optimizer.lr from the first step to the last."),
        ("pretrain --help experiment", "[model=gpt2_demo parallel=cpu_tp2"),
        ("pretrain --help pipeline", "(1f1b, gpipe or zb_h1) [default 1f1b]"),
        (
            "pretrain --help optimizer.betas",
            "(a list of 2 numbers, at least 0 and below 1) [default [0.9,0.999]]",
        ),
        ("generate --help prompt", "(text) [default '']"),
    ],
)
def test_help_of_a_group_or_key_shows_sizes_types_and_values(cli: Cli, line: str, shown: str) -> None:
    assert cli(line) == 0
    assert shown in " ".join(cli.out.split())


@pytest.mark.parametrize("what", ["config", "defaults"])
def test_info_works_as_the_help_lists_it(cli: Cli, what: str) -> None:
    assert cli("pretrain --help") == 0
    assert f"--info {what}" in cli.out
    assert cli(f"{SOUND} --info {what}") == 0
    assert "gpt2_tiny" in cli.out


def test_hub_out_of_reach_is_one_line_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv(hub.OFFLINE, "")
    monkeypatch.delenv(hub.OFFLINE)
    monkeypatch.setattr(hub, "getproxies", dict)
    hub.is_reachable.cache_clear()
    for module, names in hub.SETTINGS.items():
        for name in names:
            monkeypatch.setattr(f"{module}.{name}", False)
    with pytest.raises(UserError, match=r"out of reach from here.*give a folder with config.json"):
        download("nobody/nothing", None, ("config.json",), "ckpt")
    hub.is_reachable.cache_clear()
    assert huggingface_hub.constants.HF_HUB_OFFLINE


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

    def test_it_is_found_from_where_the_run_was_started(
        self, trained: PretrainConfig, tmp_path: Path
    ) -> None:
        step = tmp_path / "work/runs/a/checkpoints/step-00000001"
        step.mkdir(parents=True)
        config = load_config("eval_loss", [f"ckpt={step}"])
        assert corpus_prefix(config, trained, step) == tmp_path / "work/corpus/validation"

    def test_one_that_is_not_there_is_said_to_be_elsewhere(
        self, trained: PretrainConfig, tmp_path: Path
    ) -> None:
        step = tmp_path / "moved/step-00000001"
        step.mkdir(parents=True)
        with pytest.raises(
            UserError, match=r"data.path=corpus is not below .*elsewhere; start in the folder"
        ):
            corpus_prefix(load_config("eval_loss", [f"ckpt={step}"]), trained, step)


@pytest.mark.parametrize(
    "typed, of_documents, of_one_text",
    [([], 128, None), (["128"], 128, 128), (["5"], 5, 5), (["null"], None, None)],
)
@pytest.mark.parametrize("recipe", ["v1", "gopher"])
def test_typed_min_tokens_holds_for_one_text_and_the_default_is_off(
    capsys: pytest.CaptureFixture[str],
    recipe: str,
    typed: list[str],
    of_documents: int | None,
    of_one_text: int | None,
) -> None:
    chosen = [f"filter.min_tokens={value}" for value in typed]
    words = ["input=book.txt", "tokenizer=gpt2", "out=corpus", f"recipe={recipe}", *chosen]
    config: DataBuildConfig = load_config("data_build", words)
    assert with_min_tokens(config, is_one_text=False).filter.min_tokens == of_documents
    assert with_min_tokens(config, is_one_text=True).filter.min_tokens == of_one_text
    print_split_of_one_text(config, console())
    assert ("filter.min_tokens=auto is off" in capsys.readouterr().out) == (not typed)
