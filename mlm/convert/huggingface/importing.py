"""Import of a model of `transformers` or the Hub, or of adapters of `peft`, as a run directory.

config.json, safetensors and the tokenizer are read without `transformers`.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mlm.checkpoint.native.folders import CHECKPOINTS
from mlm.checkpoint.native.format import TensorEntry
from mlm.checkpoint.native.reader import copy_region
from mlm.checkpoint.native.run_state import LORA
from mlm.checkpoint.native.shard_file import read_safetensors_header
from mlm.checkpoint.native.slices import Region
from mlm.checkpoint.parameters import split_of
from mlm.convert.huggingface import peft
from mlm.convert.huggingface.export import NOT_COMPARED, Compare, tensor_bytes
from mlm.convert.huggingface.families import layer_names
from mlm.convert.huggingface.folder import (
    OTHER_WEIGHTS,
    SAVE_AGAIN,
    SMALL_FILES,
    HFModel,
    commit_of,
    fetch,
    read_json,
    read_model,
)
from mlm.convert.huggingface.model_card import CARD
from mlm.convert.huggingface.tensors import FLOATS, HFTensors
from mlm.convert.source import ModelFolder, open_source
from mlm.convert.targets import write_native
from mlm.data.files_present import HUB_NAME
from mlm.data.tokenizer_settings import SETTINGS, read_config
from mlm.models.lora import adapter_shards
from mlm.runs.folder import imported_state, new_folder, out_problems, run_config, write_run
from mlm.util.errors import CorruptFileError, UserError, attempt, reading_from
from mlm.util.files import open_input
from mlm.util.terminal import one_line, progress_bar


def import_problems(source: str, out: str, revision: str | None = None, base: str | None = None) -> list[str]:
    """Return the problems of a folder or id to import, and of `out`; nothing is downloaded."""
    problems, folder = out_problems(out), Path(source)
    if base is not None and not is_adapter(source):
        problems.append(f"base={base}: source={source} is not a folder that holds adapters; leave it out")
    if not folder.exists():
        if not HUB_NAME.fullmatch(source):
            fix = "Give one with config.json and model.safetensors, or a Hub id"
            problems.append(f"source={source}: no such folder. {fix}")
        return problems
    if revision is not None:
        problems.append(f"revision={revision} is for the Hub, source={source} is a folder: leave it")
    if not is_adapter(source):
        attempt(problems, lambda: HFTensors(read_model(folder)))
    return problems


def is_adapter(source: str) -> bool:
    return (Path(source) / peft.CONFIG).is_file()


def import_model(
    name: str, out: Path, *, revision: str | None, compare: Compare | None
) -> tuple[HFModel, list[str], str, str]:
    """Read, write, compare and publish; return the model, notes, and lines on comparison and run.

    `name` is a folder or an id that `import_problems` accepts. `compare(folder, run)` raises UserError if
    outputs differ; None skips it. Raises UserError and leaves no files.
    """
    folder, commit = Path(name), None
    if not folder.exists():
        folder = fetch(name, revision, "source")
        commit = commit_of(folder) or revision or "main"
    source = ModelFolder(folder)
    source.check()
    origin = {
        "kind": "huggingface",
        "name": folder.resolve().name if commit is None else name,
        "revision": commit,
        "files": source.digests(),
        **source.origin,
    }
    count = tensor_bytes(source, torch.float32)
    with new_folder(out, count) as run:
        with progress_bar(f"writing {out}", count, in_bytes=True) as advance:
            path = write_native(source, run, origin, advance)
        line = NOT_COMPARED if compare is None else str(compare(folder, run))
    # Files of the folder that no export of the run will hold are named in a note.
    exported, notes = {*SMALL_FILES, *source.hf.files, CARD}, source.conversion_notes
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name not in exported)
    dropped = [name for name in names if not name.startswith(".") and not name.endswith(OTHER_WEIGHTS)]
    if "auto_map" in read_config(folder / SETTINGS):
        dropped.append(f"auto_map of {SETTINGS}")
    if dropped:
        more = f" and {len(dropped) - 5} more" if len(dropped) > 5 else ""
        notes.append(f"not carried: {', '.join(map(one_line, dropped[:5]))}{more}")
    return source.hf, notes, line, f"written to {out / CHECKPOINTS / path.name}"


def import_adapters(folder: Path, out: Path, *, base: str | None) -> tuple[dict[str, object], str, str]:
    """Write adapters of `peft` as a run that names their base; return columns, and lines on base and run.

    Raises UserError and leaves no files.
    """
    settings, weights = read_json(folder, peft.CONFIG), folder / peft.WEIGHTS
    name = base or str(settings.get("base_model_name_or_path"))
    try:
        base_source = open_source(name)
    except UserError as error:
        raise UserError(f"base={name}: the base of {folder} cannot be read ({error}); set base=…") from error
    base_source.check()
    stored = dict[str, Tensor]()
    with reading_from(weights, SAVE_AGAIN), open_input(weights) as f:
        for key, layout in read_safetensors_header(weights, SAVE_AGAIN)[1].items():
            full, stored[key] = Region.full(layout.shape), torch.empty(layout.shape)
            if layout.dtype in FLOATS:
                copy_region(f, layout, full, full, stored[key])
            if layout.dtype not in FLOATS or not stored[key].isfinite().all():
                raise CorruptFileError(f"{weights}: {key} has other than finite numbers. {SAVE_AGAIN}")
    model, entries = base_source.model, dict[str, TensorEntry]()
    lora, tensors = peft.read_adapters(settings, stored, model, base_source.read_full)
    for shard, _ in adapter_shards(model, lora, layer_names(model)):
        split = split_of(shard, model.vocab_multiple)
        entries[f"model.{shard.name}"] = TensorEntry(shard.global_shape, torch.float32, split)
    run = replace(run_config(folder.resolve().name, model), lora=lora)
    state = imported_state(run, {"kind": "peft", "name": run.name}, ())
    with new_folder(out, sum(entry.num_bytes for entry in entries.values())) as run_folder:
        path = write_run(
            run_folder,
            entries,
            lambda name, region: tensors[name.removeprefix("model.")],
            state={**state, LORA: {"base": base_source.name, "digest": base_source.digest}},
            tokenizer=base_source.tokenizer,
        )
    columns: dict[str, object] = {"rank#": lora.rank, "tensors#": len(tensors)}
    return columns, f"adapters of {name}", f"written to {out / CHECKPOINTS / path.name}"
