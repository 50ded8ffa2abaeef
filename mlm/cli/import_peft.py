"""`mlm import hf` of a folder of `peft`: adapters as a run beside their base."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mlm.checkpoint.native.format import TensorEntry
from mlm.checkpoint.native.reader import copy_region
from mlm.checkpoint.native.run_state import LORA
from mlm.checkpoint.native.shard_file import read_safetensors_header
from mlm.checkpoint.native.slices import Region
from mlm.checkpoint.parameters import split_of
from mlm.cli.conversion_settings import ImportHFConfig
from mlm.cli.result import show_table
from mlm.convert.huggingface import peft
from mlm.convert.huggingface.families import layer_names
from mlm.convert.huggingface.folder import SAVE_AGAIN, read_json
from mlm.convert.sources import SourceSettings, open_source
from mlm.inference.base import Base, base_digest, base_name
from mlm.inference.trained import resolve_checkpoint
from mlm.models.lora import adapter_shards
from mlm.runs.folder import imported_state, new_folder, run_config, write_run
from mlm.training.state import CHECKPOINTS
from mlm.util.errors import CorruptFileError, UserError, reading_from


def is_adapter(source: str) -> bool:
    """True for a folder that holds adapters of `peft`."""
    return (Path(source) / peft.CONFIG).is_file()


def run(config: ImportHFConfig) -> None:
    """Import the adapters and print a table. Raises UserError and leaves no files."""
    folder = Path(config.source)
    settings = read_json(folder, peft.CONFIG)
    ckpt = config.base or str(settings.get("base_model_name_or_path"))
    try:
        base = resolve_checkpoint(ckpt)
    except UserError as error:
        raise UserError(f"base={ckpt}: the base of {folder} cannot be read ({error}); set base=…") from error
    with reading_from(folder / peft.WEIGHTS, SAVE_AGAIN):
        stored = read_safetensors_header(folder / peft.WEIGHTS, SAVE_AGAIN)[1]
    model = base.config.model
    content = peft.read_folder(settings, list(stored), model, str(folder / peft.CONFIG))
    lora = content.lora

    def read(name: str) -> Tensor:
        layout = stored[content.names[name]]
        shape = layout.shape
        whole, target = Region((0,) * len(shape), shape), torch.empty(shape)
        with reading_from(folder / peft.WEIGHTS, SAVE_AGAIN), open(folder / peft.WEIGHTS, "rb") as f:
            copy_region(f, layout, whole, whole, target)
        return content.to_common_rank(name, target)

    below = open_source(str(base.path), SourceSettings())
    tensors = {
        f"model.{name}": value
        for each in peft.stored_adapters(model, lora)
        for name, value in each.to_ours(read, below.whole)
    }
    form = {}
    for shard, _ in adapter_shards(model, lora, layer_names(model)):
        name = f"model.{shard.name}"
        found, shape = tuple(tensors[name].shape), shard.global_shape
        if found != shape:
            raise CorruptFileError(f"{folder}: {name} is {list(found)}, its base makes it {list(shape)}")
        form[name] = TensorEntry(shape, torch.float32, split_of(shard, model.vocab_multiple))
    run = replace(run_config(folder.resolve().name, model), lora=lora)
    from_base = Base(base_name(ckpt, base.path), base_digest(base.path)).encode()
    with new_folder(Path(config.out), sum(one.num_bytes for one in form.values())) as out:
        path = write_run(
            out,
            form,
            lambda name, region: tensors[name][region.within(Region.whole(tensors[name].shape))],
            state={**imported_state(run, {"kind": "peft", "name": run.name}, ()), LORA: from_base},
            tokenizer=below.tokenizer,
        )
    where = Path(config.out) / CHECKPOINTS / path.name
    columns: dict[str, object] = {"rank#": lora.rank, "tensors#": len(tensors)}
    show_table(
        f"import hf · {config.source}", columns, content.notes, f"adapters of {ckpt}", f"written to {where}"
    )
