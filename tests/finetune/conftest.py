"""Models and rows, written once for each file of tests; a file adds its runs by a `folder` of its own."""

from pathlib import Path

import pytest

from tests.finetune.chats import write_chats, write_llama
from tests.finetune.runs import KINDS, MODELS, write_data, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained run of every model, `bert` to `experts`, and a folder of rows of every kind of task."""
    folder = tmp_path_factory.mktemp("finetune")
    for name, model in MODELS.items():
        write_model(folder / name, model)
    for kind in KINDS:
        write_data(folder / kind, kind)
    return folder


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of `transformers`: `llama`, `other` with other weights, `mixtral`; conversations in `chat`."""
    folder = tmp_path_factory.mktemp("chats")
    write_llama(folder / "llama")
    write_llama(folder / "other", seed=1)
    write_llama(folder / "mixtral", kind="Mixtral")
    write_chats(folder / "chat")
    return folder
