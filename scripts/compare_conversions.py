"""Compare models and tokenizers with `transformers` and llama.cpp: as read, continued and exported.

    python scripts/compare_conversions.py [WORD …]

Models are tiny, with random weights, and made by `transformers`, tokenizers by `tokenizers`. Printed are two
tables for the record, of the rows whose name contains a word. A number is the largest difference from the
logits of `transformers`, in standard deviations of all; otherwise a cell says what is equal, or why not.
"""

import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import transformers
from conversions.models import MODELS, write_model
from conversions.styles import SPELLED, TEXTS, TOKENIZERS
from torch import Tensor
from transformers import AutoTokenizer

import mlm
from mlm.cli.convert.run import preflight_export_gguf, run_export_gguf
from mlm.cli.convert.settings import ExportGGUFConfig
from mlm.convert.gguf.export import LlamaCpp
from mlm.data.tokenizer import Tokenizer
from mlm.inference.config import resolve_sampling
from mlm.inference.generation import generate
from mlm.util.errors import UserError

LIMIT = 1e-4
"""Largest difference of logits, in standard deviations of all: float32 sums in another order."""
LENGTH, NEW = 40, 16
PROMPTS = ("the cat sat on", " What is 12\nand 345?", "é 日")


def theirs(folder: Path, kind: str) -> Any:
    return getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def their_logits(model: Any, tokens: Tensor) -> Tensor:
    """Return the logits of each token: [S] -> [S, V]."""
    output = model(tokens[None])
    found: Tensor = (output.prediction_logits if "prediction_logits" in output else output.logits)[0]
    return found


def their_texts(model: Any, folder: Path) -> list[list[int]]:
    """Return what transformers' generate() adds to each prompt, without the end."""
    tokenizer, found = AutoTokenizer.from_pretrained(folder), []
    for prompt in PROMPTS:
        read = tokenizer(prompt, return_tensors="pt")
        inputs = {name: read[name] for name in ("input_ids", "attention_mask")}
        ids = model.generate(**inputs, max_new_tokens=NEW)[0, read["input_ids"].shape[1] :].tolist()
        ends = model.generation_config.eos_token_id
        found.append(ids[:-1] if ids[-1] in (ends if isinstance(ends, list) else [ends]) else ids)
    return found


def our_texts(folder: Path) -> list[list[int]]:
    model = mlm.load(folder)
    tokenizer = model.tokenizer
    options = resolve_sampling(tokenizer.declared.generation, {"max_new_tokens": NEW})
    prompts = [tokenizer.encode_prompt(prompt) for prompt in PROMPTS]
    return generate(model.trained, prompts, options, ctx=model.ctx, end_ids=tokenizer.end_ids)


def difference(found: Tensor, wanted: Tensor) -> str:
    error = ((found - wanted).abs().max() / wanted.std()).item()
    return "0" if error == 0 else f"{error:.0e}" if error < LIMIT else f"**differs by {error:.0e}**"


def same(found: list[Any], wanted: list[Any]) -> str:
    wrong = sum(mine != other for mine, other in zip(found, wanted, strict=True))
    return f"**{wrong} of {len(wanted)} differ**" if wrong else "equal"


def cell(compute: Callable[[], str]) -> str:
    """Return what is computed, or in a few words why it is rejected."""
    try:
        return compute()
    except UserError as error:
        words = re.sub(r"(?<!\S)/\S*: |config\.json: |tokenizer: ", "", error.problems[0])
        short = re.split(r"; |, and |, which", re.sub(" as tokens.*", " otherwise", words))[0]
        return f"rejected: {short}".replace("|", "\\|")


def export_to_gguf(folder: Path) -> LlamaCpp:
    """Export folder/run. Raises UserError."""
    config = ExportGGUFConfig(ckpt=str(folder / "run"), out=str(folder / "model.gguf"), type="f32")
    if problems := preflight_export_gguf(config):
        raise UserError(problems[0])
    run_export_gguf(config)
    return LlamaCpp(folder / "model.gguf")


