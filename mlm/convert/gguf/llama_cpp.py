"""A GGUF file as llama.cpp reads it, where the extra gguf-check is installed."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlm.util.extras import load_extra

F32, NO_FLASH_ATTENTION = 0, 0
"""Numbers of ggml: keys and values are kept, and scores computed, in float32."""


def is_installed() -> bool:
    """True if the package that runs llama.cpp is there."""
    return find_spec("cyllama") is not None


class LlamaCpp:
    """A model in llama.cpp, on the CPU.

    Raises RuntimeError and ValueError for a file that it does not load.
    """

    def __init__(self, path: Path) -> None:
        self._api: Any = load_extra("cyllama.llama.llama_cpp", "mlm export gguf", "gguf-check")
        self._api.disable_logging()
        params = self._api.LlamaModelParams()
        params.n_gpu_layers = 0
        # cyllama 0.2.18 asks the model for n_vocab, which its vocabulary has.
        n_vocab = property(lambda model: model.get_vocab().n_vocab)
        model_class = type("Model", (self._api.LlamaModel,), {"n_vocab": n_vocab})
        self._model = model_class(path_model=str(path), params=params)
        self._vocabulary = self._model.get_vocab()

    def tokens(self, text: str, *, add_special: bool = False) -> list[int]:
        """Return the tokens of a text in which names of special tokens are text.

        With `add_special` those that the tokenizer adds at its ends are there too.
        """
        return list(self._vocabulary.tokenize(text, add_special, False)) if text else []

    def logits(self, ids: list[int]) -> Tensor:
        """Return the logits of a sequence: [S] -> [S, V], float32."""
        params = self._api.LlamaContextParams()
        params.n_ctx = params.n_batch = len(ids)
        params.type_k = params.type_v = F32
        params.flash_attn_type = NO_FLASH_ATTENTION
        context, rows = self._api.LlamaContext(model=self._model, params=params), []
        batch = self._api.LlamaBatch(n_tokens=1, embd=0, n_seq_max=1)
        for position, id in enumerate(ids):
            batch.reset()
            batch.add(id, position, [0], True)
            context.decode(batch)
            rows.append(list(context.get_logits()))
        context.close()
        return torch.tensor(rows)
