"""Settings of lm-eval's `mlm`."""

from dataclasses import dataclass
from typing import Annotated

from mlm.config.fields import POSITIVE, SEED
from mlm.data.config import MicroBatchSize
from mlm.inference.config import TrainedModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class LmEvalConfig(TrainedModelConfig):
    """Settings of lm-eval's `--model mlm --model_args key=value,…` (mlm/evaluate/lm_eval/adapter.py)."""

    batch_size: MicroBatchSize = 8
    """Full-length sequences per micro-batch. No score depends on it."""
    max_length: Annotated[int | None, POSITIVE] = None
    """Context length in tokens; null means the model's max_positions."""
    max_gen_toks: Annotated[int, POSITIVE] = 256
    """Most tokens to generate, for tasks that do not specify it."""
    add_bos_token: bool | None = None
    """True puts the tokenizer's beginning of a sequence before each text, false nothing; null the tokenizer's
    opening tokens."""
    seed: Annotated[int, SEED] = 1234
    """Seed of the sampling, for tasks that sample."""
