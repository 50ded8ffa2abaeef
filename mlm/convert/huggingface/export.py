"""A folder that `transformers` loads, made of any source: tensors, settings, tokenizer and model card.

Tensors are read and written one at a time; the vocabulary is not padded. Adapters become a folder that `peft`
loads, or are merged into the weights of their base.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mlm.checkpoint.native.format import JSON
from mlm.checkpoint.native.run_state import FINETUNING, as_strings, label_names
from mlm.checkpoint.native.shard_file import Form, write_stream
from mlm.checkpoint.native.slices import Region
from mlm.checkpoint.native.stream import group_by_size
from mlm.convert.huggingface import peft
from mlm.convert.huggingface.families import mapping_of
from mlm.convert.huggingface.folder import CONFIG, INDEX, WEIGHTS
from mlm.convert.huggingface.mapping import HuggingFaceMapping, Location, TokenIds
from mlm.convert.huggingface.model_card import CARD, model_card
from mlm.convert.source import Checkpoint, ModelFolder, Source, open_checkpoint
from mlm.data.chat_tokens import end_of_turn_tokens
from mlm.data.tokenizer_settings import ids_of
from mlm.models.family import family_of
from mlm.models.shape import count_parameters
from mlm.runs.folder import GB, new_folder, out_problems
from mlm.util.errors import UserError
from mlm.util.files import write_atomic
from mlm.util.terminal import Advance, progress_bar

SAFETENSORS_FOR = {"format": "pt"}
"""`__metadata__` that transformers requires."""
NOT_COMPARED = "not verified: logits were not compared with those of transformers (verify=false)"
Compare = Callable[[Path, Path], object]
HEADER = 256  # bytes that a tensor needs in the header of its file, at most


class Exported(NamedTuple):
    """A tensor to write, and the parameters, one after the other, that it is `part` of, or that it holds."""

    theirs: str
    form: Form
    ours: tuple[str, ...]
    locations: tuple[Location, ...]
    part: int


def export_problems(ckpt: str, out: str, max_file_gb: float) -> list[str]:
    """Return what is wrong with a checkpoint to export, and with `out`; no tensor is read."""
    problems = out_problems(out)
    if not max_file_gb > 0:
        problems.append(f"max_file_gb={max_file_gb} must be greater than 0")
    try:
        source = open_checkpoint(ckpt)
        source.check()
        hf_mapping(source)
    except UserError as error:
        problems += error.problems
    return problems


def export_model(
    source: Checkpoint,
    out: Path,
    *,
    max_file_gb: float,
    merge: bool,
    compare: Compare | None,
    base: str | None = None,
) -> tuple[dict[str, object], list[str], str]:
    """Verify the digests, write a new folder, compare and publish; return columns, notes and a line on it.

    `compare(folder, checkpoint)` raises UserError where outputs differ; None compares none. `base` is another
    name for the base of adapters.
    """
    mapping, count = hf_mapping(source), tensor_bytes(source, torch.float32)
    with new_folder(out, count, "exported-model") as folder:
        source.digests()
        if source.base is not None and not merge:
            name = base or source.base_name
            rank = write_adapters(source, source.base, folder, name)
            write_settings(source, mapping, folder, adapted=name)
            note = f"its base in the form that peft loads: mlm export hf ckpt={name} out=… merge=true"
            notes = [] if isinstance(source.base, ModelFolder) else [note]
            return {"rank#": rank}, notes, f"adapters of {name}, for peft"
        with progress_bar("exporting", count, in_bytes=True) as advance:
            files, is_folded = write_hf(source, folder, torch.float32, max_file_gb, advance)
        line = NOT_COMPARED if compare is None else str(compare(folder, source.path))
    columns = {
        "class#": mapping.architecture(source.model),
        "parameters#": f"{count_parameters(source.model):,}",
        "step#": source.manifest.step,
        "files#": files,
        "GB#": f"{count / GB:.3g}",
    }
    notes = []
    if source.tokenizer is None:
        notes.append(f"no tokenizer: {source.folder} holds no tokenizer.json")
    if is_folded:
        notes.append("the classifier's bias, which the class has no parameter for, is in the norm before it")
    return columns, notes, line


def write_adapters(source: Checkpoint, base: Source, folder: Path, base_name: str) -> int:
    """Write adapters as `peft` does, with its settings, which name the base; return their rank.

    A task's head is written whole beside them. Raises UserError if `transformers` has it otherwise.
    """
    lora, mapping = source.config.lora, hf_mapping(source)

    def read(name: str) -> Tensor:
        return source.read(name, Region.whole(source.manifest.tensors[f"model.{name}"].shape))

    tensors = peft.stored_tensors(source.model, lora, read, base.whole)
    head = {name.removeprefix("model.") for name in source.manifest.tensors if ".lora." not in name}
    locations = {ours: location for ours, location in mapping.locations(source.model) if ours in head}
    trained = [mapping.stored_name(location.names[0], source.model) for location in locations.values()]
    if locations and source.model.head in mapping.heads_without_bias:
        raise UserError(
            f"{source.path}: {mapping.architecture(source.model)} has no bias in its classifier, which these "
            "adapters were trained with; use mlm export hf merge=true"
        )
    settings = peft.write_config(source.model, lora, base_name, tensors, trained)
    for name, (ours, location) in zip(trained, locations.items(), strict=True):
        tensors[f"{peft.PREFIX}{name}"] = location.to_theirs(read(ours))[0]
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    forms = {name: Form(torch.float32, tuple(value.shape)) for name, value in tensors.items()}
    write_stream(folder / peft.WEIGHTS, forms, tensors.__getitem__, SAFETENSORS_FOR)
    write_json(folder / peft.CONFIG, settings)
    return lora.rank


def tensor_bytes(source: Source, dtype: torch.dtype) -> int:
    return sum(entry.num_bytes // 4 * dtype.itemsize for entry in source.parameters.values())


def hf_mapping(source: Source) -> HuggingFaceMapping:
    """Return how `transformers` holds such a model. Raises UserError if it has none."""
    model, mapping = source.model, mapping_of(source.model)
    if mapping is None:
        raise UserError(f"{source.path}: its model.kind={model.kind} has no counterpart in transformers")
    if model.mup_base_width is not None:
        raise UserError(
            f"{source.path}: model.mup_base_width={model.mup_base_width} divides what the output layer "
            "reads, which no model of transformers does; export one trained without it"
        )
    if problem := mapping.problem(model, source.tokenizer):
        raise UserError(f"{source.path}: {problem}")
    return mapping


def write_hf(
    source: Source,
    folder: Path,
    dtype: torch.dtype,
    file_gb: float,
    advance: Advance,
) -> tuple[int, bool]:
    """Write the folder; return its number of files of tensors, and True if a bias was folded."""
    mapping, exported = hf_mapping(source), dict[str, Exported]()
    for ours, location in mapping.locations(source.model):
        form = Form(dtype, location.shape(source.parameters[ours].shape))
        for part, name in enumerate(location.names):
            theirs = mapping.stored_name(name, source.model)
            before = exported.get(theirs, Exported(theirs, form, (), (), part))
            exported[theirs] = before._replace(
                ours=(*before.ours, ours), locations=(*before.locations, location)
            )
    groups = group_by_size(
        list(exported.values()), lambda tensor: tensor.form.num_bytes + HEADER, int(file_gb * GB)
    )
    names = [f"model-{n:05d}-of-{len(groups):05d}.safetensors" for n in range(1, len(groups) + 1)]
    files = dict(zip(names if len(groups) > 1 else [WEIGHTS], groups, strict=True))
    shift = folded_bias(source, mapping)

    def write(name: str) -> None:
        tensors = {tensor.theirs: tensor for tensor in files[name]}

        def read(theirs: str) -> Tensor:
            value = stored_tensor(tensors[theirs], source).to(dtype)
            return value if shift is None or "final_norm.bias" not in tensors[theirs].ours else value + shift

        forms = {theirs: tensor.form for theirs, tensor in tensors.items()}
        write_stream(folder / name, forms, read, SAFETENSORS_FOR, advance)

    for name in files:
        write(name)
    if len(files) > 1:
        size = sum(tensor.form.num_bytes for tensors in files.values() for tensor in tensors)
        listed = {tensor.theirs: name for name, tensors in files.items() for tensor in tensors}
        write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": listed})
    config = mapping.write(source.model, token_ids(source))
    if dtype != torch.float32:
        config["dtype"] = str(dtype).removeprefix("torch.")
    if source.tokenizer is not None and "eos_token_id" in config:
        eod = source.tokenizer.eod_id
        config["eos_token_id"] = one_or_all([eod, *sorted(source.tokenizer.end_ids - {eod})])
    write_json(folder / CONFIG, config)
    write_settings(source, mapping, folder)
    return len(files), shift is not None


def stored_tensor(tensor: Exported, source: Source) -> Tensor:
    """Return a tensor to write, float32; of stacked tensors only this one is read."""
    (location, *others), shape = tensor.locations, tensor.form.shape
    if others:  # in the order of their sections
        return torch.cat(
            [
                at.to_theirs(source.whole(ours))[0]
                for ours, at in zip(tensor.ours, tensor.locations, strict=True)
            ]
        )
    if not location.stacked:
        return location.to_theirs(source.whole(tensor.ours[0]))[tensor.part]
    index = location.indices[tensor.part]
    region = Region((*index, *(0 for _ in shape)), (*(1 for _ in index), *shape))
    return source.read(tensor.ours[0], region).view(shape)


def folded_bias(source: Source, mapping: HuggingFaceMapping) -> Tensor | None:
    """Return the term [H] to add to final_norm's bias if the class has no classifier bias, else None.

    It is the smallest d with W d = b. Only the classifier W reads that norm's output, so its logits stay the
    same up to rounding. Raises UserError if there is no such d.
    """
    if source.model.head not in mapping.heads_without_bias:
        return None
    weight, bias = (source.whole(f"classifier.{part}").double() for part in ("weight", "bias"))
    if not bias.any():
        return None
    shift: Tensor = torch.linalg.pinv(weight) @ bias
    if not torch.allclose(weight @ shift, bias, rtol=1e-6, atol=1e-9):
        raise UserError(
            f"{source.path}: {mapping.architecture(source.model)} has no bias in its classifier, "
            f"and ours cannot be moved into the norm before it, as the labels' weights depend on each other. "
            f"Finetune once more, with another seed"
        )
    return shift.float()


def write_settings(
    source: Source, mapping: HuggingFaceMapping, folder: Path, *, adapted: str | None = None
) -> None:
    """Write the model card, and the tokenizer with settings of AutoTokenizer and generate().

    `adapted` is the base of a folder of adapters.
    """
    tokenizer, model, ids = source.tokenizer, source.model, token_ids(source)
    card = model_card(source.manifest, model, mapping.architecture(model), adapted)
    write_atomic(folder / CARD, card.encode())
    if tokenizer is None:
        return
    content = tokenizer.content_ending_texts() if ids.ends_texts else tokenizer.content
    write_atomic(folder / "tokenizer.json", content)
    template = tokenizer.chat_template
    if template is not None:
        template.save_sources(folder)
    declared = tokenizer.declared
    # GPT-2's classifiers pad with the end of a document where nothing declares a padding
    kept = {key: value for key, value in tokenizer.settings.items() if (key, value) != ("pad_token", None)}
    settings = {
        "model_max_length": model.max_positions,
        "clean_up_tokenization_spaces": False,
        **mapping.special_tokens(tokenizer, model, ids),
        **kept,
        **({} if template is None else template.settings),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(folder / "tokenizer_config.json", settings)
    if family_of(model.kind).causal and model.head == "language_model":
        listed = ids_of(declared.generation.get("eos_token_id"))
        ends = tokenizer.end_ids if template is None else end_of_turn_tokens(template, tokenizer)
        generation = {
            "bos_token_id": mapping.write(model, ids).get("bos_token_id"),
            **(declared.generation or {"_from_model_config": True}),
            "eos_token_id": one_or_all([*(id for id in listed if id in ends), *sorted(ends - {*listed})]),
        }
        write_json(folder / "generation_config.json", generation)


def one_or_all(ids: list[int]) -> int | list[int]:
    return ids[0] if len(ids) == 1 else ids


def token_ids(source: Source) -> TokenIds:
    """Return ids and labels for config.json: the imported folder's, else of tokenizer and task."""
    tokenizer, origin = source.tokenizer, source.manifest.state.get("source")
    imported = origin if isinstance(origin, dict) else {}
    eod, bos, pad = (getattr(tokenizer, f"{name}_id", None) for name in ("eod", "bos", "pad"))
    kept, is_causal = imported.get("pad_token_id"), family_of(source.model.kind).causal
    names = label_names(source.manifest.state) or as_strings(imported.get("labels"))
    on_texts = FINETUNING in source.manifest.state and source.model.head != "language_model"
    if isinstance(kept, int) or (imported and is_causal):  # which says so itself, or has none
        pad = kept
    return TokenIds(eod, bos, pad, names, ends_texts=on_texts and is_causal)


def write_json(path: Path, value: JSON) -> None:
    write_atomic(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())
