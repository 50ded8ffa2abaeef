"""The end-of-document token of a run that keeps documents apart."""

from dataclasses import replace
from pathlib import Path

from mlm.data.blend_checks import entry
from mlm.data.config import DataConfig
from mlm.data.files_present import training_prefix
from mlm.data.receipt import RECEIPT, read_receipt
from mlm.data.tokenizer import Tokenizer
from mlm.training.config import PretrainConfig
from mlm.util.errors import UserError

SWITCHES = ("reset_positions", "reset_attention", "mask_eod_loss")


def document_problems(config: PretrainConfig) -> list[str]:
    """Problem of finding the ends of documents, at most one line; read before any rank starts."""
    try:
        eod_id, size = with_eod(config.data).eod_id, config.model.vocab_size
    except UserError as error:
        return list(error.problems)
    if eod_id is None or eod_id < size:
        return []
    return [
        f"data.eod_id={eod_id} is no token of model.vocab_size={size}: set data.eod_id to the id of the "
        f"end-of-document token, or model.vocab_size={eod_id + 1} or more"
    ]


def with_eod(data: DataConfig) -> DataConfig:
    """Settings with data.eod_id filled in, where one of the three switches needs it.

    Raises UserError as `find_eod` does.
    """
    switch = next((switch for switch in SWITCHES if getattr(data, switch)), None)
    return data if switch is None else replace(data, eod_id=find_eod(data, switch))


def find_eod(data: DataConfig, switch: str) -> int:
    """Id of the end-of-document token by the corpora's receipts, else data.eod_id, else their tokenizer.

    Raises UserError, which names `switch`, where these contradict each other, where a corpus was written
    without ends, and where nothing says it; CorruptFileError for a damaged receipt or tokenizer.
    """
    eod_id, source = data.eod_id, "data.eod_id"
    folders = corpus_folders(data)
    for folder in folders:
        receipt = read_receipt(folder) or {}
        if receipt.get("append_eod") is False:
            raise UserError(
                f"data.{switch}=true, and the documents in {folder} were written without an end-of-document "
                f"token: build them with append_eod=true, or set data.{switch}=false"
            )
        found, said_by = receipt.get("eod_id"), str(folder / RECEIPT)
        if type(found) is not int or found < 0:
            continue
        if eod_id is not None and found != eod_id:
            remedy = "build with one tokenizer" if data.eod_id is None else "leave data.eod_id out"
            raise UserError(
                f"{source}: end-of-document token {eod_id}, but {said_by} records {found}: "
                f"{remedy}, or set data.{switch}=false"
            )
        eod_id, source = found, said_by
    if eod_id is not None:
        return eod_id
    if data.tokenizer is not None:
        return Tokenizer.load(data.tokenizer).eod_id
    for folder in folders:
        if (folder / "tokenizer.json").is_file():
            return Tokenizer.load(folder).eod_id
    raise UserError(
        f"data.{switch}=true needs the id of the end-of-document token, and no {RECEIPT} or tokenizer.json "
        "of a corpus records it: set data.eod_id=… or data.tokenizer=…"
    )


def recorded_eod(data: DataConfig) -> int | None:
    """Id of the end-of-document token by data.eod_id, else by the first receipt that records it."""
    if data.eod_id is not None:
        return data.eod_id
    found = ((read_receipt(folder) or {}).get("eod_id") for folder in corpus_folders(data))
    return next((eod_id for eod_id in found if type(eod_id) is int), None)


def corpus_folders(data: DataConfig) -> list[Path]:
    """Folders of the training corpora, each with a receipt if `mlm data build` wrote it."""
    if data.kind != "indexed":
        return []
    if data.blend:
        return [entry(text).prefix.parent for text in data.blend]
    if data.train is not None:
        return [Path(data.train).parent]
    return [training_prefix(data.path).parent] if data.path is not None else []
