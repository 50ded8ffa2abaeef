"""`mlm export hf`: a checkpoint as a folder that `transformers` loads, tokenizer and all.

Tensors are read and written one at a time, whatever layout wrote the checkpoint; the vocabulary has no
padding. The folder is loaded by `transformers` and its logits compared before it gets its name.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mlm.checkpoint.huggingface.config import Family, family_for
from mlm.checkpoint.huggingface.content import Ids
from mlm.checkpoint.huggingface.folder import CONFIG, INDEX, WEIGHTS
from mlm.checkpoint.huggingface.names import Place
from mlm.checkpoint.native.compare import Reader
from mlm.checkpoint.native.format import JSON, RESTORE, Manifest, read_manifest
from mlm.checkpoint.native.save_load import resolve
from mlm.checkpoint.native.shard_file import Form, write_stream
from mlm.checkpoint.native.slices import Region
from mlm.checkpoint.native.verify import shard_bytes, verify_checkpoint
from mlm.convert.config import ExportHFConfig
from mlm.convert.hf_verify import NOT_COMPARED, Agreement, compare_logits, extra_problems
from mlm.data.tokenizer import UNK, Tokenizer
from mlm.errors import ConfigError, CorruptFileError, UserError
from mlm.files.atomic import write_atomic
from mlm.inference.trained import check_stored, load_tokenizer, run_directory, trained_config
from mlm.models.config import ModelConfig
from mlm.terminal import Advance, byte_progress
from mlm.train.run_folder import GB, new_folder, out_problems
from mlm.train.state import FINETUNING

SAFETENSORS_FOR = {"format": "pt"}
"""`__metadata__` without which transformers refuses a file."""

BERT_INPUTS = ("input_ids", "token_type_ids", "attention_mask")
"""What a tokenizer makes of texts for BERT."""

HEADER = 256  # bytes that a tensor needs in the header of its file, at most


@dataclass(frozen=True)
class Exported:
    """A tensor on its way: our parameter, where it goes, its shape there."""

    ours: str
    place: Place
    part: int
    """Which of the place's tensors it is."""
    theirs: str
    form: Form


@dataclass(frozen=True)
class Source:
    """The checkpoint to export."""

    path: Path
    manifest: Manifest
    model: ModelConfig
    family: Family
    tokenizer: Tokenizer | None


def preflight(config: ExportHFConfig) -> list[str]:
    """What is wrong with the checkpoint and the place to write to; no tensor is read."""
    faults = [*out_problems(config.out), *extra_problems(config.verify)]
    if not config.max_file_gb > 0:
        faults.append(f"max_file_gb={config.max_file_gb} must be greater than 0")
    try:
        plan_tensors(open_source(config.ckpt))
    except CorruptFileError:
        raise  # damage has an exit code of its own
    except ConfigError as error:
        faults += error.problems
    except UserError as error:
        faults.append(str(error))
    return faults


def run(config: ExportHFConfig) -> None:
    """Verify the digests, write, compare logits, publish, and print a table. Raises UserError."""
    source = open_source(config.ckpt)
    tensors = plan_tensors(source)
    count = sum(tensor.form.num_bytes for tensor in tensors)
    files = into_files(tensors, int(config.max_file_gb * GB))
    with new_folder(Path(config.out), count, "exported-model") as folder:
        with byte_progress("exporting", shard_bytes(source.path) + count) as advance:
            check_whole(source, advance)
            shift = folded_bias(source)
            write_weights(source, files, folder, advance, shift)
        write_settings(source, folder)
        agreement = compare_logits(folder, source.path) if config.verify else None
    show(config, source, files, agreement, is_folded=shift is not None)


def open_source(ckpt: str) -> Source:
    """Read the manifest and the tokenizer. Raises UserError."""
    path = resolve(ckpt)
    manifest = read_manifest(path)
    model = trained_config(manifest, path).model
    if model.kind == "bert" and not model.token_types:
        raise UserError(
            f"{path}: its model.token_types=0, and transformers' BERTs have token types: train it with "
            f"model.token_types=2"
        )
    check_stored(manifest, model, path)
    saved = run_directory(path) / "tokenizer.json"
    tokenizer = load_tokenizer(None, path) if os.path.lexists(saved) else None
    return Source(path, manifest, model, family_for(model), tokenizer)