def compare_model(folder: Path, name: str) -> list[str]:
    """Return the cells of a model: loaded, continued, exported to transformers and to llama.cpp."""
    kind, settings = MODELS[name]
    source, is_causal = folder / "source", "PreTraining" not in kind
    write_model(source, kind, settings)
    model = theirs(source, kind)
    tokens = torch.randint(model.config.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(1))
    wanted = their_logits(model, tokens)
    loaded = cell(lambda: difference(mlm.load(source).logits(tokens[None])[0], wanted))
    if loaded.startswith("rejected"):
        return [loaded, "", "", ""]
    written = their_texts(model, source) if is_causal else []

    def exported() -> str:
        mlm.import_hf(source, folder / "run", verify=False)
        out = mlm.export_hf(folder / "run", folder / "out", verify=False)
        again = theirs(out, kind)
        ids = [AutoTokenizer.from_pretrained(each)(list(TEXTS))["input_ids"] for each in (out, source)]
        texts = their_texts(again, out) if is_causal else []
        equal = same([*ids[0], *texts], [*ids[1], *written])
        return f"{difference(their_logits(again, tokens), wanted)}, {equal}"

    def in_llama_cpp() -> str:
        count = min(LENGTH, settings.get("sliding_window") or LENGTH)
        found = export_to_gguf(folder).logits(tokens[:count].tolist())
        return difference(found, wanted[:count])

    continued = cell(lambda: same(our_texts(source), written)) if is_causal else "–"
    return [loaded, continued, cell(exported), cell(in_llama_cpp)]


def compare_tokenizer(folder: Path, name: str) -> list[str]:
    """Return the cells of a tokenizer: texts, what comes before them, exported, and in llama.cpp."""
    source, texts = folder / "source", list(TEXTS)
    plain = texts[:-SPELLED]
    write_model(source, "LlamaForCausalLM", {}, name)
    ours, other = Tokenizer.load(source), AutoTokenizer.from_pretrained(source)
    bare, full = other(texts, add_special_tokens=False)["input_ids"], other(texts)["input_ids"]
    read = same([ours.encode_special(text) for text in texts], bare)
    names = ours.special_ids - {other.unk_token_id}
    if read == "equal" and any(ours.encode(text) != ids for text, ids in zip(plain, bare, strict=False)):
        read = "**other ids without names**"
    if any(names & {*ours.encode(text)} for text in texts):
        read = "**names become special tokens**"
    end = len(full[0]) - len(ours.opening)
    wanted = [ids[: len(ids) - end] or [ours.eod_id] for ids in full[:-SPELLED]]
    begun = same([ours.encode_prompt(text) for text in plain], wanted)

    def exported() -> str:
        mlm.import_hf(source, folder / "run", verify=False)
        again = AutoTokenizer.from_pretrained(mlm.export_hf(folder / "run", folder / "out", verify=False))
        found = [[ids, again.decode(ids)] for ids in again(texts)["input_ids"]]
        return same(found, [[ids, other.decode(ids)] for ids in full])

    def in_llama_cpp() -> str:
        llama = export_to_gguf(folder)
        found = [[llama.tokens(text), llama.tokens(text, add_special=True)] for text in texts]
        wanted = [[ids, ours.opening + ids if ids else []] for ids in map(ours.encode, texts)]
        return same(found, wanted)

    return [read, begun, cell(exported), cell(in_llama_cpp)]


@contextmanager
def quiet() -> Iterator[None]:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with redirect_stdout(StringIO()):
        yield


TABLES: tuple[tuple[str, dict[str, Any], Callable[[Path, str], list[str]]], ...] = (
    ("| model | loaded | greedy text | import and export | GGUF |", MODELS, compare_model),
    ("| tokenizer | ids | first token | import and export | GGUF |", TOKENIZERS, compare_tokenizer),
)


def row(compare: Callable[[Path, str], list[str]], name: str) -> str:
    with tempfile.TemporaryDirectory() as folder, quiet():
        cells = compare(Path(folder), name)
    return f"| {name} | {' | '.join(cells)} |"


def main(words: list[str]) -> None:
    for head, rows, compare in TABLES:
        print(f"\n{head}\n| --- | --- | --- | --- | --- |")
        for name in rows:
            if any(word in name for word in words or [""]):
                print(row(compare, name), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
