"""The families of models that we share with `transformers`. What ours do not compute is refused."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from mlm.checkpoint.huggingface.content import Content, Ids
from mlm.checkpoint.huggingface.keys import show
from mlm.checkpoint.huggingface.names import GPT2_BUFFERS, GPT2_PREFIX, GPT2_TIED, Place, gpt2_places
from mlm.checkpoint.native.format import JSON
from mlm.errors import UserError
from mlm.models.bert.huggingface import (
    BERT_BUFFERS,
    BERT_PREFIX,
    BERT_TIED,
    architectures,
    bert_content,
    bert_places,
    plain_bert_name,
    read_bert_config,
    write_bert_config,
)
from mlm.models.config import ModelConfig
from mlm.models.gpt2.huggingface import ARCHITECTURES, gpt2_content, read_gpt2_config, write_gpt2_config


@dataclass(frozen=True)
class Family:
    """A kind of model that we share with `transformers`."""

    architectures: Mapping[str, str]
    """head -> name of its class there."""
    prefix: str
    """What their names begin with, but for the heads': the base model inside the class."""
    plain: Callable[[str], str]
    """Their name as `places` has it: without the prefix, and as it is called today."""
    tied: Mapping[str, str]
    """What may be stored once more -> the parameter it must equal."""
    ignored: "re.Pattern[str]"
    """Names that are stored and are no parameters."""
    read: Callable[[Mapping[str, JSON], str], tuple[ModelConfig, list[str]]]
    """(config.json, its path for messages) -> our settings but for the head, and what differs without being
    refused."""
    content: Callable[[ModelConfig, Mapping[str, tuple[int, ...]], str], Content]
    """(what `read` gave, plain name -> shape, the folder for messages) -> what is made of them."""
    write: Callable[[ModelConfig, Ids], dict[str, JSON]]
    """Our settings as config.json."""
    places: Callable[[ModelConfig], Iterator[tuple[str, Place]]]
    """(our name, place) of every parameter."""
    zero_there: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """head -> parameters of ours that have no place there: their class computes as if they were zero."""

    def full_name(self, name: str, head: str) -> str:
        """A plain name as the class of a head stores it; the base model alone stores no prefix."""
        return name if head == "none" or HEADS.match(name) else f"{self.prefix}{name}"


HEADS = re.compile(r"(cls|classifier|qa_outputs|score)\.")
"""What the names of heads begin with."""


def _bert(norm: str) -> Family:
    return Family(
        architectures=architectures(norm),
        prefix=BERT_PREFIX,
        plain=plain_bert_name,
        tied=BERT_TIED,
        ignored=BERT_BUFFERS,
        read=read_bert_config,
        content=bert_content,
        write=write_bert_config,
        places=bert_places,
    )


FAMILIES = {
    "gpt2": Family(
        architectures=ARCHITECTURES,
        prefix=GPT2_PREFIX,
        plain=lambda name: name.removeprefix(GPT2_PREFIX),
        tied=GPT2_TIED,
        ignored=GPT2_BUFFERS,
        read=read_gpt2_config,
        content=gpt2_content,
        write=write_gpt2_config,
        places=gpt2_places,
        zero_there={"classification": ("classifier.bias",)},
    ),
    "bert": _bert("post"),
    "megatron-bert": _bert("pre"),
}
"""By `model_type` of config.json."""


def family_of(said: Mapping[str, JSON], path: str) -> Family:
    """The family that a config.json is of. Raises UserError for one we do not have."""
    kind = said.get("model_type")
    if isinstance(kind, str) and kind in FAMILIES:
        return FAMILIES[kind]
    raise UserError(
        f"{path}: model_type={show(kind)} is not a model of ours; supported: {', '.join(FAMILIES)}"
    )


def family_for(model: ModelConfig) -> Family:
    """The family that a model of ours is exported as."""
    kind = "megatron-bert" if model.kind == "bert" and model.norm == "pre" else model.kind
    return FAMILIES[kind]
