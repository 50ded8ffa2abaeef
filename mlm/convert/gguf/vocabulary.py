"""Tokenizers in a GGUF file, and their behaviour in llama.cpp.

The rules are in llama.cpp's src/llama-vocab.cpp: a file records a tokenizer's model and a name for the
splitting of text, and nothing else of tokenizer.json. So each vocabulary is tested on texts first.
"""

import json
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from mlm.data.tokenizer import Tokenizer, merges_of
from mlm.util.errors import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""llama.cpp's types of tokens."""
SPACE = "\u2581"
"""SentencePiece's letter for a space."""
ANOTHER_WAY = "`mlm export hf` writes a folder that llama.cpp's convert_hf_to_gguf.py may read"

PROBE = (
    *("", " ", "a", "Hello world", " Hello  World ", "HELLO WORLD", "It's they'll I'M WE'RE don't"),
    *("1", "12", "345", "2026-11-28", "3.14159", "1234567890", "x1y22z333", "١٢٣", "IV Ⅳ", "½"),
    *("\n", "\n\n", "a\n\n\nb", "\tx\t\ty", "trailing   ", "   leading", "a    b", "\r\n", "x \n y"),
    *("def f(x):\n    return x**2  # two", "if (a && b) { c[0] += 1; }", '<a href="u">t</a>', "$x_1^2$"),
    *("Straße ÉCOLE naïve Über", "İstanbul ı", "ﬁne ① ＡＢ", "Привет, МИР", "Γειά", "\u00a0x\u3000y"),
    *("你好，世界。", "こんにちは カナ", "안녕", "مرحبا", "नमस्ते", "สวัสดี", "cafe\u0301"),
    *("😀", "👨\u200d👩\u200d👧 ok", "\u200b\ufeff", "...!?--", "“quoted” — …", "a_b-c/d\\e", "://"),
)
"""Texts that tell tokenizers apart: cases, digits, spaces, code, accents, scripts, emoji."""

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
PATTERNS = {
    (GPT2,): "gpt-2",
    (r"\p{N}", GPT2): "smollm",
    (_WORDS + r"\p{N}{1,3}" + _REST,): "llama-bpe",
    (_WORDS + r"\p{N}" + _REST,): "qwen2",
    _DEEPSEEK: "deepseek-v3",
}
"""Patterns that a byte-level tokenizer splits text by, in turn -> llama.cpp's name for them.

Other names of llama.cpp only approximate: tekken does not treat marks of Hindi and Thai as letters.
"""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as GGUF holds it."""

    model: str
    """llama.cpp's name: gpt2 merges bytes, llama merges letters by score."""
    tokens: list[str]
    types: list[int]
    merges: list[list[str]]
    scores: list[float] | None = None
    pre: str = "default"
    """Name for how text is split before merges, of gpt2."""
    adds_space: bool = False
    """A space is put before a text."""

    @cached_property
    def backend(self) -> Backend:
        """A tokenizer that encodes text as llama.cpp does."""
        ids = {token: id for id, token in enumerate(self.tokens)}
        if self.model == "gpt2":
            merges = [(left, right) for left, right in self.merges]
            # llama-bpe makes a word of the vocabulary one token, whatever the merges.
            whole_words = self.pre == "llama-bpe"
            backend = Backend(models.BPE(vocab=ids, merges=merges, ignore_merges=whole_words))
            patterns = next(patterns for patterns, name in PATTERNS.items() if name == self.pre)
            splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
            byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
        else:
            # llama.cpp joins any two tokens that form a third, highest score first.
            assert self.scores is not None
            rows = zip(self.tokens, self.types, self.scores, strict=True)
            best = sorted(
                (-score, id, token) for id, (token, type, score) in enumerate(rows) if type == NORMAL
            )
            merges = []
            for _, _, token in best:
                pairs = ((token[:n], token[n:]) for n in range(1, len(token)))
                merges += [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
            backend = Backend(models.BPE(vocab=ids, merges=merges, byte_fallback=True))
            prefix = [normalizers.Prepend(SPACE)] if self.adds_space else []
            backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
        typed = zip(self.tokens, self.types, strict=True)
        added = [token for token, type in typed if type == USER_DEFINED]
        backend.add_tokens([AddedToken(token, normalized=False) for token in added])
        return backend


def vocabulary(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """Return a tokenizer's tokens for llama.cpp, padded to the model's `size`.

    Raises UserError if llama.cpp has no such tokenizer, or encodes a text of PROBE differently.
    """
    content = json.loads(tokenizer.content)
    model, added = content["model"], content.get("added_tokens") or []
    if tokenizer.vocab_size > size:
        raise UserError(
            f"tokenizer: has ids up to {tokenizer.vocab_size - 1}, and the model's vocab_size={size}; "
            "export the tokenizer that the model was trained with"
        )
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        raise UserError(f"tokenizer: {model.get('type', 'BPE')} is not exported to GGUF; {ANOTHER_WAY}")
    by_score = bool(model.get("byte_fallback"))
    tokens, types = [f"[PAD{id}]" for id in range(size)], [UNUSED] * size
    for token, id in model["vocab"].items():
        tokens[id], types[id] = token, NORMAL
        if token == model.get("unk_token"):
            types[id] = UNKNOWN
        elif by_score and re.fullmatch("<0x[0-9A-F]{2}>", token):
            types[id] = BYTE
    for token in added:
        tokens[token["id"]] = token["content"]
        if types[token["id"]] != UNKNOWN:
            types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    merges = merges_of(model)
    if by_score:
        scores = [0.0 if type in (CONTROL, UNKNOWN, BYTE) else float(-len(merges)) for type in types]
        ids = {token: id for id, token in enumerate(tokens)}
        for rank, pair in reversed([*enumerate(merges)]):
            scores[ids["".join(pair)]] = float(-rank)
        adds_space = tokenizer.name_of(tokenizer.encode("a")[0]).startswith(SPACE)
        result = Vocabulary("llama", tokens, types, [], scores, adds_space=adds_space)
    else:
        pre = PATTERNS.get(patterns_of(content.get("pre_tokenizer")))
        if pre is None:
            raise UserError(
                f"tokenizer: llama.cpp splits text in no way exactly as this tokenizer does; {ANOTHER_WAY}"
            )
        result = Vocabulary("gpt2", tokens, types, merges, pre=pre)
    compare_tokens(tokenizer, lambda text: result.backend.encode(text, add_special_tokens=False).ids)
    return result


def patterns_of(pre_tokenizer: Any) -> tuple[str, ...]:
    """Return the patterns that a pre-tokenizer of `tokenizers` splits text by; () if it does more."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer]) if isinstance(pre_tokenizer, dict) else []
    patterns: list[str] = []
    for step in steps:
        match step:
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated"}:
                patterns.append(pattern)
            case {"type": "Digits", "individual_digits": True}:
                patterns.append(r"\p{N}")
            case {"type": "ByteLevel"}:
                patterns += [GPT2] * step.get("use_regex", True)
            case _:
                return ()
    return tuple(patterns)


def compare_tokens(tokenizer: Tokenizer, encode: Callable[[str], list[int]]) -> None:
    """Compare the tokens of texts with llama.cpp's, by `encode`. Raises UserError if they differ.

    llama.cpp does not compose accents: texts are composed (NFC) first for a tokenizer that does.
    """
    step = max(tokenizer.vocab_size // 1000, 1)  # a thousand tokens serve as texts too
    pieces = [tokenizer.decode([id]) for id in range(0, tokenizer.vocab_size, step)]
    texts = [*PROBE, *(piece for piece in pieces if "\ufffd" not in piece)]
    if composes(tokenizer):
        texts = [unicodedata.normalize("NFC", text) for text in texts]
    differing = [text for text in texts if tokenizer.encode(text) != encode(text)]
    if differing:
        text = differing[0]
        raise UserError(
            f"tokenizer: llama.cpp reads {text!r} as tokens {encode(text)}, not {tokenizer.encode(text)}, "
            f"and {len(differing)} of {len(texts)} texts otherwise than this tokenizer; {ANOTHER_WAY}"
        )


def composes(tokenizer: Tokenizer) -> bool:
    """True if the only normalisation of a tokenizer composes letters and accents (NFC)."""
    return bool(json.loads(tokenizer.content).get("normalizer") == {"type": "NFC"})
