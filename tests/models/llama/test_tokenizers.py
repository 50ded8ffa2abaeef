"""Tokenizers of Llama 3, Qwen and Mistral in miniature: their pipelines, and special tokens as plain text."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from mlm.data.tokenizer import Tokenizer
from tests.convert.hf_models import TEXT

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Words, up to three digits, punctuation, white space: the pattern of Llama 3, of one digit in Qwen."""


def byte_level(special: list[str], *, nfc: bool, bos: str | None) -> Backend:
    """BPE of bytes after a split by pattern, as Llama 3 (with a first token) and Qwen (normalised)."""
    backend = Backend(models.BPE(ignore_merges=bos is not None))
    backend.normalizer = normalizers.NFC() if nfc else None
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator([TEXT] * 3, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    if bos is not None:
        pairs = [(bos, backend.token_to_id(bos))]
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=pairs)
    return backend


def byte_fallback() -> Backend:
    """BPE of pieces, spaces as ▁, unknown letters as bytes: Llama 2, Mistral, TinyLlama."""
    special = ["<unk>", "<s>", "</s>"]
    letters = sorted(set("▁" + TEXT.replace(" ", "▁")) - set("日本🙂"))
    vocab = {
        name: i for i, name in enumerate([*special, *(f"<0x{n:02X}>" for n in range(256)), *letters, "to"])
    }
    backend = Backend(models.BPE(vocab, [("t", "o")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    pairs = [("<s>", vocab["<s>"])]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=pairs)
    return backend


LLAMA3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CASES: dict[str, tuple[Any, str, str]] = {
    "llama3": (lambda: byte_level(LLAMA3, nfc=False, bos=LLAMA3[0]), LLAMA3[1], LLAMA3[2]),
    "qwen": (lambda: byte_level(QWEN, nfc=True, bos=None), QWEN[0], QWEN[1]),
    "mistral": (byte_fallback, "</s>", "<s>"),
}
"""Tokenizer, its end of a document, another special token."""


@pytest.mark.parametrize("name", CASES)
def test_texts_have_the_librarys_tokens_and_come_back(tmp_path: Path, name: str) -> None:
    make, eod, special = CASES[name]
    backend = make()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eod_id == backend.token_to_id(eod)
    assert tokenizer.encode(TEXT) == backend.encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    spelled = f"a {special} b"
    assert backend.token_to_id(special) in tokenizer.encode_special(spelled)
    assert backend.token_to_id(special) not in tokenizer.encode(spelled)
    assert tokenizer.decode(tokenizer.encode(spelled)) == spelled
