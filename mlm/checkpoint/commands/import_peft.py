"""`mlm import hf` of a folder of `peft`: adapters as a run beside their base."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mlm
from mlm.checkpoint.commands.config import ImportHFConfig
from mlm.checkpoint.commands.result import show_table
from mlm.checkpoint.huggingface import peft
from mlm.checkpoint.huggingface.folder import SAVE_AGAIN, read_json, reading
from mlm.checkpoint.native.reader import copy_region
from mlm.checkpoint.native.run_state import LORA, TOKENIZER
from mlm.checkpoint.native.shard_file import read_safetensors_header
from mlm.checkpoint.native.slices import Region
from mlm.checkpoint.native.stream import GlobalTensor, derived_id, write_streamed
from mlm.checkpoint.parameters import split_of
from mlm.config.build import to_dict
from mlm.data.chat_template import ChatTemplate
from mlm.inference.base import Base, base_digest, base_name
from mlm.inference.trained import is_model_folder, load_tokenizer, resolve_checkpoint, run_directory
from mlm.models.lora import adapter_shards
from mlm.training.config import PretrainConfig
from mlm.training.run_folder import new_folder, run_config
from mlm.training.run_tokenizer import digests_of_tokenizer
from mlm.training.state import CHECKPOINTS
from mlm.util.errors import CorruptFileError, UserError


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
    with reading(folder / peft.WEIGHTS):
        stored = read_safetensors_header(folder / peft.WEIGHTS, SAVE_AGAIN)[1]
    model = base.config.model
    lora = peft.read_config(settings, list(stored), model, str(folder / peft.CONFIG))

    def read(name: str) -> Tensor:
        shape = stored[name].shape
        whole, target = Region((0,) * len(shape), shape), torch.empty(shape)
        with reading(folder / peft.WEIGHTS), open(folder / peft.WEIGHTS, "rb") as f:
            copy_region(f, stored[name], whole, whole, target)
        return target

    tensors = dict[str, Tensor]()
    for each in peft.stored_adapters(model, lora):
        a, b = each.to_ours(read)
        tensors |= {f"model.{each.name}.lora.a": a, f"model.{each.name}.lora.b": b}
    form = {}
    for shard, _ in adapter_shards(model, lora):
        found, name = tuple(tensors[f"model.{shard.name}"].shape), f"model.{shard.name}"
        if found != shard.global_shape:
            shape = list(shard.global_shape)
            raise CorruptFileError(f"{folder}: {name} is {list(found)}, its base makes it {shape}")
        form[name] = GlobalTensor(found, torch.float32, split_of(shard, model.vocab_multiple))
    run = replace(run_config(folder.resolve().name, model), lora=lora)
    path = write(
        Path(config.out), form, tensors, run, Base(base_name(ckpt, base.path), base_digest(base.path))
    )
    columns: dict[str, object] = {"rank#": lora.rank, "tensors#": len(tensors)}
    show_table(f"import hf · {config.source}", columns, [], f"adapters of {ckpt}", f"written to {path}")


def write(
    out: Path, form: dict[str, GlobalTensor], tensors: dict[str, Tensor], config: PretrainConfig, base: Base
) -> Path:
    """Write a run directory with a checkpoint of adapters; return the checkpoint. Raises UserError."""
    tokenizer, beside = load_tokenizer(None, base.path), base.path
    beside = beside if is_model_folder(beside) else run_directory(beside)
    tokenizer.chat_template = ChatTemplate.find(beside, tokenizer)
    state: dict[str, Any] = {
        "step": 0,
        "weights_only": True,
        "config": to_dict(config),
        "source": {"kind": "peft", "name": config.name},
        LORA: base.encode(),
        TOKENIZER: digests_of_tokenizer(tokenizer).encode(),
        "versions": {"mlm": mlm.__version__, "torch": torch.__version__},
    }
    count = sum(tensor.num_bytes for tensor in form.values())
    with new_folder(out, count) as folder:
        written = write_streamed(
            folder / CHECKPOINTS,
            0,
            form,
            lambda name, region: tensors[name][region.within(Region((0, 0), tuple(tensors[name].shape)))],
            save_id=derived_id(state),
            state=state,
        )
        tokenizer.save(folder / "tokenizer.json")
        if tokenizer.chat_template is not None:
            tokenizer.chat_template.save(folder)
    return out / CHECKPOINTS / written.name
