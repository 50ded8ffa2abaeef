"""Small files in the forms of WikiText and LAMBADA, a tokenizer for them and a model of random weights."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2LMHeadModel

from mlm.convert.source import open_source
from mlm.corpus.train_tokenizer import train_bpe
from mlm.data.tokenizer import Tokenizer
from mlm.inference.trained import LoadedModel, load_trained
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from tests.convert.hf_models import make_model

WIKITEXT = (
    " \n = Homarus lobster = \n \n The lobster ( H. homarus ) weighs 1 @,@ 500 g , or 3 @.@ 3 lb . "
    "It 's \" large \" ; the <unk> of the sea 's floor ! \n \n = = Description = = \n \n Its well @-@ "
    "known claws ( 24 in ) grow at 5 ° C : slowly . Others ' claws [ sic ] do not ? \n \n = = = Size "
    "= = = \n \n N of them . \n"
    " = 2 @-@ 8 ( road ) = \n \n A road . It runs , as roads do , from here to there and then back again . \n"
    " = Third = \n \n One { more } article 's words , to have three of them ; that is enough . \n\n \n"
)
"""Three articles, with a blank line of a space as in wiki.*.tokens, and two blank lines of nothing."""
PASSAGES = (
    "The cat sat on the mat, and the dog looked at the cat",
    'He went home.\n\n"Is it late?" she asked him.\n\n"It is not late"',
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty and then one more and one more and then the last of the words is "
    "unquestionably",
    "It was naïve to think that café was nobler",
    "I saw it.\nThen it saw\nme",
    "Ends with two  spaces  here",
    "To be or not to be",
)
SEQ_LENGTH = 24  # half of the model's positions, so that it is the setting that counts


@cache
def tokenizer() -> Tokenizer:
    """Byte-level BPE of 300 tokens; the model has 331."""
    return train_bpe([WIKITEXT, *PASSAGES] * 3, 300)


def write_wikitext(folder: Path, text: str = WIKITEXT) -> Path:
    path = folder / "wiki.test.tokens"
    path.write_text(text, newline="")
    return path


def write_lambada(folder: Path, texts: tuple[str, ...] = PASSAGES, name: str = "lambada.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def write_model(folder: Path, **settings: Any) -> Any:
    """A model folder of `transformers` with the tokenizer in it; the model, float64."""
    model = make_model(folder, **settings)
    tokenizer().save(folder)
    return model.double()


def write_trained_model(folder: Path, texts: tuple[str, ...]) -> Any:
    """As `write_model`, trained on some texts for half a second."""
    write_model(folder)
    model = GPT2LMHeadModel.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        for text in texts:
            ids = torch.tensor([tokenizer().encode(text)[-SEQ_LENGTH - 1 :]])
            optimizer.zero_grad()
            model(ids, labels=ids).loss.backward()
            optimizer.step()
    model.eval().save_pretrained(folder)
    return model.double()


def load(folder: Path, ctx: ParallelContext) -> LoadedModel:
    """The model in float64, at the layout of `ctx`."""
    layout, precision = ParallelConfig(tp=ctx.tp.size, pp=ctx.pp.size), PrecisionConfig(dtype="fp64")
    return load_trained(open_source(str(folder)), layout, precision, ctx)
