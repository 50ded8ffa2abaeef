"""Settings of `mlm eval loss`, `wikitext103`, `lambada` and `all`."""

from dataclasses import dataclass, field
from typing import Annotated

from mlm.config.fields import POSITIVE, InputPath, OnlyIf, ResultFile
from mlm.data.config import DataPath, MicroBatchSize, SeqLength
from mlm.inference.config import TrainedModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class WikitextDataConfig:
    """Source of WikiText."""

    path: DataPath | None = None
    """wiki.test.tokens, or another file of its form (.tokens, .txt, .raw), or .jsonl or .parquet with `text`
    (lines) or `page` (articles); null means the Hub's Salesforce/wikitext."""
    raw_path: InputPath | None = None
    """File of the raw form for lm-eval's protocol; null takes `path`, or the Hub when that is null too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LambadaDataConfig:
    """Source of LAMBADA."""

    path: DataPath | None = None
    """Passages: .jsonl or .parquet with `text`, or .txt with one per line; null means the Hub's
    EleutherAI/lambada_openai, unless standard_path is given."""
    standard_path: InputPath | None = None
    """Passages of the lower-case form, for lambada_standard; null means the Hub's cimec/lambada, unless path
    is given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllDataConfig:
    """Sources of the data sets of `mlm eval all`."""

    wikitext103: InputPath | None = None
    """As data.path of `mlm eval wikitext103`."""
    wikitext103_raw: InputPath | None = None
    """As its data.raw_path."""
    lambada: InputPath | None = None
    """As data.path of `mlm eval lambada`."""
    lambada_standard: InputPath | None = None
    """As its data.standard_path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroShotConfig(TrainedModelConfig):
    """Settings common to the zero-shot evaluations."""

    out: ResultFile | None = None
    """JSON file for the result; null means eval-<task>.json in the run directory."""
    batch_size: MicroBatchSize = 8
    """Full-length sequences per micro-batch on each rank; more of shorter ones. No score depends on it."""
    seq_length: SeqLength | None = None
    """Tokens that the model reads at a time; null takes the checkpoint's data.seq_length."""
    limit: Annotated[int | None, POSITIVE] = None
    """Score only the first N articles or passages, for a trial; null scores all."""
    force: Annotated[bool, OnlyIf("tokenizer")] = False
    """Score although `tokenizer` is not the one of the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalWikitext103Config(ZeroShotConfig):
    """The run spec of `mlm eval wikitext103`: perplexities on WikiText."""

    data: WikitextDataConfig = field(default_factory=WikitextDataConfig)
    overlapping_eval: Annotated[int, POSITIVE] = 32
    """Tokens by which a window is moved on: those at its end that it scores (arXiv:1909.08053, appendix E.1).
    At most seq_length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalLambadaConfig(ZeroShotConfig):
    """The run spec of `mlm eval lambada`: predicting the last word of passages."""

    data: LambadaDataConfig = field(default_factory=LambadaDataConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalAllConfig(ZeroShotConfig):
    """The run spec of `mlm eval all`: wikitext103 and lambada."""

    data: AllDataConfig = field(default_factory=AllDataConfig)
    overlapping_eval: Annotated[int, POSITIVE] = 32
    """As of `mlm eval wikitext103`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalLossConfig(TrainedModelConfig):
    """The run spec of `mlm eval loss`: mean loss of a checkpoint over an indexed corpus."""

    out: ResultFile | None = None
    """JSON file for the result; null means eval-loss-<corpus>.json in the run directory; for a Hugging Face
    model, <model>-eval-loss-<corpus>.json in the working directory."""
    batch_size: MicroBatchSize = 8
    """Samples per micro-batch on each rank. The score does not depend on it."""
    seq_length: SeqLength | None = None
    """Tokens per window; null takes the checkpoint's data.seq_length."""
    path: DataPath | None = None
    """Prefix of the .bin/.idx to score; null takes the validation set the checkpoint was trained with."""
    tokenizer: InputPath | None = None
    """tokenizer.json for bits per byte; null takes the one saved with the run."""
