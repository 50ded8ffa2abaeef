"""The commands `mlm ckpt …`: look into, check, compare and clean up checkpoints."""

from mlm.cli.ckpt.settings import (
    CkptDiffConfig,
    CkptInspectConfig,
    CkptPruneConfig,
    CkptRollbackConfig,
    CkptVerifyConfig,
)
from mlm.cli.command import Command, check_out_file

COMMANDS = (
    Command(
        name="ckpt inspect",
        other_names=("checkpoint",),
        spec=CkptInspectConfig,
        target="mlm.cli.ckpt.inspect:run",
        local_check=check_out_file,
        positional=("ckpt",),
        summary="show a checkpoint: step, tokens, model, layout, tensors, files, configuration",
        about="Reads the manifest of a checkpoint, no tensor.",
        examples="""
            # Describe the latest checkpoint of a run
            mlm ckpt inspect runs/shakespeare
            # Every tensor of one
            mlm ckpt inspect runs/shakespeare/checkpoints/step-00000900 --tensors
        """,
    ),
    Command(
        name="ckpt verify",
        spec=CkptVerifyConfig,
        target="mlm.cli.ckpt.verify:run",
        local_check=check_out_file,
        positional=("ckpt",),
        summary="check that checkpoints are whole: every byte is read and compared with its digest",
        about="Reads every file of one checkpoint, or of all in a run. Ends with 0 if all are whole, else 1.",
        examples="""
            # Check every checkpoint of a run
            mlm ckpt verify runs/shakespeare
        """,
    ),
    Command(
        name="ckpt diff",
        spec=CkptDiffConfig,
        target="mlm.cli.ckpt.diff:run",
        local_check=check_out_file,
        positional=("first", "second"),
        summary="compare two checkpoints: step, state, tensors",
        about="""Compares two checkpoints tensor by tensor, whatever layouts wrote them. Ends with 0 if all
            tensors are equal bit for bit, 1 if not.""",
        examples="""
            # Compare the latest checkpoints of two runs
            mlm ckpt diff runs/shakespeare runs/longer
        """,
    ),
    Command(
        name="ckpt prune",
        spec=CkptPruneConfig,
        target="mlm.cli.ckpt.prune:run",
        positional=("ckpt",),
        summary="delete old checkpoints of a run",
        about="""Keeps the newest whole checkpoints, multiples of keep_every, and the one `latest` names, and
            clears up after killed saves. A damaged checkpoint never counts as kept (those that count are read
            to the last byte): it is deleted when keep_last whole ones are newer. Rejected while a run uses
            the folder.""",
        examples="""
            # List the checkpoints that pruning would delete
            mlm ckpt prune runs/shakespeare keep_last=1 --dry-run
            # Every ten thousandth, and the last
            mlm ckpt prune runs/longer keep_last=1 keep_every=10000
        """,
    ),
    Command(
        name="ckpt rollback",
        spec=CkptRollbackConfig,
        target="mlm.cli.ckpt.rollback:run",
        positional=("ckpt", "step"),
        summary="continue a run from an earlier checkpoint; newer ones are set aside",
        about="""Points `latest` at a checkpoint, by default the newest good one: whole, finite, and older
            than the steps that were not finite. Newer ones are renamed aside-step-…, not deleted; until
            training continues, the same command with a newer step goes forward again. Rejected while a run
            uses the folder; a run whose mirror is rolled back uploads no more.""",
        examples="""
            # Back to the newest good checkpoint
            mlm ckpt rollback runs/shakespeare
            # Back to step 900
            mlm ckpt rollback runs/shakespeare 900
            # In the store that a run's checkpoint.mirror names
            mlm ckpt rollback s3://bucket/runs/a 900
        """,
    ),
)
