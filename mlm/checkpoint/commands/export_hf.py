"""`mlm export hf`: a checkpoint as a folder that `transformers` loads, tokenizer included.

Tensors are read and written one at a time, whatever layout wrote the checkpoint; the vocabulary is not
padded. The folder is loaded by `transformers` and its logits are compared before it gets its name.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mlm.checkpoint.commands.config import ExportHFConfig
from mlm.checkpoint.commands.hf_verify import NOT_COMPARED, Agreement, compare_logits, extra_problems
from mlm.checkpoint.commands.model_card import CARD, model_card
from mlm.checkpoint.commands.result import show_table
from mlm.checkpoint.commands.weights import WholeWeights
from mlm.checkpoint.huggingface import peft
from mlm.checkpoint.huggingface.folder import CONFIG, INDEX, WEIGHTS
from mlm.checkpoint.native.folders import best_note
from mlm.checkpoint.native.format import JSON, RESTORE, FileEntry, Manifest, read_manifest
from mlm.checkpoint.native.run_state import FINETUNING, as_strings, label_names
from mlm.checkpoint.native.save_load import resolve
from mlm.checkpoint.native.shard_file import Form, write_stream
from mlm.checkpoint.parameters import parameters
from mlm.data.chat_template import FILE as CHAT_TEMPLATE
from mlm.data.chat_template import ChatTemplate
from mlm.data.tokenizer import Tokenizer
from mlm.inference.base import Base
from mlm.inference.chat import end_of_turn_tokens
from mlm.inference.trained import (
    check_stored_parameters,
    is_model_folder,
    load_tokenizer,
    resolve_checkpoint,
    run_directory,
    trained_config,
)
from mlm.models.config import LoraConfig, ModelConfig
from mlm.models.family import family_of
from mlm.models.huggingface import HuggingFaceMapping, Location, TokenIds
from mlm.training.run_folder import GB, new_folder, out_problems
from mlm.util.errors import ConfigError, CorruptFileError, UserError
from mlm.util.files import write_atomic
from mlm.util.terminal import Advance, progress_bar

SAFETENSORS_FOR = {"format": "pt"}
"""`__metadata__` that transformers requires."""

HEADER = 256  # bytes that a tensor needs in the header of its file, at most


@dataclass(frozen=True)
class Exported:
    """A tensor to write, and the parameter it is made of."""

    ours: str
    location: Location
    part: int
    """Number among the location's tensors."""
    theirs: str
    form: Form


@dataclass(frozen=True)
class ExportSource:
    """The checkpoint to export."""

    path: Path
    manifest: Manifest
    model: ModelConfig
    mapping: HuggingFaceMapping
    tokenizer: Tokenizer | None
    lora: LoraConfig = field(default_factory=LoraConfig)
    base: Base | None = None
    """Of adapters; None for a checkpoint that holds the whole model."""

    @property
    def architecture(self) -> str:
        """Class of `transformers` that holds the model."""
        return self.mapping.architecture(self.model)


def preflight(config: ExportHFConfig) -> list[str]:
    """Return what is wrong with the checkpoint and `out`; no tensor is read."""
    problems = [*out_problems(config.out), *extra_problems(config.verify)]
    if not config.max_file_gb > 0:
        problems.append(f"max_file_gb={config.max_file_gb} must be greater than 0")
    try:
        plan_tensors(open_source(config.ckpt))
    except UserError as error:
        problems += error.problems
    return problems


def export_hf(
    ckpt: str | Path,
    out: str | Path,
    *,
    max_file_gb: float = 5.0,
    verify: bool = True,
    merge: bool = False,
) -> Path:
    """Write a checkpoint as a folder that `transformers` loads, as `mlm export hf` does; return the folder.

    Args:
        ckpt: Run directory (its latest checkpoint; of a finetuned run the best) or checkpoint (step-…).
        out: Folder to write, a new one.
        max_file_gb: Largest .safetensors file, in 10^9 bytes.
        verify: Compare logits with those of `transformers`, and write nothing where they differ.
        merge: Of a run with adapters, add them to the weights of their base; else they are written alone, as
            `peft` loads them.

    Raises:
        UserError: The model is not supported, `out` is not free, or the logits differ.
    """
    config = ExportHFConfig(ckpt=str(ckpt), out=str(out), max_file_gb=max_file_gb, verify=verify, merge=merge)
    if problems := preflight(config):
        raise ConfigError(problems)
    convert(config)
    return Path(out)


def run(config: ExportHFConfig) -> None:
    """Export the checkpoint and print a table. Raises UserError."""
    show(config, *convert(config))


