"""Tokenizers in the styles of released models, and strings that tell tokenizers apart."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from mlm.convert.gguf.vocabulary import PATTERNS

TEXTS = (
    *("", " ", "a", "Hello world", " Hello  World ", "HELLO WORLD", "It's they'll I'M WE'RE don't", "…"),
    *("1", "12", "345", "2026-11-28", "3.14159", "1234567890", "x1y22z333", "١٢٣", "Ⅳ ½ ²", "1,000 km/h"),
    *("\n", "\n\n", "a\n\n\nb", "\tx\t\ty", "trailing   ", "   leading", "a    b", "\r\n", "x \n y", " \t\n"),
    *("def f(x):\n    return x**2  # two", "if (a && b) { c[0] += 1; }", '<a href="u">t</a>', "$x_1^2$", "<"),
    *("Straße ÉCOLE naïve Über", "İstanbul ı", "ﬁne ① ＡＢ", "Привет, МИР", "Γειά", "\u00a0x\u3000y", "ǅ"),
    *("你好，世界。", "こんにちは カナ", "안녕", "مرحبا", "नमस्ते", "สวัสดี", "cafe\u0301 e\u0301\u0302"),
    *(
        "😀",
        "👨\u200d👩\u200d👧 ok",
        "\u200b\ufeff",
        "...!?--",
        "“quoted” — …",
        "a_b-c/d\\e",
        "▁ a▁b",
        "\x00",
    ),
    *("<s> a </s>", "a <|endoftext|> b", "<|begin_of_text|>x", "[CLS] a [SEP]", "x<unk> <0x41><pad>"),
)
"""60 strings. The last five spell special tokens."""
SPELLED = 5
"""Texts at the end that spell special tokens."""
CORPUS = [text for text in TEXTS[:-SPELLED] if text and min(text) > "\0" and max(text) < "\u3400"] * 8
CORPUS += ["the cat sat on the mat. what is 12 and 345? It's they'll\n\n"] * 40
SPLITS = {name: patterns for patterns, name in PATTERNS.items()}
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(*patterns: str, normalizer: Any = None, prefix: bool = False, **bpe: Any) -> Any:
    """Return a byte-level BPE and its trainer; without patterns it splits text as GPT-2."""
    backend = Backend(models.BPE(**bpe))
    if normalizer is not None:
        backend.normalizer = normalizer
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not patterns)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, last]) if splits else last
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return backend, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)


def sentencepiece(special: list[str], spaces: str) -> Any:
    """Return a BPE of letters that spells unknown ones in bytes, and its trainer.

    `spaces`: an extra one is put before a text, always or where it has none, or never.
    """
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if spaces == "missing":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        prefix = [normalizers.Prepend("▁")] if spaces == "always" else []
        backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    if spaces == "never":
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    strip = [decoders.Strip(" ", 1, 0)] if spaces != "never" else []
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(steps)
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    return backend, trainers.BpeTrainer(vocab_size=600, special_tokens=pieces, show_progress=False)


def wordpiece(special: list[str]) -> Any:
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = (
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )
    backend.decoder = decoders.WordPiece()
    return backend, trainers.WordPieceTrainer(vocab_size=350, special_tokens=special, show_progress=False)


def unigram(special: list[str]) -> Any:
    """Return a Unigram tokenizer as T5's and its trainer."""
    backend = Backend(models.Unigram())
    steps = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Sequence(steps), decoders.Metaspace()
    return backend, trainers.UnigramTrainer(
        vocab_size=300, unk_token="<unk>", special_tokens=special, show_progress=False
    )