def plan_tensors(source: Source) -> list[Exported]:
    """Every parameter in the order of the model. Raises CorruptFileError when the checkpoint lacks one."""
    out = []
    for name, place in source.family.places(source.model):
        entry = source.manifest.tensors.get(f"model.{name}")
        if entry is None:
            raise CorruptFileError(f"{source.path}: holds no model.{name}, its config has one. {RESTORE}")
        form = Form(torch.float32, place.shape(entry.shape))
        for part, theirs in enumerate(place.names):
            full = source.family.full_name(theirs, source.model.head)
            out.append(Exported(f"model.{name}", place, part, full, form))
    return out


def into_files(tensors: list[Exported], most: int) -> dict[str, list[Exported]]:
    """Deal tensors out to files of at most `most` bytes, in order; a larger tensor has one of its own."""
    groups: list[list[Exported]] = [[]]
    size = 0
    for tensor in tensors:
        needed = tensor.form.num_bytes + HEADER
        if groups[-1] and size + needed > most:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += needed
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    return {f"model-{n:05d}-of-{len(groups):05d}.safetensors": group for n, group in enumerate(groups, 1)}


def check_whole(source: Source, progress: Advance) -> None:
    """Raises CorruptFileError for a file whose bytes are not those that were saved."""
    found = verify_checkpoint(source.path, progress)
    if not found.loads:
        fault = found.problems[0]
        raise CorruptFileError(f"{source.path / fault.file}: {fault.why}. {RESTORE}")


def write_weights(
    source: Source,
    files: Mapping[str, list[Exported]],
    folder: Path,
    progress: Advance,
    shift: Tensor | None = None,
) -> None:
    """Write the safetensors files and, of several, their index; `shift` [H] is added to final_norm's bias."""

    def read(tensor: Exported) -> Tensor:
        value = load(reader, tensor)
        return value if shift is None or tensor.ours != "model.final_norm.bias" else value + shift

    with Reader(source.path, source.manifest) as reader:
        for name, tensors in files.items():
            by_name = {tensor.theirs: tensor for tensor in tensors}
            write_stream(
                folder / name,
                {theirs: tensor.form for theirs, tensor in by_name.items()},
                lambda theirs, by_name=by_name: read(by_name[theirs]),  # type: ignore[misc]
                SAFETENSORS_FOR,
                progress,
            )
    if len(files) > 1:
        size = sum(tensor.form.num_bytes for tensors in files.values() for tensor in tensors)
        listed = {tensor.theirs: name for name, tensors in files.items() for tensor in tensors}
        write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": listed})


def load(reader: Reader, tensor: Exported) -> Tensor:
    """A tensor as transformers stores it, float32. Raises CorruptFileError."""
    return tensor.place.to_theirs(read_whole(reader, tensor.ours))[tensor.part]


def read_whole(reader: Reader, name: str) -> Tensor:
    """A parameter of ours, float32. Raises CorruptFileError."""
    shape = reader.manifest.tensors[name].shape
    try:
        return reader.read(name, Region((0,) * len(shape), shape)).float()
    except OSError as error:
        raise CorruptFileError(f"{error.filename}: cannot be read: {error.strerror}. {RESTORE}") from error


def folded_bias(source: Source) -> Tensor | None:
    """What final_norm's bias has to carry, [H], where the class has no place for the classifier's; else None.

    Of all d with W d = b the smallest. Nothing but the classifier W reads that norm's output: its logits stay
    the same but for rounding. Raises UserError where there is no such d.
    """
    if not source.family.zero_there.get(source.model.head):
        return None
    with Reader(source.path, source.manifest) as reader:
        weight, bias = (
            read_whole(reader, f"model.classifier.{part}").double() for part in ("weight", "bias")
        )
    if not bias.any():
        return None
    shift = torch.linalg.pinv(weight) @ bias
    if not torch.allclose(weight @ shift, bias, rtol=1e-6, atol=1e-9):
        raise UserError(
            f"{source.path}: {source.family.architectures[source.model.head]} has no bias in its classifier, "
            f"and ours cannot be moved into the norm before it, as the labels' weights depend on each other. "
            f"Finetune once more, with another seed"
        )
    return shift.float()