def convert(
    config: ExportHFConfig,
) -> tuple[ExportSource, Mapping[str, list[Exported]], Agreement | None, bool]:
    """Verify the digests, write, compare logits and publish; return what `show` prints."""
    source = open_source(config.ckpt)
    tensors = plan_tensors(source)
    count = sum(tensor.form.num_bytes for tensor in tensors)
    files = into_files(tensors, int(config.max_file_gb * GB))
    is_adapter = source.base is not None and not config.merge
    with (
        new_folder(Path(config.out), count, "exported-model") as folder,
        WholeWeights(source.path) as weights,
    ):
        with progress_bar("exporting", weights.num_bytes + count, in_bytes=True) as advance:
            weights.check(advance)
            if is_adapter:
                files, is_folded = write_adapters(source, weights, folder), False
            else:
                is_folded = write_weights(source, files, folder, advance, weights.read)
        write_settings(source, folder, with_model=not is_adapter)
        agreement = compare_logits(folder, source.path) if config.verify and not is_adapter else None
    return source, files, agreement, is_folded


def open_source(ckpt: str) -> ExportSource:
    """Read the manifest and the tokenizer. Raises UserError."""
    path = resolve(ckpt)
    manifest = read_manifest(path)
    trained, base = trained_config(manifest, path), Base.of(manifest, path)
    model = trained.model
    mapping = family_of(model.kind).huggingface
    if mapping is None:
        raise UserError(f"{path}: its model.kind={model.kind} has no counterpart in transformers")
    if model.mup_base_width is not None:
        raise UserError(
            f"{path}: model.mup_base_width={model.mup_base_width} divides what the output layer reads, which "
            "no model of transformers does; export one trained without it"
        )
    if problem := mapping.problem(model):
        raise UserError(f"{path}: {problem}")
    if base is None:
        check_stored_parameters(manifest, model, path)
    else:
        resolve_checkpoint(str(base.path))
    saved = run_directory(path) / "tokenizer.json"
    tokenizer = load_tokenizer(None, path) if os.path.lexists(saved) else None
    if tokenizer is not None:
        tokenizer.chat_template = ChatTemplate.find(run_directory(path), tokenizer)
    return ExportSource(path, manifest, model, mapping, tokenizer, trained.lora, base)


def plan_tensors(source: ExportSource) -> list[Exported]:
    """Return every parameter in the order of the model. Raises CorruptFileError if one is missing."""
    out, held = [], parameters(source.model)
    for name, location in source.mapping.locations(source.model):
        if source.base is None and f"model.{name}" not in source.manifest.tensors:
            raise CorruptFileError(f"{source.path}: holds no model.{name}, its config has one. {RESTORE}")
        form = Form(torch.float32, location.shape(held[name].shape))
        for part, theirs in enumerate(location.names):
            full = source.mapping.stored_name(theirs, source.model.head)
            out.append(Exported(name, location, part, full, form))
    return out


def into_files(tensors: list[Exported], most: int) -> dict[str, list[Exported]]:
    """Distribute tensors over files of at most `most` bytes, in order; a larger tensor has its own."""
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


Load = Callable[[str, slice | None], Tensor]
"""Rows of a parameter of ours, None for all: float32."""


def write_weights(
    source: ExportSource,
    files: Mapping[str, list[Exported]],
    folder: Path,
    progress: Advance,
    load: Load,
    done: Callable[[str, Callable[[], FileEntry]], FileEntry] = lambda name, write: write(),
) -> bool:
    """Write the safetensors files and, of several, their index; return True if a bias was folded.

    `load(name, rows)` returns a parameter of ours, or some of its rows, float32; `done(name, write)` writes a
    file, unless it is there.
    """
    shift = folded_bias(source, load)

    def read(tensor: Exported) -> Tensor:
        value = stored_tensor(tensor, load).to(tensor.form.dtype)
        return value if shift is None or tensor.ours != "final_norm.bias" else value + shift

    def write(name: str) -> FileEntry:
        by_name = {tensor.theirs: tensor for tensor in files[name]}
        forms = {theirs: tensor.form for theirs, tensor in by_name.items()}
        return write_stream(
            folder / name, forms, lambda theirs: read(by_name[theirs]), SAFETENSORS_FOR, progress
        )

    for name in files:
        done(name, partial(write, name))
    if len(files) > 1:
        size = sum(tensor.form.num_bytes for tensors in files.values() for tensor in tensors)
        listed = {tensor.theirs: name for name, tensors in files.items() for tensor in tensors}
        write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": listed})
    return shift is not None


