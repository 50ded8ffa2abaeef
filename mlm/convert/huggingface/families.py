"""Lookup of the mapping to `transformers` by model family, and of its names of layers."""

from importlib import import_module

from mlm.convert.huggingface.mapping import HuggingFaceMapping
from mlm.convert.locations import Location
from mlm.models.config import ModelConfig
from mlm.models.family import family_of
from mlm.models.lora import LayerNames


def mapping_of_kind(kind: str) -> HuggingFaceMapping:
    """Return the mapping of a shipped kind, whose module is imported now."""
    module = {"roberta": "bert"}.get(kind, kind)
    mapping: HuggingFaceMapping = import_module(f"mlm.convert.huggingface.{module}").MAPPING
    return mapping


def mapping_of(model: ModelConfig) -> HuggingFaceMapping | None:
    """Return the mapping of a model, custom families included; None if `transformers` has no such model."""
    kind = family_of(model.kind).converts_as
    return None if kind is None else mapping_of_kind(kind)


def layer_locations(model: ModelConfig) -> dict[str, Location]:
    """Return where the weights of layers are stored, by our module; empty without such a model."""
    mapping = mapping_of(model)
    locations = [] if mapping is None else mapping.locations(model)
    return {name.removesuffix(".weight"): at for name, at in locations if name.endswith(".weight")}


def layer_names(model: ModelConfig) -> LayerNames:
    """Return their names by our module, for targets of adapters."""
    return {
        name: tuple(part.removesuffix(".weight") for part in location.names)
        for name, location in layer_locations(model).items()
    }
