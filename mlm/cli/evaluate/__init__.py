"""The commands `mlm eval loss`, `wikitext103`, `lambada` and `all`: their settings, checks and help."""

from dataclasses import asdict
from functools import partial
from typing import Any

from mlm.cli.command import Command
from mlm.cli.evaluate.settings import EvalAllConfig, EvalLambadaConfig, EvalLossConfig, EvalWikitext103Config
from mlm.data import files_present as present
from mlm.launch.rules.checks import (
    checked_by,
    checkpoint_exists,
    devices_exist,
    loss_scale_can_fall,
    tokenizer_exists,
)
from mlm.launch.rules.layout import RANK_RULES, READER_RULES, Launch
from mlm.util.errors import Problem


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

ZERO_SHOT_KEYS = "out batch_size seq_length limit tokenizer force tp pp vp dp dist.device"

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
            The score does not depend on tp, pp, dp or the batch size. It is printed and saved as JSON with
            all it depends on.""",
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
            depend on tp, pp, dp or the batch size. It is printed and
            saved as JSON with all it depends on.""",
        examples="""
            # The accuracy on LAMBADA, which the Hub supplies
            mlm eval lambada ckpt=runs/shakespeare
            # A file
            mlm eval lambada ckpt=runs/shakespeare data.path=lambada.jsonl
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
