"""Mean loss, perplexity and bits per byte of a checkpoint over an indexed corpus.

GPT-2: the corpus's tokens in order, split into windows of seq_length; each token but the very first is scored
once, with the tokens before it in its window as context. Perplexity is exp(mean loss per token). Bits per
byte, the summed loss in bits over the UTF-8 bytes of the text, are comparable across tokenizers.

BERT: one pass over the corpus's samples as in pretraining, with the same masks for every seed of a run; loss
and accuracy of masked tokens and of the order of two segments. RoBERTa: samples are windows of the corpus,
with masked tokens alone.

The score does not depend on layout or batch size.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlm.checkpoint.native.format import RESTORE
from mlm.convert.source import Source
from mlm.data.blend_history import trained_on
from mlm.data.indexed import IndexedDataset
from mlm.data.receipt import RECEIPT, read_receipt
from mlm.data.sampler import MicroBatch, eval_batches
from mlm.inference.trained import LoadedModel
from mlm.models.family import family_of
from mlm.parallel.mesh import ParallelContext
from mlm.training.pipelined import evaluate
from mlm.training.state import read_history
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.files import digest_file
from mlm.util.terminal import progress_bar


def corpus_loss(
    trained: LoadedModel,
    prefix: Path,
    *,
    seq_length: int,
    batch_size: int,
    tokenizer: str | None,
    ctx: ParallelContext,
) -> dict[str, Any] | None:
    """Return the scores of a corpus and digests of their inputs on rank 0, None on others. Collective.

    Raises UserError if the model's family cannot make samples of the corpus.
    """
    indexed, corpora = IndexedDataset(prefix), training_corpora(trained)
    family, data = family_of(trained.config.model.kind), replace(trained.config.data, seq_length=seq_length)
    sampler = trained.source.load_tokenizer(tokenizer, any_size=True) if family.check_tokenizer else None
    samples = family.samples.validation(data, prefix, sampler)
    batches = eval_batches(samples, micro_batch_size=batch_size, rank=ctx.dp.rank, size=ctx.dp.size)
    objective = family.objective(trained.config.data, ctx, trained.model.dtype)
    rounds = -(-len(samples) // (batch_size * ctx.dp.size))
    with progress_bar("scoring", rounds, shown=ctx.is_main) as advance:

        def count(batch: MicroBatch) -> MicroBatch:
            advance(1)
            return batch

        means, counts = evaluate(trained.model, objective, map(count, batches))
    if not ctx.is_main:
        return None
    loss, is_masked = math.fsum(means[: objective.num_losses]), len(means) > 1
    bits = None if is_masked else bits_per_byte(loss * counts[0], tokenizer, prefix, indexed, trained.source)
    receipt = prefix.with_name(RECEIPT)
    return {
        "task": "loss",
        "protocol": family.protocol,
        "loss": loss,
        **(dict(zip(objective.metrics, means, strict=True)) if is_masked else {}),
        "perplexity": math.exp(min(means[0], 700.0)),
        "bits_per_byte": bits,
        "tokens": counts[0],
        **({"samples": counts[1]} if objective.num_losses > 1 else {}),
        "seq_length": seq_length,
        "corpus": str(prefix),
        "corpus_digest": indexed.tokens_digest(),
        "corpus_index_digest": indexed.digest,
        "corpus_receipt_digest": digest_file(receipt) if receipt.is_file() else None,
        "trained_on": corpora,
    }


def training_corpora(trained: LoadedModel) -> list[dict[str, Any]]:
    """Return the corpora the checkpoint was trained on; none for an imported one. Raises CorruptFileError."""
    if "data" not in trained.manifest.state:
        return []
    try:
        return trained_on(read_history(trained.manifest.state))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(
            f"{trained.path}: the corpora it was trained on cannot be read ({error!r}). {RESTORE}"
        ) from error


def bits_per_byte(
    nats: float, named: str | None, prefix: Path, indexed: IndexedDataset, source: Source
) -> float | None:
    """Return the loss in bits per UTF-8 byte of the text; None without a receipt and a tokenizer."""
    receipt = read_receipt(prefix.parent) or {}
    size = receipt.get("splits", {}).get(prefix.name, {}).get("bytes")
    if size is None:
        try:
            tokenizer = source.load_tokenizer(named, any_size=True)
        except UserError:
            return None
        size = sum(
            len(tokenizer.decode([t for t in indexed[i].tolist() if t != tokenizer.eod_id]).encode())
            for i in range(len(indexed))
        )
    return nats / math.log(2) / size if size else None
