"""Chat templates of trained models, and the tokens that end an answer."""

from pathlib import Path
from typing import Any

from mlm.checkpoint.native.save_load import resolve
from mlm.data.chat_builtin import BUILT_IN, TURNS
from mlm.data.chat_files import find_chat_template, find_template
from mlm.data.chat_template import ChatError, ChatTemplate
from mlm.data.conversation import ASSISTANT
from mlm.data.tokenizer import Tokenizer
from mlm.inference.trained import is_model_folder, run_directory
from mlm.util.errors import Absent, ConfigError, Problem

PROBE = "answer"


def load_chat_template(
    file: str | None, tokenizer_path: str | None, path: Path, tokenizer: Tokenizer, *, key: str
) -> ChatTemplate:
    """Return the template in `file`, else that of the named tokenizer, else of the checkpoint or model.

    Raises UserError if there is none, CorruptFileError.
    """
    if file in (None, TURNS) and (problem := template_problem(tokenizer_path, path, key=key)):
        raise ConfigError([problem])
    folders = template_folders(tokenizer_path, path)
    templates = (find_chat_template(folder, tokenizer, file) for folder in folders)
    return next(template for template in templates if template is not None)


def template_folders(tokenizer_path: str | None, path: Path) -> list[Path]:
    """Return the folders that may hold a template: that of the named tokenizer, and the model's."""
    folders = [path if is_model_folder(path) else run_directory(resolve(path))]
    if tokenizer_path is not None:
        named = Path(tokenizer_path)
        folders.insert(0, named if named.is_dir() else named.parent)
    return folders


def template_problem(tokenizer_path: str | None, path: Path, *, key: str) -> Problem | None:
    """Return the problem of a model without a chat template. Raises UserError, CorruptFileError."""
    folders = template_folders(tokenizer_path, path)
    if any(map(find_template, folders)):
        return None
    why = f"{folders[0]} holds no chat template (chat_template.jinja, or in tokenizer_config.json)"
    return Absent.at(key, None, why, f"set {key}={' or '.join(BUILT_IN)}, or to a FILE.jinja")


def end_of_turn_tokens(template: ChatTemplate, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that end an answer: `end_ids`, and what the template writes after an answer."""
    question: list[dict[str, Any]] = [{"role": "user", "content": "question"}]
    try:
        text = template.render([*question, {"role": ASSISTANT, "content": PROBE}]).text
    except ChatError:
        text = ""  # reported where a conversation is rendered
    after = tokenizer.encode_special(text.rpartition(PROBE)[2]) if PROBE in text else []
    return tokenizer.end_ids | set([id for id in after if id in tokenizer.special_ids][:1])
