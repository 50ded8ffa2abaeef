"""The commands `mlm eval loss`, `wikitext103`, `lambada` and `all`: their settings, checks and help."""

from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated, Any

from mlm.cli.command import Command
from mlm.config.fields import POSITIVE, InputPath, OnlyIf, ResultFile
from mlm.data import files_present as present
from mlm.data.config import DataPath, MicroBatchSize, SeqLength
from mlm.inference.config import TrainedModelConfig
from mlm.launch.rules.checks import (
    checked_by,
    checkpoint_exists,
    devices_exist,
    loss_scale_can_fall,
    tokenizer_exists,
)
from mlm.launch.rules.layout import RANK_RULES, READER_RULES, Launch
from mlm.util.errors import Problem


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
    samples: ResultFile | None = None
    """JSONL file for the result of each window, article or passage; null writes none."""
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


def _files_exist(config: Any, _: Launch) -> Problem | None:
    named = ((f"data.{key}", path) for key, path in asdict(config.data).items())
    return next((problem for key, path in named if (problem := present.file(key, path))), None)


def _windows_overlap(config: Any, _: Launch) -> Problem | None:
    stride, length = getattr(config, "overlapping_eval", 1), config.seq_length
    if length is None or stride <= length:
        return None
    return Problem(
        ("overlapping_eval", "seq_length"),
        f"overlapping_eval={stride} is more than seq_length={length}, so tokens between windows would not be "
        "scored",
        f"use overlapping_eval={length} or less",
    )


check_eval_loss = checked_by(
    RANK_RULES,
    (
        *(devices_exist, loss_scale_can_fall, checkpoint_exists),
        lambda config, _: present.indexed("path", config.path),
        tokenizer_exists,
    ),
)
"""sequence_parallel, pipeline, zero and recompute are accepted and have no effect: the layout of the training
can be given here too."""
check_zero_shot = checked_by(
    READER_RULES,
    (
        *(devices_exist, loss_scale_can_fall, _windows_overlap, checkpoint_exists, tokenizer_exists),
        _files_exist,
    ),
)

ZERO_SHOT_KEYS = "out samples batch_size seq_length limit tokenizer force tp pp vp dp dist.device"

on_texts = partial(
    Command,
    target="mlm.cli.evaluate.zero_shot:run",
    check=check_zero_shot,
    preflight="mlm.cli.evaluate.zero_shot:preflight",
)
COMMANDS = (
    Command(
        name="eval loss",
        spec=EvalLossConfig,
        target="mlm.cli.evaluate.loss:run",
        check=check_eval_loss,
        preflight="mlm.cli.evaluate.loss:preflight",
        summary="mean loss, perplexity and bits per byte of a checkpoint on a corpus",
        about="""Scores a checkpoint on an indexed corpus, every token once. The score does not depend on tp,
            cp, pp, dp or the batch size. It is printed and saved as JSON.""",
        examples="""
            # The loss on the validation set of a run
            mlm eval loss ckpt=runs/shakespeare
            # Another corpus, on two ranks
            mlm eval loss ckpt=runs/shakespeare path=corpus/test tp=2
        """,
        keys="ckpt path out batch_size seq_length tokenizer tp cp pp dp dist.device",
    ),
    on_texts(
        name="eval wikitext103",
        spec=EvalWikitext103Config,
        summary="perplexity of a checkpoint on WikiText-103, by two protocols",
        about="""Scores a checkpoint on WikiText-103 by Megatron-LM's protocol (adjusted perplexity,
            overlapping windows) and by lm-eval's (per article, word and byte), from the Hub or a local file.
            The score does not depend on tp, pp, dp or the batch size. Stopped and started again, it
            continues. It is printed and saved as JSON with all it depends on.""",
        examples="""
            # The perplexity on WikiText-103, which the Hub supplies
            mlm eval wikitext103 ckpt=runs/shakespeare
            # A file, on two ranks
            mlm eval wikitext103 ckpt=runs/shakespeare data.path=wiki.test.tokens tp=2
        """,
        keys=f"ckpt data.path data.raw_path overlapping_eval {ZERO_SHOT_KEYS}",
    ),
    on_texts(
        name="eval lambada",
        spec=EvalLambadaConfig,
        summary="accuracy of a checkpoint at the last words of LAMBADA, by two protocols",
        about="""Scores a checkpoint on LAMBADA by Megatron-LM's protocol (strict cloze accuracy) and by
            lm-eval's (lambada_openai, lambada_standard), from the Hub or a local file. The score does not
            depend on tp, pp, dp or the batch size. Stopped and started again, it continues. It is printed and
            saved as JSON with all it depends on.""",
        examples="""
            # The accuracy on LAMBADA, which the Hub supplies
            mlm eval lambada ckpt=runs/shakespeare
            # A file, and each passage's result
            mlm eval lambada ckpt=runs/shakespeare data.path=lambada.jsonl samples=passages.jsonl
        """,
        keys=f"ckpt data.path data.standard_path {ZERO_SHOT_KEYS}",
    ),
    on_texts(
        name="eval all",
        spec=EvalAllConfig,
        summary="WikiText-103 and LAMBADA in one pass",
        about="What `mlm eval wikitext103` and `mlm eval lambada` do, in one pass and one table.",
        examples="""
            # Both scores in one pass, the sets from the Hub
            mlm eval all ckpt=runs/shakespeare
            # From files
            mlm eval all ckpt=runs/shakespeare data.wikitext103=wiki.test.tokens data.lambada=lambada.jsonl
        """,
        keys=f"""
            ckpt data.wikitext103 data.wikitext103_raw data.lambada data.lambada_standard overlapping_eval
            {ZERO_SHOT_KEYS}
        """,
    ),
)