def stored_tensor(tensor: Exported, load: Load) -> Tensor:
    """Return a tensor to write, float32; of experts one is read."""
    location, part = tensor.location, tensor.part
    if not location.stacked:
        return location.to_theirs(load(tensor.ours, None))[part]
    number, part = divmod(part, len(location.names) // location.stacked)
    expert = load(tensor.ours, slice(number, number + 1))[0]
    return location.of_expert(number).to_theirs(expert)[part]


def write_adapters(source: ExportSource, weights: WholeWeights, folder: Path) -> dict[str, list[Exported]]:
    """Write adapters as `peft` does, with its settings; return no files of weights."""
    assert source.base is not None
    assert weights.below is not None
    tensors = {
        name: value.contiguous()
        for each in peft.stored_adapters(source.model, source.lora)
        for name, value in each.to_theirs(weights.read, weights.below.read)
    }
    forms = {name: Form(torch.float32, tuple(value.shape)) for name, value in tensors.items()}
    write_stream(folder / peft.WEIGHTS, forms, tensors.__getitem__, SAFETENSORS_FOR)
    write_json(folder / peft.CONFIG, peft.write_config(source.model, source.lora, source.base.name))
    return {}


def folded_bias(source: ExportSource, load: Load) -> Tensor | None:
    """Return the term [H] to add to final_norm's bias if the class has no classifier bias, else None.

    It is the smallest d with W d = b. Only the classifier W reads that norm's output, so its logits stay the
    same up to rounding. Raises UserError if there is no such d.
    """
    if source.model.head not in source.mapping.heads_without_bias:
        return None
    weight, bias = (load(f"classifier.{part}", None).double() for part in ("weight", "bias"))
    if not bias.any():
        return None
    shift: Tensor = torch.linalg.pinv(weight) @ bias
    if not torch.allclose(weight @ shift, bias, rtol=1e-6, atol=1e-9):
        raise UserError(
            f"{source.path}: {source.architecture} has no bias in its classifier, "
            f"and ours cannot be moved into the norm before it, as the labels' weights depend on each other. "
            f"Finetune once more, with another seed"
        )
    return shift.float()


def write_settings(source: ExportSource, folder: Path, *, with_model: bool = True) -> None:
    """Write config.json, the model card, and the tokenizer with settings of AutoTokenizer and generate().

    Without the model it is the tokenizer alone.
    """
    tokenizer, model = source.tokenizer, source.model
    ids = token_ids(source)
    config = source.mapping.write(model, ids)
    if with_model:
        write_json(folder / CONFIG, config)
    write_atomic(folder / CARD, model_card(source.manifest, model, source.architecture).encode())
    if tokenizer is None:
        return
    content = tokenizer.content_ending_texts() if ids.ends_texts else tokenizer.content
    write_atomic(folder / "tokenizer.json", content)
    template = tokenizer.chat_template
    if template is not None:
        write_atomic(folder / CHAT_TEMPLATE, template.source.encode())
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.max_positions,
        "clean_up_tokenization_spaces": False,
        **source.mapping.special_tokens(tokenizer, model, ids),
        **({} if template is None else template.tokens),
    }
    write_json(folder / "tokenizer_config.json", settings)
    if family_of(model.kind).causal and model.head == "language_model":
        named = {name: config.get(name) for name in ("bos_token_id", "eos_token_id")}
        if template is not None:
            named["eos_token_id"] = sorted(end_of_turn_tokens(template, tokenizer, source.path))
        write_json(folder / "generation_config.json", {"_from_model_config": True, **named})


def token_ids(source: ExportSource) -> TokenIds:
    """Return ids and labels for config.json: those of the imported folder, else of tokenizer and task."""
    tokenizer, origin = source.tokenizer, source.manifest.state.get("source")
    imported = origin if isinstance(origin, dict) else {}
    eod, bos, pad = (getattr(tokenizer, f"{name}_id", None) for name in ("eod", "bos", "pad"))
    kept = imported.get("pad_token_id")
    names = label_names(source.manifest.state) or as_strings(imported.get("labels"))
    on_texts = FINETUNING in source.manifest.state and source.model.head != "language_model"
    ends = on_texts and family_of(source.model.kind).causal
    return TokenIds(eod, bos, kept if isinstance(kept, int) else pad, names, ends_texts=ends)


def write_json(path: Path, value: JSON) -> None:
    """Write JSON as transformers formats it."""
    write_atomic(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def show(
    config: ExportHFConfig,
    source: ExportSource,
    files: Mapping[str, list[Exported]],
    agreement: Agreement | None,
    is_folded: bool,
) -> None:
    """Print the table and notes."""
    size = sum(tensor.form.num_bytes for tensors in files.values() for tensor in tensors)
    if not files and source.base is not None:
        base = source.base.name
        note = f"its base in the form that peft loads: mlm export hf ckpt={base} out=… merge=true"
        lines = f"adapters of {base}, for peft", f"written to {config.out}"
        beside = [] if is_model_folder(source.base.path) else [note]
        show_table(f"export hf · {source.path}", {"rank#": source.lora.rank}, beside, *lines)
        return
    columns = {
        "class#": source.architecture,
        "parameters#": f"{source.model.num_parameters():,}",
        "step#": source.manifest.step,
        "files#": len(files),
        "GB#": f"{size / GB:.3g}",
    }
    notes = [best_note(config.ckpt, source.path)]
    if source.tokenizer is None:
        notes.append(f"no tokenizer: {run_directory(source.path)} holds no tokenizer.json")
    if is_folded:
        notes.append("the classifier's bias, which the class has no parameter for, is in the norm before it")
    lines = str(agreement or NOT_COMPARED), f"written to {config.out}"
    show_table(f"export hf · {source.path}", columns, filter(None, notes), *lines)
