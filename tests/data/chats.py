"""Small tokenizers in the style of Llama, Qwen and Mistral, chat templates, and conversations."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from mlm.data.chat_files import find_chat_template
from mlm.data.chat_template import ChatTemplate
from mlm.data.chat_tokens import Tokens, encode
from mlm.data.conversation import Conversation
from mlm.data.tokenizer import Tokenizer

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
"""Llama 3's; Qwen 2's takes digits one by one."""
TEXT = ["the cat sat on the mat. what is 12 and 345? It's they'll\n\nuser assistant system é"] * 20
SPECIAL = {
    "llama3": (
        *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "qwen2": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "llama2": ("<unk>", "<s>", "</s>"),
    "mistral": ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"),
}
NAMED = {
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "qwen2": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "llama2": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
}
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}
    {%- generation %}{{ message.content | trim + '<|im_end|>' }}{% endgeneration %}
{%- else %}
    {{- message.content + '<|im_end|>' }}
{%- endif %}
{{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
    "+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
INST = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
TEMPLATES = {"llama3": LLAMA3, "qwen2": CHATML, "llama2": INST, "mistral": INST}
TALK = [
    {"role": "user", "content": "what is 12 and 345?"},
    {"role": "assistant", "content": "It's the cat.\n\nthe mat é漢"},
    {"role": "user", "content": " they'll  sat\non"},
    {"role": "assistant", "content": "on the mat."},
]


@cache
def content(style: str) -> str:
    special = SPECIAL[style]
    if style in ("llama3", "qwen2"):
        split = LLAMA3_SPLIT if style == "llama3" else LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
        backend = Backend(models.BPE(ignore_merges=style == "llama3"))
        if style == "qwen2":
            backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        backend.train_from_iterator(TEXT, trainer)
        backend.post_processor = processors.ByteLevel(trim_offsets=style == "llama3")
        backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
        return str(backend.to_str())
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if style == "llama2":  # as converted from sentencepiece for years
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=pieces, show_progress=False)
    backend.train_from_iterator(TEXT, trainer)
    made = json.loads(backend.to_str())
    made["added_tokens"] = [token for token in made["added_tokens"] if token["content"] in special]
    return json.dumps(made)


def write_tokenizer(folder: Path, style: str, template: str | None = "", **settings: Any) -> Path:
    """tokenizer.json and tokenizer_config.json; `template` None for none, "" for that of the style."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(content(style))
    values: dict[str, Any] = {**NAMED[style], "tokenizer_class": "PreTrainedTokenizerFast", **settings}
    if template is not None:
        values["chat_template"] = template or TEMPLATES[style]
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


def load(folder: Path, name: str | None = None) -> tuple[Tokenizer, ChatTemplate]:
    tokenizer = Tokenizer.load(folder)
    template = find_chat_template(folder, tokenizer, name)
    assert template is not None
    return tokenizer, template


def tokens_of(folder: Path, conversation: Conversation, name: str | None = None, **options: Any) -> Tokens:
    """Tokens of a conversation by the template of a folder, or the one of a name."""
    (tokens,) = encode([conversation], *load(folder, name), **options)
    assert isinstance(tokens, Tokens), tokens
    return tokens


def text_of_answers(folder: Path, tokens: Tokens) -> str:
    return Tokenizer.load(folder).decode(tokens.ids[tokens.is_answer].tolist())


def theirs(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(str(folder))
