"""Description of a model family in `transformers`, filled in by gpt2.py, bert.py and llama.py.

This file holds the parts that families share: keys of config.json, their values, and names of heads.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from mlm.config.build import build
from mlm.convert.locations import Location
from mlm.models.config import ModelConfig
from mlm.models.family import family_of
from mlm.util.errors import ConfigError, Problem, UserError

if TYPE_CHECKING:
    from mlm.data.tokenizer import Tokenizer
    from mlm.models.backbone import Transformer

JSON: TypeAlias = Any
Head = Literal["language_model", "none", "classification", "span"]
"""As in ModelConfig."""

EXACT_GELU = ("gelu",)
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
"""Names of the same function, 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
SILU = ("silu", "swish")
RELU_SQUARED = ("relu2",)
ACTIVATIONS = {"gelu": EXACT_GELU, "gelu_tanh": TANH_GELU, "silu": SILU, "relu2": RELU_SQUARED}
"""model.activation -> names in `transformers`; the first is written."""

UNSUPPORTED: dict[str, tuple[JSON, ...]] = {
    "add_cross_attention": (False,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "transformers_weights": (None,),  # would name another weight file
    "per_layer_config": (None, {}),
    "text_config": (None,),
    "attention_chunk_size": (None,),
    "tie_word_embeddings": (True, False),
}
"""Keys of features that no family supports, for `ConfigKeys.fixed`."""


TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of config.json for the ids that begin, end and pad texts."""


@dataclass(frozen=True)
class TokenIds:
    """Token ids and label names in a config.json."""

    eod: int | None = None
    """End of document."""
    bos: int | None = None
    """Beginning of a sequence."""
    pad: int | None = None
    labels: tuple[str, ...] = ()
    """Names of the labels by number; empty if unknown."""
    ends_texts: bool = False
    """True if the model was finetuned on texts that end with `eod`, which its head reads."""


class Note(str):
    """A remark for the user, in one line."""

    about: str
    """Module without which the note is skipped (pooler, sop_head); "ids" if it concerns exports; else ""."""

    def __new__(cls, text: str, about: str = "") -> "Note":
        self = super().__new__(cls, text)
        self.about = about
        return self


@dataclass(frozen=True)
class FolderContent:
    """The model in a folder, by the names of its tensors.

    `architectures` in config.json names a class, but folders are saved from other classes and edited by hand.
    """

    config: ModelConfig
    """Settings, with the head that the tensors show."""
    filled: frozenset[str] = frozenset()
    """Parameters that the folder lacks, which take initial values."""
    unused: frozenset[str] = frozenset()
    """Tensors of the folder that the model does not use."""
    notes: tuple[Note, ...] = ()
    """Remarks for the user on filled parameters and unused tensors."""


PROBE_BATCH, PROBE_LENGTH = 2, 64

Outputs = dict[str, Tensor]
"""Outputs of a model by name: of each token [R, …], of each sample [B, …]."""


@dataclass(frozen=True, eq=False)
class ProbeSamples:
    """Random samples to compare a model with `transformers`, the same at every call.

    Shapes: B samples, S tokens.
    """

    tokens: Tensor
    """[B, S] int64, over the whole vocabulary."""
    lengths: Tensor
    """[B] int64: tokens before the padding. The last sample is shorter, but for a causal language model."""
    token_types: Tensor | None
    """[B, S] int64; None for a model without token types."""

    @classmethod
    def of(cls, model: ModelConfig) -> "ProbeSamples":
        generator = torch.Generator().manual_seed(0)
        shape = (PROBE_BATCH, min(model.max_positions, PROBE_LENGTH))
        tokens = torch.randint(model.vocab_size, shape, generator=generator)
        lengths = torch.full((PROBE_BATCH,), shape[1])
        if not family_of(model.kind).causal or model.head == "classification":
            lengths[-1] -= shape[1] // 3
        types = torch.randint(model.token_types, shape, generator=generator) if model.token_types else None
        return cls(tokens, lengths, types)

    @property
    def mask(self) -> Tensor:
        """[B, S] bool: True except for padding."""
        return torch.arange(self.tokens.shape[1]) < self.lengths[:, None]


@dataclass(frozen=True, kw_only=True)
class HuggingFaceMapping:
    """Names, configuration and execution of a model family in `transformers`."""

    model_types: tuple[str, ...]
    architecture: Callable[[ModelConfig], str]
    """Return the class that holds such a model with its head."""
    prefix: Callable[[ModelConfig], str]
    """Return the prefix of the base model's tensors in classes that have a head."""
    head_prefixes: tuple[str, ...]
    """Prefixes of the heads' tensors."""
    plain: Callable[[str], str]
    """Return a tensor's name without prefix, in today's spelling."""
    copies: Callable[[ModelConfig], Mapping[str, str]]
    """Return tensors that may be stored as copies -> the tensor they must equal."""
    renamings: Callable[[Collection[str]], Mapping[str, str]] = lambda names: {}
    """(names of the tensors) -> patterns and replacements, if another class of the same model saved them."""
    ignored: "re.Pattern[str]"
    """Stored tensors other than parameters."""
    read: Callable[[Mapping[str, JSON], str], tuple[ModelConfig, list[str]]]
    """(config.json, its path for messages) -> settings without the head, and notes on differences. Raises
    ConfigError for a model that mlm does not compute."""
    content: Callable[[ModelConfig, Mapping[str, tuple[int, ...]], str], FolderContent]
    """(settings from `read`, plain name -> shape, folder for messages) -> the model in the folder."""
    write: Callable[[ModelConfig, TokenIds], dict[str, JSON]]
    """Return the config.json for the class with the model's head."""
    locations: Callable[[ModelConfig], Iterator[tuple[str, Location]]]
    """Yield (parameter, location), in the order of the model."""
    heads_without_bias: frozenset[str] = frozenset()
    """Heads whose classifier has no bias in `transformers`: exports fold it into the norm before it."""
    problem: "Callable[[ModelConfig, Tokenizer | None], str | None]" = lambda model, tokenizer: None
    """Return why `transformers` has no such model, or not with its tokenizer, in a line with the fix."""
    changed_option: Callable[[ModelConfig, ModelConfig], str | None] = lambda model, other: None
    """Return the first option of the family with which two models compute differently."""
    pads_with_special_token: bool = False
    """True if an imported padding id is only kept if it is a special token of the tokenizer."""
    special_tokens: "Callable[[Tokenizer, ModelConfig, TokenIds], dict[str, JSON]]"
    """Return the entries of tokenizer_config.json that AutoTokenizer needs."""
    native_outputs: "Callable[[Transformer, Tensor, Tensor], Outputs]"
    """(last stage, its hidden states [S, B, H], mask [B, S]) -> outputs without a finetuning head."""
    hf_outputs: Callable[[Any, ProbeSamples, FolderContent], Outputs]
    """Run a model of `transformers` on a probe; parameters that the folder lacks are not compared."""

    def stored_name(self, name: str, model: ModelConfig) -> str:
        """Return the stored name for a plain one: with a prefix, except in the base model and in heads."""
        is_bare = model.head == "none" or name.startswith(self.head_prefixes)
        return name if is_bare else f"{self.prefix(model)}{name}"

    def to_parameters(self, state: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
        """Convert a state dict of `transformers` to full (unsplit) parameters."""
        stored = {self.plain(stored_name): value for stored_name, value in state.items()}
        return {
            parameter: location.from_stored([stored[name] for name in location.names])
            for parameter, location in self.locations(model)
        }


def one_head(heads: Mapping[Head, str], stored: Mapping[str, object], path: str) -> Head | None:
    """Return the head whose tensor is stored, if any; `heads` maps each to a tensor that only it has.

    Raises UserError for two heads.
    """
    present = [head for head, tensor_name in heads.items() if tensor_name in stored]
    if len(present) > 1:
        names = " and ".join(heads[head] for head in present)
        raise UserError(f"{path}: holds {names}, of two heads. Save the model with one")
    return present[0] if present else None


def declared_ids(values: Mapping[str, JSON], vocab_size: int) -> dict[str, JSON]:
    """Return the entries of TOKEN_IDS whose ids, one or a list, are tokens of the model."""
    declared = dict[str, JSON]()
    for key in TOKEN_IDS:
        ids = values[key] if isinstance(values.get(key), list) else [values.get(key)]
        if ids and all(type(id) is int and 0 <= id < vocab_size for id in ids):
            declared[key] = values[key]
    return declared


def token_ids_to_keep(config: Mapping[str, JSON], model: ModelConfig) -> tuple[TokenIds, tuple[Note, ...]]:
    """Return padding and label names of a config.json for a later export, and notes on those not kept.

    Default names of `transformers` do not count.
    """
    notes = []
    pad, size = config.get("pad_token_id"), model.vocab_size
    if pad is not None and not (type(pad) is int and 0 <= pad < size):
        notes.append(f"pad_token_id={show(pad)} is not kept: the model reads ids from 0 to {size - 1}")
        pad = None
    names: list[str] = []
    by_number = config.get("id2label")
    numbers = [str(n) for n in range(model.num_labels)]
    is_dict = isinstance(by_number, dict)
    if by_number and not (is_dict and all(name == f"LABEL_{n}" for n, name in by_number.items())):
        if model.head != "classification":
            notes.append("id2label is not kept: there is no classifier that it could name the labels of")
        elif is_dict and by_number.keys() == {*numbers}:
            names = [name for n in numbers if isinstance(name := by_number[n], str)]
        if model.head == "classification" and len({*names}) != model.num_labels:
            notes.append(f"id2label is not kept: it does not give {model.num_labels} labels a name each")
            names = []
    return TokenIds(pad=pad, labels=tuple(names)), tuple(Note(note, about="ids") for note in notes)


def label_entries(model: ModelConfig, label_names: Sequence[str] = ()) -> dict[str, JSON]:
    """Return labels for config.json: their names, or the defaults of `transformers` if unknown."""
    names = [f"LABEL_{n}" for n in range(model.num_labels)]
    if len(set(label_names)) == model.num_labels:
        names = list(label_names)
    return {
        "id2label": {str(n): name for n, name in enumerate(names)},
        "label2id": {name: n for n, name in enumerate(names)},
    }


@dataclass(frozen=True)
class ConfigKeys:
    """Keys of a family's config.json."""

    activation: str
    """Key of the activation, which is among `fixed`."""
    fixed: Mapping[str, tuple[JSON, ...]]
    """Key -> supported values; the first is the default."""
    fields: Mapping[str, tuple[str, JSON]]
    """Key -> field of ModelConfig or option of the family, and default. The last of two keys for one field
    counts."""
    may_be_0: frozenset[str] = frozenset()
    """Fields where 0 means none; 0 is an error in other whole numbers."""
    may_be_null: frozenset[str] = frozenset()
    """Fields with a number as default where null means none, or a default by other settings."""
    above_0: frozenset[str] = frozenset()
    """Fields whose 0 is null in `transformers`."""

    def read(
        self, config: Mapping[str, JSON], path: str, name: str, **settings: Any
    ) -> tuple[ModelConfig, dict[str, JSON]]:
        """Return the model without its options, and the options, not validated.

        `settings` are further fields. Raises ConfigError with a line for each unsupported value.
        """
        problems = []
        for key, supported in self.fixed.items():
            value = config.get(key, supported[0])
            if not any(type(value) is type(option) and value == option for option in supported):
                listed = " or ".join(map(json.dumps, supported))
                problems.append(
                    f"{path}: {key}={show(value)} is not what our {name} computes; supported: {listed}"
                )
        values = dict[str, Any]()
        for key, (target, default) in self.fields.items():
            value = config.get(key, default)
            if expected := self._expected_value(value, target, default):
                problems.append(f"{path}: {key}={show(value)} must be {expected}")
                value = default
            values[target] = value
        hf_activation = config.get(self.activation, self.fixed[self.activation][0])
        activation = next((target for target, names in ACTIVATIONS.items() if hf_activation in names), "gelu")
        model_keys = {field.name for field in fields(ModelConfig)}
        built = {"activation": activation, **{k: v for k, v in values.items() if k in model_keys}, **settings}

        def check_heads(model: ModelConfig) -> list[Problem]:
            has_width = type(values.get("head_dim")) is int
            if has_width or model.num_heads < 1 or model.hidden_size % model.num_heads == 0:
                return []
            problem = f"num_heads={model.num_heads} does not divide hidden_size={model.hidden_size}"
            return [Problem(("num_heads", "hidden_size"), problem)]

        try:
            model = build(ModelConfig, built, check=check_heads)
        except ConfigError as error:
            hf_keys = {target: key for key, (target, _) in self.fields.items()}
            problems += [f"{path}: {hf_keys[problem.keys[0]]}: {problem}" for problem in error.problems]
        if problems:
            raise ConfigError(problems)
        return model, {target: value for target, value in values.items() if target not in model_keys}

    def _expected_value(self, value: JSON, target: str, default: JSON) -> str | None:
        """Return what a value must be if the field would interpret it differently; None if it is valid."""
        is_flag, or_null = type(default) is bool, " or null" if target in self.may_be_null else ""
        is_null = value is None and default is not None and not or_null
        if isinstance(value, dict) or (not is_flag and (is_null or isinstance(value, bool))):
            return f"a number{or_null}"
        if value == 0 and target in self.above_0:
            return f"above 0{or_null}"
        is_size = not isinstance(default, float | bool)
        return "a whole number from 1" if is_size and value == 0 and target not in self.may_be_0 else None

    def write(self, values: Mapping[str, Any], architecture: str) -> dict[str, JSON]:
        """Return the entries of config.json that all classes share; `values` are by field."""
        return {
            "architectures": [architecture],
            **{
                key: values[target]
                if isinstance(default, float | bool) or target in self.may_be_0
                else values[target] or default
                for key, (target, default) in self.fields.items()
                if target in values
            },
            self.activation: ACTIVATIONS[values["activation"]][0],
            "dtype": "float32",
            "tie_word_embeddings": True,
        }


def show(value: JSON) -> str:
    text = value if isinstance(value, str) and value.isprintable() else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
