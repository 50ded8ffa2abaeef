"""No text becomes a special token; special tokens by name, of folders with little beside a vocabulary."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from mlm.cli import main
from mlm.data.chat_template import ChatError, ChatTemplate
from mlm.data.conversation import Conversation
from mlm.data.indexed import IndexedDataset
from mlm.data.receipt import file_entry
from mlm.data.tokenizer import Tokenizer
from mlm.util.errors import UserError
from tests.data.chats import tokens_of

LETTERS = "▁abcehtdofxnSEPCLKIM<>|/_[]s ."
TEXTS = ["a cat sat on the mat.", "  two  spaces ", "bed [x] <b> ", "</ s> <|end", "", "unknown: é漢"]


def unigram(*, special: bool | None = None, name: str = "</s>") -> Backend:
    """Pieces for every letter and for the name; `special`: whether it is an added token too."""
    pieces = [("<unk>", 0.0), (name, -0.5), ("▁cat", -1.0), *((letter, -3.0) for letter in LETTERS)]
    backend = Backend(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    if special is not None:
        backend.add_tokens([AddedToken(name, special=special, normalized=False)])
    return backend


def bpe(*merges: tuple[str, str], ignore_merges: bool = False, added: bool | None = None) -> Backend:
    """Letters and merges; `added`: whether the end of a document is an added token, and special."""
    joined = ["".join(pair) for pair in merges]
    vocabulary = {name: id for id, name in enumerate(dict.fromkeys([*LETTERS, *joined, "<s>"]))}
    model = models.BPE(vocabulary, list(merges), ignore_merges=ignore_merges, unk_token=None)
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+|\S+"), "isolated")
    if added is not None:
        backend.add_tokens([AddedToken("</s>", special=added, normalized=False)])
        backend.add_tokens([AddedToken("<|user|>", special=False, normalized=False)])
    return backend


def words(kind: type[Any]) -> Backend:
    names = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", "cat", "a", "##t", "<b>"]
    backend = Backend(kind({name: id for id, name in enumerate(names)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


SPELT = (("<", "/"), ("</", "s"), ("</s", ">"))
KINDS: dict[str, Callable[[], Backend]] = {
    "unigram": unigram,
    "unigram, GPT-2's name": lambda: unigram(special=False, name="<|endoftext|>"),
    "merges that spell it": lambda: bpe(*SPELT),
    "whole words before merges": lambda: bpe(*SPELT, ignore_merges=True),
    "added as an ordinary token": lambda: bpe(("a", "t"), added=False),
    "added as a special token": lambda: bpe(("a", "t"), added=True),
    "word pieces": lambda: words(models.WordPiece),
    "words": lambda: words(models.WordLevel),
}


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_written_in_a_text_are_text(kind: str) -> None:
    tokenizer = Tokenizer(KINDS[kind]().to_str())
    ids = {tokenizer.eod_id, tokenizer.bos_id, tokenizer.sep_id, tokenizer.cls_id, tokenizer.mask_id} - {None}
    names = [name for name, id in tokenizer._vocabulary.items() if id in ids]
    texts = [text for n in names for text in (n, f"a {n} cat", f"a{n}b", f"{n}{n}", f" {n}\n", f"{n}x")]
    assert texts
    found = [tokenizer.encode(text) for text in texts]
    assert [text for text, one in zip(texts, found, strict=True) if ids & set(one)] == []
    assert [list(one) for one in tokenizer.encode_batch(texts)] == found
    assert [one.tolist() for one, _ in tokenizer.encode_with_offsets(texts)] == found


@pytest.mark.parametrize("kind", KINDS)
def test_ordinary_text_is_encoded_as_by_the_library(kind: str) -> None:
    backend = KINDS[kind]()
    tokenizer = Tokenizer(backend.to_str())
    for text in TEXTS:
        assert tokenizer.encode(text) == backend.encode(text, add_special_tokens=False).ids, text


def test_added_tokens_that_are_not_special_stay_tokens() -> None:
    tokenizer = Tokenizer(KINDS["added as an ordinary token"]().to_str())
    ids = tokenizer.encode("a <|user|> </s>")
    assert tokenizer._vocabulary["<|user|>"] in ids
    assert tokenizer.eod_id not in ids
    assert tokenizer.decode([tokenizer.eod_id]) == "</s>"


def test_a_built_corpus_holds_one_end_for_each_document_and_verify_counts_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of documents that hold the end of a document as text, by a Unigram tokenizer."""
    (tmp_path / "tokenizer.json").write_text(unigram(special=False).to_str())
    rows = [{"text": f"a cat </s> and </s></s> {n}"} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    built = tmp_path / "corpus"
    words = [f"input={tmp_path / 'rows.jsonl'}", f"tokenizer={tmp_path / 'tokenizer.json'}", f"out={built}"]
    assert main(["data", "build", *words, "split=1/0/0", "recipe=plain", "workers=1"]) == 0
    receipt = json.loads((built / "corpus.json").read_text())
    corpus = IndexedDataset(built / "train")
    assert receipt["splits"]["train"]["end_tokens"] == corpus.num_documents == 6
    assert (corpus.tokens == receipt["eod_id"]).sum() == 6
    assert main(["data", "verify", str(built)]) == 0
    # one more end, in a file that is otherwise as it is listed
    tokens = bytearray((built / "train.bin").read_bytes())
    tokens[0:2] = receipt["eod_id"].to_bytes(2, "little")
    (built / "train.bin").write_bytes(tokens)
    receipt["files"]["train.bin"] = file_entry(built / "train.bin")
    (built / "corpus.json").write_text(json.dumps(receipt))
    assert main(["data", "verify", str(built)]) == 1
    assert "7 end_tokens, corpus.json records 6" in capsys.readouterr().err
    # of another size it is not read: 16 GiB without content would take minutes
    with open(built / "train.bin", "r+b") as f:
        f.truncate(1 << 34)
    assert main(["data", "verify", str(built)]) == 1
    assert "train.bin" in capsys.readouterr().err


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


END, OTHER = "<|endoftext|>", "<|end|>"
GPT2, ADDED = {"model_type": "gpt2"}, {"added_tokens_decoder": {}}
FOLDERS: dict[str, dict[str, Any]] = {
    "class alone": {"config": GPT2, "tokenizer_config": {"model_max_length": 64}},
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
    (folder / "t.jinja").write_text(EOS)
    found = tokens_of(folder, Conversation(TALK), str(folder / "t.jinja"))
    assert found.ids.tolist() == theirs.apply_chat_template(TALK, chat_template=EOS, return_dict=False)


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