def write_settings(source: Source, folder: Path) -> None:
    """config.json, and the tokenizer with what AutoTokenizer and generate() want to know."""
    tokenizer, model = source.tokenizer, source.model
    ids = ids_of(source)
    write_json(folder / CONFIG, source.family.write(model, ids))
    if tokenizer is None:
        return
    tokenizer.save(folder / "tokenizer.json")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.max_positions,
        "clean_up_tokenization_spaces": False,
        **special_tokens(tokenizer, model, ids),
    }
    write_json(folder / "tokenizer_config.json", settings)
    if model.kind == "gpt2" and model.head == "language_model":
        named = {"bos_token_id": ids.eod, "eos_token_id": ids.eod}
        write_json(folder / "generation_config.json", {"_from_model_config": True, **named})


def ids_of(source: Source) -> Ids:
    """What config.json has to tell: as the imported folder did, else as the tokenizer and the task do."""
    tokenizer, imported = source.tokenizer, source.manifest.state.get("source")
    said = imported if isinstance(imported, dict) else {}
    eod, pad = (None, None) if tokenizer is None else (tokenizer.eod_id, tokenizer.pad_id)
    told = said.get("pad_token_id")
    names = label_names(source.manifest) or texts(said.get("labels"))
    return Ids(eod, told if isinstance(told, int) else pad, names)


def label_names(manifest: Manifest) -> tuple[str, ...]:
    """The labels of the task that a checkpoint was finetuned on; none where it says none."""
    state = manifest.state.get(FINETUNING)
    found = state.get("depends_on") if isinstance(state, dict) else None
    return texts(found.get("task.labels")) if isinstance(found, dict) else ()


def texts(said: JSON) -> tuple[str, ...]:
    """A list of texts; none where it is something else."""
    if not isinstance(said, list) or not all(isinstance(text, str) for text in said):
        return ()
    return tuple(said)


def special_tokens(tokenizer: Tokenizer, model: ModelConfig, ids: Ids) -> dict[str, JSON]:
    """The special tokens for AutoTokenizer: GPT-2 has one, BERT those of five that its vocabulary has."""
    if model.kind == "bert":
        named = {
            "cls": tokenizer.cls_id,
            "sep": tokenizer.sep_id,
            "mask": tokenizer.mask_id,
            "pad": tokenizer.pad_id,
        }
        found = {f"{name}_token": tokenizer.decode([id]) for name, id in named.items() if id is not None}
        return {**found, "unk_token": UNK, "model_input_names": list(BERT_INPUTS)}
    eod = tokenizer.decode([tokenizer.eod_id])
    pad = tokenizer.eod_id if ids.pad is None and model.head == "classification" else ids.pad
    padded = {} if pad is None else {"pad_token": tokenizer.decode([pad])}
    return {"bos_token": eod, "eos_token": eod, "unk_token": eod, **padded}


def write_json(path: Path, value: JSON) -> None:
    """Write JSON as transformers formats it."""
    write_atomic(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def show(
    config: ExportHFConfig,
    source: Source,
    files: Mapping[str, list[Exported]],
    agreement: Agreement | None,
    *,
    is_folded: bool,
) -> None:
    """The table for people, and what they should know."""
    table = Table(title=f"export hf · {source.path}", title_justify="left")
    for name in ("class", "parameters", "step", "files", "GB"):
        table.add_column(name, justify="right")
    size = sum(tensor.form.num_bytes for tensors in files.values() for tensor in tensors)
    numbers = (f"{source.model.num_parameters():,}", str(source.manifest.step), str(len(files)))
    table.add_row(source.family.architectures[source.model.head], *numbers, f"{size / GB:.3g}")
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(table)
    if source.tokenizer is None:
        console.print(f"note: no tokenizer: {run_directory(source.path)} holds no tokenizer.json")
    if is_folded:
        console.print(
            "note: the classifier's bias, which has no place there, is carried by the norm before it"
        )
    console.print(str(agreement or NOT_COMPARED))
    console.print(f"written to {config.out}")
