"""The commands that make corpora: see command.py."""

from mlm.cli.command import Command

DATA = (
    Command(
        words=("data", "tokenizer"),
        config="data_tokenizer",
        target="mlm.data.build:run_tokenizer",
        summary="train a byte-level BPE tokenizer on text",
        about="Trains a byte-level BPE on text and writes tokenizer.json, for `mlm data build`.",
        examples=(
            ("8,192 tokens from your documents", "mlm data tokenizer input=text out=corpus vocab_size=8192"),
        ),
    ),
    Command(
        words=("data", "build"),
        config="data_build",
        target="mlm.data.build:run_build",
        summary="tokenise text into the .bin/.idx corpus that pretrain reads",
        about=(
            "Tokenises documents into Megatron's indexed format, one corpus each for train, validation and "
            "test, with the tokenizer beside them."
        ),
        examples=(
            (
                "A folder of train.jsonl and validation.jsonl",
                "mlm data build input=text tokenizer=corpus out=corpus",
            ),
            (
                "One file, split by documents",
                "mlm data build input=text.jsonl tokenizer=gpt2 out=corpus split=0.9,0.05,0.05",
            ),
        ),
    ),
)
