"""Whether the tensors of a Megatron-LM checkpoint's ranks are of one model: sizes, and copies that agree."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from mlm.checkpoint.megatron.args import TOKEN_TYPES, Shapes
from mlm.checkpoint.megatron.files import RankFiles
from mlm.checkpoint.megatron.names import HEAD, is_bert, tp_dim
from mlm.errors import CorruptFileError, UserError


def shapes_of(files: RankFiles, parts: Mapping[str, tuple[Tensor, ...]], num_layers: int) -> Shapes:
    """The sizes of the model. Raises CorruptFileError for a tensor that does not have them."""
    if not num_layers:
        raise CorruptFileError(f"{files.path}: holds no layers: copy it again")
    rows = _size(parts["token.weight"], 0)[0]
    h = parts["final_norm.weight"][0].shape[0]
    positions = parts["position.weight"][0].shape[0]
    ffn = _size(parts["layers.0.mlp.up.bias"], 0)[0]
    expected = {
        "token.weight": (rows, h),
        HEAD: (rows, h),
        "position.weight": (positions, h),
        "attention.qkv.weight": (3 * h, h),
        "attention.qkv.bias": (3 * h,),
        "attention.out.weight": (h, h),
        "mlp.up.weight": (ffn, h),
        "mlp.up.bias": (ffn,),
        "mlp.down.weight": (h, ffn),
        "token_type.weight": (TOKEN_TYPES, h),
        "pooler.weight": (h, h),
        "mlm_head.transform.weight": (h, h),
        "mlm_head.vocabulary.bias": (rows,),
        "sop_head.weight": (2, h),
        "sop_head.bias": (2,),
    }
    for name, held in parts.items():
        want = expected.get(re.sub(r"^layers\.\d+\.", "", name), (h,))
        if len({part.shape for part in held}) > 1 or _size(held, tp_dim(name)) != want:
            found = " + ".join(str(list(part.shape)) for part in held[:4])
            raise CorruptFileError(
                f"{files.path}: {name} is {found} in its {files.tp} tensor-parallel ranks, {list(want)} is "
                f"needed in all: some are missing or of another model"
            )
    return Shapes(
        "bert" if is_bert(parts) else "gpt2", num_layers, h, ffn, positions, rows, files.tp, files.pp
    )


def _size(held: tuple[Tensor, ...], dim: int | None) -> tuple[int, ...]:
    """Shape of the whole of which these are parts."""
    shape = list(held[0].shape)
    if dim is not None and dim < len(shape):
        shape[dim] *= len(held)
    return tuple(shape)


def check_replicas(files: RankFiles, parts: Mapping[str, tuple[Tensor, ...]]) -> None:
    """What several ranks hold must be the same in all. Raises CorruptFileError, UserError for the head."""
    for name, held in parts.items():
        if tp_dim(name) is None:
            for t, part in enumerate(held):
                if not _same_bits(part, held[0]):
                    raise CorruptFileError(
                        f"{files.path}: {name} differs between tensor-parallel ranks 0 and {t}, which hold "
                        f"copies of it: they are of different saves, take another iteration"
                    )
    for t, head in enumerate(parts.get(HEAD, ())):
        if not _same_bits(head, parts["token.weight"][t]):
            raise UserError(
                f"{files.path}: the output layer differs from the token table in tensor-parallel rank {t}: "
                f"mlm has tied embeddings only"
            )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are copies, NaN included."""
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
