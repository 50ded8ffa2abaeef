"""`mlm import hf`: a model of `transformers`, from a folder or the Hub, as a run directory of ours.

config.json, safetensors and the tokenizer are read without `transformers`. Its logits and those of the new
checkpoint are compared before that gets its name.
"""

from pathlib import Path

import torch

from mlm.cli import import_peft
from mlm.cli.conversion_settings import ImportHFConfig
from mlm.cli.result import model_columns, show_table
from mlm.config.fields import Role, path_argument
from mlm.convert.huggingface.folder import OTHER_WEIGHTS, SMALL_FILES, HFModel, read_model
from mlm.convert.huggingface.model_card import CARD
from mlm.convert.huggingface.tensors import HFTensors
from mlm.convert.sources import huggingface_source
from mlm.convert.targets import tensor_bytes, write_native
from mlm.data.files_present import HUB_NAME
from mlm.data.tokenizer_settings import SETTINGS, read_config
from mlm.inference.hf_source import commit_of, describe_source, fetch
from mlm.runs.folder import new_folder, out_problems
from mlm.training.state import CHECKPOINTS
from mlm.util.errors import ConfigError, UserError, attempt
from mlm.util.terminal import one_line, progress_bar
from mlm.verify.huggingface import NOT_COMPARED, compare_logits, extra_problems


def preflight(config: ImportHFConfig) -> list[str]:
    """Return what is wrong with the settings and the folder; nothing is downloaded."""
    problems = [*out_problems(config.out), *extra_problems(config.verify)]
    folder = Path(config.source)
    if not folder.exists():
        return problems + ([] if HUB_NAME.fullmatch(config.source) else [no_such_folder(config.source)])
    if config.revision is not None:
        problems.append(
            f"revision={config.revision} is for the Hub, source={config.source} is a folder: leave it"
        )
    if import_peft.is_adapter(config.source):
        return problems
    if config.base is not None:
        problems.append(f"base={config.base}: source={config.source} holds no adapters; remove base=")
    attempt(problems, lambda: HFTensors(read_model(folder)))
    return problems


def no_such_folder(source: str) -> str:
    """Return the problem of a source that is neither a folder nor an id."""
    return f"source={source}: no such folder. Give one with config.json and model.safetensors, or a Hub id"


def import_hf(
    source: str | Path, out: str | Path, *, revision: str | None = None, verify: bool = True
) -> Path:
    """Write a Hugging Face model as a run directory, as `mlm import hf` does; return the directory.

    Args:
        source: Folder with config.json and model.safetensors, or the id of a model on the Hub.
        out: Run directory to write, a new folder.
        revision: Branch, tag or commit on the Hub.
        verify: Compare logits with those of `transformers`, and write nothing where they differ.

    Raises:
        UserError: The model is not supported, `out` is not free, or the logits differ.
    """
    source, out = path_argument("source", source), path_argument("out", out, Role.FOLDER)
    config = ImportHFConfig(source=source, out=out, revision=revision, verify=verify)
    if problems := preflight(config):
        raise ConfigError(problems)
    convert(config)
    return Path(out)


def run(config: ImportHFConfig) -> None:
    """Import the model and print a table. Raises UserError and leaves no files."""
    if import_peft.is_adapter(config.source):
        import_peft.run(config)
        return
    model, notes, *lines = convert(config)
    columns = {"class#": model.architecture, **model_columns(model.config)}
    show_table(f"import hf · {config.source}", columns, notes, *lines)


def convert(config: ImportHFConfig) -> tuple[HFModel, list[str], str, str]:
    """Read, write, verify and publish; return the model, notes, and what was compared and written."""
    folder, revision = locate(config)
    name = folder.resolve().name if revision is None else config.source
    model, out = read_model(folder), Path(config.out)
    source = huggingface_source(model)
    origin = describe_source(name, revision, source.digests()) | source.origin
    count = tensor_bytes(source, torch.float32)
    with new_folder(out, count) as run:
        with progress_bar(f"writing {out}", count, in_bytes=True) as advance:
            path = write_native(source, run, origin, advance)
        line = str(compare_logits(folder, run)) if config.verify else NOT_COMPARED
    return model, [*source.notes, *not_carried(model)], line, f"written to {out / CHECKPOINTS / path.name}"


def not_carried(model: HFModel) -> list[str]:
    """Return a note on what the folder holds that no export of the run will hold."""
    known = {*SMALL_FILES, *model.files, CARD}
    names = sorted(path.name for path in model.folder.iterdir() if path.is_file() and path.name not in known)
    others = [name for name in names if not name.startswith(".") and not name.endswith(OTHER_WEIGHTS)]
    others += [f"auto_map of {SETTINGS}"] * ("auto_map" in read_config(model.folder / SETTINGS))
    more = f" and {len(others) - 5} more" * (len(others) > 5)
    return [f"not carried: {', '.join(map(one_line, others[:5]))}{more}"] if others else []


def locate(config: ImportHFConfig) -> tuple[Path, str | None]:
    """Return the folder to read, and its revision if it is the Hub's. Raises UserError."""
    folder = Path(config.source)
    if folder.exists():
        return folder, None
    if not HUB_NAME.fullmatch(config.source):
        raise UserError(no_such_folder(config.source))
    folder = fetch(config.source, config.revision, "source")
    return folder, commit_of(folder) or config.revision or "main"
