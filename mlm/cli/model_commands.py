"""The commands that use a trained model: see command.py."""

from mlm.cli.command import Command
from mlm.config.checks import check_eval_loss, check_generate

MODELS = (
    Command(
        words=("eval", "loss"),
        config="eval_loss",
        target="mlm.tasks.loss:run",
        check=check_eval_loss,
        preflight="mlm.tasks.loss:preflight",
        summary="mean loss, perplexity and bits per byte of a checkpoint on a corpus",
        about=(
            "Scores a checkpoint on an indexed corpus, every token once. The score does not depend on tp, "
            "pp, dp or the batch size. It is printed and saved as JSON."
        ),
        examples=(
            ("The validation set of a run", "mlm eval loss ckpt=runs/shakespeare"),
            ("Another corpus, on two ranks", "mlm eval loss ckpt=runs/shakespeare path=corpus/test tp=2"),
        ),
        keys=(
            *("ckpt", "path", "out", "batch_size", "seq_length", "tokenizer"),
            *("tp", "pp", "dp", "dist.device"),
        ),
    ),
    Command(
        words=("generate",),
        config="generate",
        target="mlm.tasks.generate:run",
        check=check_generate,
        preflight="mlm.tasks.generate:preflight",
        summary="continue a text with a checkpoint",
        about="Samples a continuation of a prompt, token by token, and prints it.",
        examples=(
            ("A passage", 'mlm generate ckpt=runs/shakespeare prompt="ROMEO:"'),
            (
                "The most probable continuation",
                'mlm generate --ckpt runs/shakespeare --prompt "To be, or" --temperature 0',
            ),
        ),
        keys=(
            *("ckpt", "prompt", "max_new_tokens", "temperature", "top_k", "top_p", "seed", "tokenizer"),
            *("tp", "pp", "dist.device"),
        ),
    ),
)
