"""Lookup of the mapping to `transformers` by model family, and of its names of layers."""

from importlib import import_module

from mlm.convert.huggingface.mapping import HuggingFaceMapping
from mlm.convert.locations import Location
from mlm.models.config import ModelConfig
from mlm.models.family import family_of
from mlm.models.lora import LayerNames


def mapping_of_kind(kind: str) -> HuggingFaceMapping:
    """Return the mapping of a shipped kind; its module is imported on demand."""
    module = {"roberta": "bert"}.get(kind, kind)
    mapping: HuggingFaceMapping = import_module(f"mlm.convert.huggingface.{module}").MAPPING
    return mapping


def mapping_of(model: ModelConfig) -> HuggingFaceMapping | None:
    """Return the mapping of a model, custom families included; None if `transformers` has no such model."""
    kind = family_of(model.kind).converts_as
    return None if kind is None else mapping_of_kind(kind)


def layer_locations(model: ModelConfig) -> dict[str, Location]:
    """Return the locations of the weights of layers, by module; {} if `transformers` has no such model."""
    mapping = mapping_of(model)
    locations = [] if mapping is None else mapping.locations(model)
    return {n.removesuffix(".weight"): location for n, location in locations if n.endswith(".weight")}


def layer_names(model: ModelConfig) -> LayerNames:
    """Return the names of layers in `transformers`, by module, for targets of adapters."""
    return {
        name: tuple(part.removesuffix(".weight") for part in location.names)
        for name, location in layer_locations(model).items()
    }