def word_level(special: list[str]) -> Any:
    backend = Backend(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend, trainers.WordLevelTrainer(special_tokens=special, show_progress=False)


@dataclass(frozen=True)
class Style:
    """A tokenizer, and what its folder declares."""

    make: Callable[[list[str]], Any]
    """Return a tokenizer and its trainer for special tokens."""
    special: str
    """Names of special tokens."""
    roles: str
    """Roles of the first of them."""
    template: str = "$A"
    kind: str = "PreTrainedTokenizerFast"
    """Its class in `transformers`."""
    pieces: tuple[str, ...] = ()
    """Ordinary tokens that are names of special ones elsewhere."""


QWEN, DEEPSEEK = SPLITS["qwen2"], SPLITS["deepseek-v3"]
TOKENIZERS = {
    "GPT-2": Style(lambda _: byte_level(), "<|endoftext|>", "eos", kind="GPT2Tokenizer"),
    "Llama 3": Style(
        lambda _: byte_level(*SPLITS["llama-bpe"], ignore_merges=True),
        "<|begin_of_text|> <|end_of_text|> <|eot_id|>",
        "bos eos",
        "<|begin_of_text|> $A",
    ),
    "Qwen 2": Style(
        lambda _: byte_level(*QWEN, normalizer=normalizers.NFC()),
        "<|endoftext|> <|im_start|> <|im_end|>",
        "eos",
        kind="Qwen2Tokenizer",
        pieces=("<s>",),
    ),
    "DeepSeek-V3": Style(
        lambda _: byte_level(*DEEPSEEK),
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜▁pad▁｜>",
        "bos eos pad",
        "<｜begin▁of▁sentence｜> $A",
        "LlamaTokenizerFast",
    ),
    "Llama 2": Style(
        lambda special: sentencepiece(special, "always"),
        "<s> </s> <unk>",
        "bos eos unk",
        "<s> $A",
    ),
    "Mistral, LlamaTokenizer": Style(
        lambda special: sentencepiece(special, "missing"),
        "<s> </s> <unk> [INST] [/INST]",
        "bos eos unk",
        "<s> $A",
        "LlamaTokenizer",
    ),
    "Gemma": Style(
        lambda special: sentencepiece(special, "never"),
        "<bos> <eos> <unk> <pad>",
        "bos eos unk pad",
        "<bos> $A",
        "GemmaTokenizer",
    ),
    "BERT": Style(
        wordpiece, "[CLS] [SEP] [UNK] [PAD] [MASK]", "cls sep unk pad mask", "[CLS] $A [SEP]", "BertTokenizer"
    ),
    "T5 (Unigram)": Style(unigram, "<pad> </s> <unk>", "pad eos unk", "$A </s>", "T5Tokenizer"),
    "Tekken": Style(lambda _: byte_level(TEKKEN), "<s> </s> <unk> [INST]", "bos eos unk", "<s> $A"),
    "words": Style(word_level, "<unk> </s> <s>", "unk eos bos"),
    "lower case": Style(
        lambda _: byte_level(normalizer=normalizers.Lowercase()), "<|endoftext|> <|END|>", "eos"
    ),
    "RoBERTa, prefix space": Style(
        lambda _: byte_level(prefix=True), "<s> </s> <unk> <pad>", "bos eos unk pad", "<s> $A </s>"
    ),
}
TOKENIZERS["Llama 2, LlamaTokenizer"] = replace(TOKENIZERS["Llama 2"], kind="LlamaTokenizer")


def write_tokenizer(folder: Path, name: str) -> int:
    """Write tokenizer.json and tokenizer_config.json; return the size of the vocabulary."""
    style = TOKENIZERS[name]
    special = style.special.split()
    backend, trainer = style.make(special)
    backend.train_from_iterator([*CORPUS, *style.pieces * 40], trainer)
    content = json.loads(backend.to_str())
    content["added_tokens"] = []  # the trainer's, bytes among them
    backend = Backend.from_str(json.dumps(content))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    ids = [(token, backend.token_to_id(token)) for token in special]
    backend.post_processor = processors.TemplateProcessing(single=style.template, special_tokens=ids)
    backend.save(str(folder / "tokenizer.json"))
    roles = {f"{role}_token": token for role, token in zip(style.roles.split(), special, strict=False)}
    settings = {"tokenizer_class": style.kind, "clean_up_tokenization_spaces": False, "extra_ids": 0, **roles}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return int(backend.get_vocab_size())
