"""Special tokens by name, and added tokens, of folders without a tokenizer.json or with little beside it."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from mlm.cli import main
from mlm.data.chat_files import find_chat_template
from mlm.data.chat_template import ChatError, ChatTemplate
from mlm.data.chat_tokens import encode
from mlm.data.conversation import Conversation
from mlm.data.tokenizer import Tokenizer
from mlm.util.errors import UserError

EOS = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TALK = [{"role": "user", "content": "a  b"}, {"role": "assistant", "content": "c"}]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def write_gpt2(folder: Path, *special: str, added: dict[str, int] | None = None, **files: Any) -> Path:
    """vocab.json of bytes and special tokens, merges.txt, and other files by their stems."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [*ALPHABET, "ĠĠ", *special]
    (folder / "vocab.json").write_text(json.dumps({name: id for id, name in enumerate(names)}))
    (folder / "merges.txt").write_text("#version: 0.2\nĠ Ġ\n")
    if added:
        files["added_tokens"] = {name: len(names) + n for name, n in added.items()}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def ids_of(folder: Path) -> list[int]:
    tokenizer = Tokenizer.load(folder)
    (folder / "t.jinja").write_text(EOS)
    template = find_chat_template(folder, tokenizer, str(folder / "t.jinja"))
    assert template is not None
    (found,) = encode([Conversation(TALK)], tokenizer, template)
    if isinstance(found, ChatError):
        raise found
    return found.ids.tolist()


END, OTHER = "<|endoftext|>", "<|end|>"
GPT2, ADDED = {"model_type": "gpt2"}, {"added_tokens_decoder": {}}
FOLDERS: dict[str, dict[str, Any]] = {
    "class alone": {"config": GPT2, "tokenizer_config": {"model_max_length": 64}},
    "named class": {
        "config": {"model_type": "llama"},
        "tokenizer_config": {"tokenizer_class": "GPT2Tokenizer"},
    },
    "map": {"config": GPT2, "special_tokens_map": {"eos_token": {"content": OTHER, "lstrip": False}}},
    "map before settings": {
        "config": GPT2,
        "special_tokens_map": {"eos_token": OTHER},
        "tokenizer_config": {"eos_token": END},
    },
    "settings with added tokens before the map": {
        "config": GPT2,
        "special_tokens_map": {"eos_token": OTHER},
        "tokenizer_config": {**ADDED, "eos_token": END},
    },
}


@pytest.mark.parametrize("form", FOLDERS)
def test_end_of_a_turn_is_the_token_of_transformers(tmp_path: Path, form: str) -> None:
    folder = write_gpt2(tmp_path, END, OTHER, **FOLDERS[form])
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    assert ids_of(folder) == theirs.apply_chat_template(TALK, chat_template=EOS, return_dict=False)


@pytest.mark.parametrize("use", ["{{ eos_token }}", "{{ 'a' + eos_token }}", "{{ 'a' ~ eos_token }}"])
def test_template_that_uses_a_token_that_the_tokenizer_lacks_names_it(use: str) -> None:
    template = ChatTemplate(use, {"bos_token": "<s>"})
    with pytest.raises(ChatError, match="it uses eos_token, which the tokenizer lacks"):
        template.render(TALK)
    assert ChatTemplate("{% if eos_token is defined %}x{% endif %}{{ b }}", {}).render(TALK).text == ""


FLAGS = {"lstrip": False, "rstrip": False, "single_word": False}


@pytest.mark.parametrize("has_decoder", [False, True])
def test_added_tokens_are_found_in_texts_as_in_transformers(tmp_path: Path, has_decoder: bool) -> None:
    """White space of phi-2 and CodeGen: no special tokens; a named one is, and stays text in a text."""
    size = len(ALPHABET) + 2
    decoder = {
        str(size - 1): {"content": END, "special": True, "normalized": False, **FLAGS},
        str(size): {"content": "   ", "special": False, "normalized": True, **FLAGS},
        str(size + 1): {"content": "\t\t", "special": False, "normalized": False, **FLAGS},
    }
    folder = write_gpt2(
        tmp_path,
        END,
        added={"   ": 0, "\t\t": 1},
        config={"model_type": "codegen"},
        tokenizer_config={"added_tokens_decoder": decoder} if has_decoder else {},
    )
    theirs, ours = transformers.AutoTokenizer.from_pretrained(str(folder)), Tokenizer.load(folder)
    for text in ("a   b", "if x:\n      y\t\tz", "  a"):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert ours.special_names == (END,)


def write_words(folder: Path, *special: str) -> Path:
    backend = Backend(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    backend.add_special_tokens([AddedToken(name, special=True) for name in special])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return folder


def test_gemma_ends_documents_with_its_eos(tmp_path: Path) -> None:
    folder = write_words(tmp_path, "<bos>", "<eos>", "<end_of_turn>")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GemmaTokenizer"}')
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.bos_id is not None
    assert [tokenizer.name_of(id) for id in (tokenizer.eod_id, tokenizer.bos_id)] == ["<eos>", "<bos>"]


def test_an_end_of_no_known_name_is_the_declared_one(tmp_path: Path) -> None:
    folder = write_words(tmp_path, "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<｜end▁of▁sentence｜>"}')
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.name_of(tokenizer.eod_id) == "<｜end▁of▁sentence｜>"


def test_unknown_end_of_documents_is_named_by_eod(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_words(tmp_path / "in", "<start_of_turn>", "<end_of_turn>")
    with pytest.raises(UserError, match=r"no end-of-document token: set eod=<end_of_turn>, or add"):
        Tokenizer.load(folder)
    words = ["data", "tokenizer", f"input={folder}", f"out={tmp_path / 'out'}"]
    assert main(words) == 2
    for _ in range(2):  # what is there already is known for the same
        assert main([*words, "eod=<end_of_turn>"]) == 0
    capsys.readouterr()
