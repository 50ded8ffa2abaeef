"""Chat templates of trained models, and the tokens that end an answer."""

from pathlib import Path
from typing import Any

from mlm.data.chat_template import ChatError, ChatTemplate
from mlm.data.conversation import ASSISTANT
from mlm.data.tokenizer import GENERATION_CONFIG, Tokenizer, ids_of, read_config
from mlm.errors import UserError
from mlm.inference.trained import is_model_folder, run_directory

PROBE = "answer"


def load_chat_template(
    file: str | None, tokenizer_path: str | None, path: Path, tokenizer: Tokenizer, *, key: str
) -> ChatTemplate:
    """Return the template in `file`, else that of the named tokenizer, else of the checkpoint or model.

    Raises UserError if there is none, CorruptFileError.
    """
    folders = [path if is_model_folder(path) else run_directory(path)]
    if tokenizer_path is not None:
        named = Path(tokenizer_path)
        folders.insert(0, named if named.is_dir() else named.parent)
    for folder in folders:
        if (found := ChatTemplate.find(folder, tokenizer, file)) is not None:
            return found
    raise UserError(
        f"{key}=null: {folders[0]} holds no chat template (chat_template.jinja, or in tokenizer_config.json)"
        f": set {key}=FILE.jinja"
    )


def turn_ends(template: ChatTemplate, tokenizer: Tokenizer, path: Path) -> frozenset[int]:
    """Return the tokens that end an answer.

    These are the end of a document, the special token that the template writes after an answer, and those
    that a model folder's generation_config.json names.
    """
    ends = {tokenizer.eod_id}
    question: list[dict[str, Any]] = [{"role": "user", "content": "question"}]
    try:
        text = template.render([*question, {"role": ASSISTANT, "content": PROBE}]).text
    except ChatError:
        text = ""  # reported where a conversation is rendered
    after = tokenizer.encode_special(text.rpartition(PROBE)[2]) if PROBE in text else []
    ends |= set([id for id in after if id in tokenizer.special_ids][:1])
    if is_model_folder(path):
        settings = read_config(path / GENERATION_CONFIG)
        ends |= {id for id in ids_of(settings.get("eos_token_id")) if id < tokenizer.vocab_size}
    return frozenset(ends)
