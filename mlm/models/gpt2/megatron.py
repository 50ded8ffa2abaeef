"""GPT-2 as Megatron-LM names and configures it."""

from mlm.models.megatron import MegatronMapping, activation

MAPPING = MegatronMapping(
    name="GPT-2",
    vocabularies=(50257,),
    settings=lambda args: {"activation": activation(args)},
)
