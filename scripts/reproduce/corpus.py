"""The corpora that experiments train on: steps that make them, of Debian's documentation or Shakespeare's
plays.

`corpus` holds documents for GPT-2, `corpora/figure7` sentences for BERT in fewer types of tokens: a model
knows their frequencies soon, and then learns from context. Held-out parts are whole documents, and train is
searched for their text: what agrees in 13 words is removed from it.
"""

from itertools import pairwise
from pathlib import Path

from reproduce.experiment import Settings, Step

CORPUS, BERT_CORPUS = "corpus", "corpora/figure7"
"""Folders in that of all experiments."""
VOCAB_SIZE, BERT_VOCAB_SIZE = 8192, 2048
DOCUMENTS = "text/documents"
LICENCES = f"{DOCUMENTS}/LICENCES"
TEXTS = {"debian": "reproduce.debian", "plays": "demo_corpus"}
"""Name of a text → module that writes it as JSON lines."""


def corpus_stages(settings: Settings, *, is_bert: bool = False) -> list[list[Step]]:
    """Return the steps that make one corpus: text, tokenizer, tokens; or a link to the user's."""
    corpus = BERT_CORPUS if is_bert else CORPUS
    if settings.corpus not in TEXTS:
        folder = str(Path(settings.corpus).absolute())
        return [[Step(corpus.replace("/", "-"), ("ln", "-sfn", folder, corpus), corpus, 0.01)]]
    kind, size = ("wordpiece", BERT_VOCAB_SIZE) if is_bert else ("bpe", VOCAB_SIZE)
    tokenizer, data = f"text/{kind}.json", ("mlm", "data")
    held_out = ",".join(f"{DOCUMENTS}/{part}.jsonl" for part in ("validation", "test"))
    recipe = (
        ("recipe=plain", "sentences=true", "append_eod=false")
        if is_bert
        else ("recipe=gopher", f"decontaminate.against=[{held_out}]", "decontaminate.parts=[train]")
    )
    text_words = ("python", "-m", TEXTS[settings.corpus], DOCUMENTS)
    tokenizer_words = (f"input={DOCUMENTS}", f"out={tokenizer}", f"vocab_size={size}", f"kind={kind}")
    corpus_words = (f"input={DOCUMENTS}", f"tokenizer={tokenizer}", f"out={corpus}", *recipe)
    return [
        [Step("text", text_words, DOCUMENTS, 3)],
        [Step(f"{kind}-tokenizer", (*data, "tokenizer", *tokenizer_words), tokenizer, 0.3)],
        [Step(corpus.replace("/", "-"), (*data, "build", *corpus_words), f"{corpus}/tokenizer.json", 1.5)],
    ]


def packages(folder: Path) -> list[str]:
    """Return the packages that the text's file LICENCES names, with their versions; none without it."""
    path = folder / LICENCES
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    return [before for before, line in pairwise(lines) if line.startswith("Licence of the ")]
