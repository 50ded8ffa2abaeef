"""Export of any source to a folder that `transformers` loads: tensors, settings, tokenizer, model card.

Tensors are read and written one at a time, without padding of the vocabulary. Adapters become a folder that
`peft` loads, or are merged into the weights of their base.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mlm.checkpoint.native.format import JSON
from mlm.checkpoint.native.inspection import dig
from mlm.checkpoint.native.run_state import FINETUNING, as_strings
from mlm.checkpoint.native.shard_file import Form, write_stream
from mlm.checkpoint.native.slices import Region
from mlm.checkpoint.native.stream import WriteFile, group_by_size, write_anew
from mlm.convert.huggingface import peft
from mlm.convert.huggingface.families import mapping_of
from mlm.convert.huggingface.folder import CONFIG, INDEX, WEIGHTS
from mlm.convert.huggingface.mapping import HuggingFaceMapping, TokenIds
from mlm.convert.huggingface.model_card import CARD, model_card
from mlm.convert.locations import foreign_tensors
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


def export_problems(ckpt: str, out: str, max_file_gb: float) -> list[str]:
    """Return the problems of a checkpoint to export, and of `out`; no tensor is read."""
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
    """Verify digests, write a new folder, compare and publish; return columns, notes and a summary line.

    `compare(folder, checkpoint)` raises UserError if outputs differ; None skips it. `base` is another name
    for the base of adapters.
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
    """Write adapters, and the head of a task, as `peft` stores them; return the rank of the adapters.

    Raises UserError if `transformers` has another head.
    """
    lora, mapping = source.config.lora, hf_mapping(source)

    def load(name: str) -> Tensor:
        return source.read(name, Region.full(source.manifest.tensors[f"model.{name}"].shape))

    tensors = peft.stored_tensors(source.model, lora, load, base.read_full)
    head = {name.removeprefix("model.") for name in source.manifest.tensors if ".lora." not in name}
    locations = {key: location for key, location in mapping.locations(source.model) if key in head}
    head_names = [mapping.stored_name(location.names[0], source.model) for location in locations.values()]
    if locations and source.model.head in mapping.heads_without_bias:
        raise UserError(
            f"{source.path}: {mapping.architecture(source.model)} has no bias in its classifier, which these "
            "adapters were trained with; use mlm export hf merge=true"
        )
    settings = peft.write_config(source.model, lora, base_name, tensors, head_names)
    for name, (key, location) in zip(head_names, locations.items(), strict=True):
        tensors[f"{peft.PREFIX}{name}"] = location.to_stored(load(key))[0]
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    forms = {name: Form(torch.float32, tuple(value.shape)) for name, value in tensors.items()}
    write_stream(folder / peft.WEIGHTS, forms, tensors.__getitem__, SAFETENSORS_FOR)
    write_json(folder / peft.CONFIG, settings)
    return lora.rank


def tensor_bytes(source: Source, dtype: torch.dtype) -> int:
    return sum(entry.num_bytes // 4 * dtype.itemsize for entry in source.parameters.values())


def hf_mapping(source: Source) -> HuggingFaceMapping:
    """Return the mapping of a source's model. Raises UserError if `transformers` has no such model."""
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
    write_file: WriteFile = write_anew,
) -> tuple[int, bool]:
    """Write the folder; return its number of files of tensors, and True if a bias was folded."""
    model, mapping = source.model, hf_mapping(source)
    tensors = foreign_tensors(
        mapping.locations(model), source.parameters, lambda name: mapping.stored_name(name, model)
    )
    forms = {name: Form(dtype, tensor.shape) for name, tensor in tensors.items()}
    # 256 bytes: upper bound for a tensor's entry in the file header.
    groups = group_by_size(tensors, lambda name: forms[name].num_bytes + 256, int(file_gb * GB))
    names = [f"model-{n:05d}-of-{len(groups):05d}.safetensors" for n in range(1, len(groups) + 1)]
    files = dict(zip(names if len(groups) > 1 else [WEIGHTS], groups, strict=True))
    shift = folded_bias(source, mapping)

    def compute(name: str) -> Tensor:
        value = tensors[name].compute(source.read)
        if shift is not None and tensors[name].sources[0][0] == "final_norm.bias":
            value = value + shift
        return value.to(dtype)

    def write(file: str) -> None:
        write_stream(
            folder / file, {name: forms[name] for name in files[file]}, compute, SAFETENSORS_FOR, advance
        )

    for file in files:
        write_file(folder / file, partial(write, file))
    if len(files) > 1:
        size = sum(form.num_bytes for form in forms.values())
        weight_map = {name: file for file, stored in files.items() for name in stored}
        write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    config = hf_config(source, mapping)
    if dtype != torch.float32:
        config["dtype"] = str(dtype).removeprefix("torch.")
    write_json(folder / CONFIG, config)
    write_settings(source, mapping, folder)
    return len(files), shift is not None


def hf_config(source: Source, mapping: HuggingFaceMapping) -> dict[str, JSON]:
    """Return config.json; ids that end texts come from the tokenizer, else from the source's declaration."""
    config, tokenizer = mapping.write(source.model, token_ids(source)), source.tokenizer
    if tokenizer is None and isinstance(origin := source.manifest.state.get("source"), dict):
        config |= {key: origin[key] for key in ("bos_token_id", "eos_token_id") if key in origin}
    if tokenizer is not None and "eos_token_id" in config:
        eod = tokenizer.eod_id
        config["eos_token_id"] = single_or_list([eod, *sorted(tokenizer.end_ids - {eod})])
    return config


def folded_bias(source: Source, mapping: HuggingFaceMapping) -> Tensor | None:
    """Return the term [H] to add to final_norm's bias if the class has no classifier bias, else None.

    It is the least-norm d with W d = b. Only the classifier W reads that norm's output, so logits change by
    rounding alone. Raises UserError if no d exists.
    """
    if source.model.head not in mapping.heads_without_bias:
        return None
    weight, bias = (source.read_full(f"classifier.{part}").double() for part in ("weight", "bias"))
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
    # GPT-2's classifiers pad with the end of a document if no padding is declared.
    extra = {key: value for key, value in tokenizer.settings.items() if (key, value) != ("pad_token", None)}
    settings = {
        "model_max_length": model.max_positions,
        "clean_up_tokenization_spaces": False,
        **mapping.special_tokens(tokenizer, model, ids),
        **extra,
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
            "eos_token_id": single_or_list([*(id for id in listed if id in ends), *sorted(ends - {*listed})]),
        }
        write_json(folder / "generation_config.json", generation)


def single_or_list(ids: list[int]) -> int | list[int]:
    return ids[0] if len(ids) == 1 else ids


def token_ids(source: Source) -> TokenIds:
    """Return ids and labels for config.json, from the imported folder, else from tokenizer and task."""
    tokenizer, origin = source.tokenizer, source.manifest.state.get("source")
    imported = origin if isinstance(origin, dict) else {}
    eod, bos, pad = (getattr(tokenizer, f"{name}_id", None) for name in ("eod", "bos", "pad"))
    imported_pad, is_causal = imported.get("pad_token_id"), family_of(source.model.kind).causal
    labels = dig(source.manifest.state, FINETUNING, "depends_on", "task.labels") or imported.get("labels")
    names = as_strings(labels)
    on_texts = FINETUNING in source.manifest.state and source.model.head != "language_model"
    if isinstance(imported_pad, int) or (imported and is_causal):  # the import's padding, if any, counts
        pad = imported_pad
    return TokenIds(eod, bos, pad, names, ends_texts=on_texts and is_causal)


def write_json(path: Path, value: JSON) -> None:
    write_atomic(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())
