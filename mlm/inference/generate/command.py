"""The command `mlm generate`."""

from mlm.config.command import Command
from mlm.inference.generate.checks import check_generate
from mlm.inference.generate.config import GenerateConfig

COMMANDS = (
    Command(
        words=("generate",),
        also=("sample",),
        config="generate",
        spec=GenerateConfig,
        target="mlm.inference.generate.run:run",
        check=check_generate,
        preflight="mlm.inference.generate.run:preflight",
        summary="continue prompts with a checkpoint",
        about=(
            "Samples continuations of a prompt, or of a file of prompts, and prints them as they come. What "
            "is drawn depends on the seed and the prompt's number alone, not on tp, pp or batch_size. With "
            "chat=true it answers messages instead."
        ),
        examples=(
            ("Generate a passage", 'mlm generate ckpt=runs/shakespeare prompt="ROMEO:"'),
            (
                "The most probable continuation",
                'mlm generate --ckpt runs/shakespeare --prompt "To be, or" --temperature 0',
            ),
            (
                "An answer of a model that knows conversations",
                'mlm generate ckpt=runs/chat chat=true prompt="Who wrote Hamlet?"',
            ),
            ("From standard input", "head -3 play.txt | mlm generate ckpt=runs/shakespeare prompt=-"),
            (
                "Four continuations of each line of a file, with GPT-2",
                "mlm generate ckpt=openai-community/gpt2 prompts=prompts.txt num_samples=4 out=texts.jsonl",
            ),
        ),
        keys=(
            *("ckpt", "prompt", "prompts", "num_samples", "out", "max_new_tokens", "min_new_tokens"),
            *("stop", "temperature", "top_k", "top_p", "repetition_penalty", "special_tokens", "seed"),
            *("batch_size", "tokenizer", "chat", "chat_template", "system"),
            *("tp", "pp", "dist.device"),
        ),
    ),
)
