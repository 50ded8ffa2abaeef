"""Corpora of a run spec, one or a blend, and their end-of-document token."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlm.config.imports import OwnCodeError, imported
from mlm.data.blend import BlendedDataset
from mlm.data.blend_checks import corpus_names, normalize_weights, parse_entry
from mlm.data.blend_history import (
    BlendSegments,
    BlendSource,
    continue_history,
    known_digest,
    samples_needed,
    seed_of,
)
from mlm.data.config import SOURCES, DataConfig
from mlm.data.files_present import pair_prefix, training_prefix
from mlm.data.indexed import IndexedDataset, bin_path, idx_path
from mlm.data.receipt import RECEIPT, check_corpus, read_receipt
from mlm.data.sampler import CheckedDataset, Dataset
from mlm.data.stored_corpus import stored_tokens
from mlm.data.tokenizer import Tokenizer
from mlm.models.family import family_of
from mlm.runs.config import PretrainConfig
from mlm.util.errors import UserError
from mlm.util.files import digest_bytes, digest_file, sampled_digest

SWITCHES = ("reset_positions", "reset_attention", "mask_eod_loss")
"""Settings that keep documents apart."""


@dataclass(frozen=True)
class Corpus:
    name: str
    """Name in logs."""
    train: Path
    """Prefix of its training .bin/.idx."""
    validation: Path | None
    """Prefix of its validation set, if it has one."""
    weight: float | None
    """Weight as typed; None weighs the corpus by its tokens."""
    tokenizer: Path | None
    """Its tokenizer.json, if it has one."""


@dataclass(frozen=True)
class ValidationSet:
    name: str
    """Name of its corpus; empty if there is only one."""
    windows: Dataset
    weight: float
    """Weight of its loss in the loss of the blend."""


def corpora(data: DataConfig) -> list[Corpus]:
    """Corpora of data.blend in order, or the only one; empty for synthetic data."""
    if data.kind != "indexed":
        return []
    if not data.blend:
        prefix = training_prefix(data) if data.train is None else pair_prefix(data, "data.train", data.train)
        return [
            Corpus(corpus_names([prefix])[0], prefix, validation_prefix(data), None, tokenizer_path(data))
        ]
    entries = [parse_entry(text) for text in data.blend]
    prefixes = [training_prefix(data, entry.path) for entry in entries]
    return [
        Corpus(name, prefix, _validation_part(prefix), entry.weight, _tokenizer_of(prefix))
        for name, prefix, entry in zip(corpus_names(prefixes), prefixes, entries, strict=True)
    ]


def validation_prefix(data: DataConfig) -> Path | None:
    """Prefix of data.validation, or the validation part of data.path; None without one."""
    if data.validation is not None:
        return pair_prefix(data, "data.validation", data.validation)
    return _validation_part(training_prefix(data)) if data.path is not None else None


def tokenizer_path(data: DataConfig) -> Path | None:
    """tokenizer.json of the corpus, or the first one in a blend; None without any."""
    if data.tokenizer is not None:
        return Path(data.tokenizer)
    if data.blend and data.kind == "indexed":
        return next((corpus.tokenizer for corpus in corpora(data) if corpus.tokenizer is not None), None)
    return _tokenizer_of(training_prefix(data)) if data.path is not None else None


def _validation_part(train: Path) -> Path | None:
    prefix = train.with_name("validation")
    return prefix if train.name == "train" and idx_path(prefix).exists() else None


def _tokenizer_of(train: Path) -> Path | None:
    path = train.with_name("tokenizer.json")
    return path if path.exists() else None


def corpus_problems(config: PretrainConfig) -> list[str]:
    problems, blend = [], corpora(config.data)
    vocab_size, seq_length = config.model.vocab_size, config.data.seq_length
    family, tokenizer = family_of(config.model.kind), tokenizer_path(config.data)
    # A small corpus in a blend may take several epochs per step.
    least = 1 if config.data.blend else config.train.global_batch_size
    for corpus in blend:
        problems += check_corpus(
            corpus.train, vocab_size=vocab_size, seq_length=seq_length, min_samples=least
        )
    if config.train.validate_every:
        for prefix in validation_prefixes(config.data).values():
            problems += check_corpus(prefix, vocab_size=vocab_size, seq_length=1, min_samples=1)
    problems = problems or problems_between(blend)
    try:
        eod_id = fill_eod_id(config.data).eod_id
        if eod_id is not None and eod_id >= vocab_size:
            fix = "set data.eod_id to one"
            problems.append(f"data.eod_id={eod_id} is not a token of model.vocab_size={vocab_size}; {fix}")
    except UserError as error:
        problems += error.problems
    if blend:
        problems += family.corpus_problems(config.model, [corpus.train for corpus in blend], tokenizer)
    return problems


def problems_between(blend: Sequence[Corpus]) -> list[str]:
    """Problems of corpora that cannot be blended: copies, or different tokenizers."""
    problems, originals = list[str](), dict[str, Corpus]()
    sizes = [idx_path(corpus.train).stat().st_size for corpus in blend]
    for corpus, size in zip(blend, sizes, strict=True):
        if sizes.count(size) == 1:
            continue  # only indices of equal size can be copies
        source = corpus_source(corpus)
        other = originals.setdefault(f"{source.digest} {source.tokens}", corpus)
        if other is not corpus:
            copies = f"data.blend: {other.train} and {corpus.train} are copies of one corpus"
            problems.append(f"{copies}; name one of them, with the sum of the weights")
    made_with = {digest: corpus for corpus in blend if (digest := source_facts(corpus)["tokenizer"])}
    if len(made_with) > 1:
        writers = ", ".join(f"{corpus.train} by {digest}" for digest, corpus in made_with.items())
        problems.append(f"data.blend: written with different tokenizers: {writers}; build all with one")
    return problems


def corpus_source(corpus: Corpus, weight: float = 1.0) -> BlendSource:
    """Entry of a corpus in a checkpoint. Reads its full index, and samples its tokens."""
    tokens = bin_path(corpus.train)
    stored = stored_tokens(tokens)
    source = BlendSource(
        name=corpus.name,
        path=str(corpus.train) if stored is None else stored.source.url.removesuffix(".bin"),
        digest=digest_file(idx_path(corpus.train)),
        sampled=sampled_digest(tokens) if stored is None else stored.sampled_digest(),
        weight=weight,
    )
    return replace(source, **source_facts(corpus))


def source_facts(corpus: Corpus) -> dict[str, Any]:
    """Digests of the .bin, receipt, recipe and tokenizer from a corpus's receipt; "" where unknown."""
    receipt = read_receipt(corpus.train.parent) or {}
    entry_of_bin = receipt.get("files", {}).get(bin_path(corpus.train).name)
    if entry_of_bin is None:  # no receipt, or one of other files
        return {"tokens": "", "receipt": "", "recipe": "", "tokenizer": ""}
    recipe = receipt.get("recipe")
    return {
        "tokens": known_digest(entry_of_bin.get("digest")),
        "receipt": digest_file(corpus.train.with_name(RECEIPT)),
        "recipe": digest_bytes(json.dumps(recipe, sort_keys=True).encode()) if recipe else "",
        "tokenizer": known_digest(receipt.get("tokenizer")),
    }


def sources(data: DataConfig) -> tuple[BlendSource, ...]:
    """The corpora of a run with their shares. Reads the full indices. Raises UserError, OSError."""
    blend = corpora(data)
    if len(blend) < 2:
        return tuple(corpus_source(corpus) for corpus in blend)
    weights = [float(IndexedDataset(c.train).num_tokens) if c.weight is None else c.weight for c in blend]
    return tuple(
        replace(corpus_source(corpus, share), order=1)
        for corpus, share in zip(blend, normalize_weights(weights), strict=True)
    )


def train_dataset(config: PretrainConfig, num_samples: int, history: BlendSegments = ()) -> Dataset:
    """The training samples of the run up to number `num_samples`.

    They follow the newest segment of `history`; without one the run begins.
    """
    data = config.data
    if data.kind != "indexed":
        return dataset_without_corpus(config, num_samples, config.seed)
    segment = (history or continue_history((), sources(data), 0))[-1]
    datasets = [
        corpus_samples(config, corpus.train, count, seed_of(source, config.seed))
        for corpus, source, count in zip(
            corpora(data), segment.sources, samples_needed(segment, num_samples), strict=True
        )
    ]
    only = segment.sources[0]
    if len(datasets) == 1 and only.first == segment.from_sample:
        return datasets[0]  # one corpus from its first sample needs no blend
    return BlendedDataset(
        datasets,
        [source.weight for source in segment.sources],
        num_samples=num_samples,
        from_sample=segment.from_sample,
        first=[source.first for source in segment.sources],
    )


def dataset_without_corpus(
    config: PretrainConfig, num_samples: int, seed: int, *, validation: bool = False
) -> Dataset:
    """Return samples that are random, or of the user's dataset. Raises OwnCodeError (a UserError)."""
    data, vocab_size = config.data, config.model.vocab_size
    if data.kind == "synthetic":
        return family_of(config.model.kind).samples.synthetic(data, vocab_size, num_samples, seed)
    build = imported("data.kind", data.kind, SOURCES.shipped, Callable)
    dataset = build(data, vocab_size=vocab_size, num_samples=num_samples, seed=seed, validation=validation)
    if not (hasattr(dataset, "gather") and hasattr(dataset, "__len__")):
        returned = "returned " + ("None" if dataset is None else f"a {type(dataset).__name__}")
        raise OwnCodeError(f"data.kind={data.kind}: {returned}; return a Dataset (mlm/data/sampler.py)")
    noun = "validation sample" if validation else "sample"
    return CheckedDataset(dataset, data.kind, vocab_size, data.seq_length, noun)


def corpus_samples(config: PretrainConfig, prefix: Path, num_samples: int, seed: int) -> Dataset:
    data, tokenizer = config.data, samples_tokenizer(config)
    cache = Path(data.cache) if data.cache is not None else prefix.parent / "index-cache"
    samples = family_of(config.model.kind).samples
    return samples.train(data, prefix, tokenizer, num_samples, seed=seed, cache=cache)


def samples_tokenizer(config: PretrainConfig) -> Tokenizer | None:
    """Return the tokenizer that samples depend on; None if they need none, or there is none."""
    path = tokenizer_path(config.data)
    return Tokenizer.load(path) if path is not None and family_of(config.model.kind).check_tokenizer else None


def validation_prefixes(data: DataConfig) -> dict[str, Path]:
    """Prefix of each corpus's validation set by name; "" names the only set, or data.validation."""
    if data.kind != "indexed":
        return {}
    if data.validation is not None or not data.blend:
        prefix = validation_prefix(data)
        return {} if prefix is None else {"": prefix}
    return {c.name: c.validation for c in corpora(data) if c.validation is not None}


def validation_sets(config: PretrainConfig, history: BlendSegments = ()) -> list[ValidationSet]:
    """Validation sets; empty without any. Weights are the newest blend's."""
    data, samples = config.data, family_of(config.model.kind).samples
    if data.kind != "indexed":
        synthetic = dataset_without_corpus(config, 256, config.seed + 1, validation=True)
        return [ValidationSet("", synthetic, 1.0)]
    weights = {source.name: source.weight for source in history[-1].sources} if history else {}
    tokenizer = samples_tokenizer(config)
    return [
        ValidationSet(name, samples.validation(data, prefix, tokenizer), weights.get(name, 1.0))
        for name, prefix in validation_prefixes(data).items()
    ]


def fill_eod_id(data: DataConfig) -> DataConfig:
    """Fill in data.eod_id if one of SWITCHES needs it. Raises UserError as `find_eod`."""
    switch = next((switch for switch in SWITCHES if getattr(data, switch)), None)
    return data if switch is None else replace(data, eod_id=find_eod(data, switch))


def find_eod(data: DataConfig, switch: str) -> int:
    """Id of the end-of-document token from data.eod_id and the corpora's receipts, else from their tokenizer.

    Raises UserError, which names `switch`, if these differ, a corpus has no end-of-document tokens, or none
    records the id; CorruptFileError for a damaged receipt or tokenizer.
    """
    folders = corpus_folders(data)
    ids = {"data.eod_id": data.eod_id} if data.eod_id is not None else {}
    for folder in folders:
        receipt = read_receipt(folder) or {}
        if receipt.get("append_eod") is False:
            raise UserError(
                f"data.{switch}=true, and the documents in {folder} were written without an end-of-document "
                f"token: build them with append_eod=true, or set data.{switch}=false"
            )
        if type(eod_id := receipt.get("eod_id")) is int and eod_id >= 0:
            ids[str(folder / RECEIPT)] = eod_id
    if len(set(ids.values())) > 1:
        tokens = ", ".join(f"{eod_id} by {source}" for source, eod_id in ids.items())
        raise UserError(
            f"data.{switch}=true: the end-of-document token is {tokens}: build with one tokenizer, leave "
            f"data.eod_id out, or set data.{switch}=false"
        )
    if ids:
        return next(iter(ids.values()))
    tokenizer_folders = (folder for folder in folders if (folder / "tokenizer.json").is_file())
    if tokenizer := data.tokenizer or next(tokenizer_folders, None):
        return Tokenizer.load(tokenizer).eod_id
    raise UserError(
        f"data.{switch}=true needs the id of the end-of-document token, and no {RECEIPT} or tokenizer.json "
        "of a corpus records it: set data.eod_id=… or data.tokenizer=…"
    )


def recorded_special(data: DataConfig) -> tuple[int | None, int | None]:
    """Ids of the end-of-document token (data.eod_id wins) and the beginning one, from the first receipts."""
    receipts = [read_receipt(folder) or {} for folder in corpus_folders(data)]
    eod, bos = (
        next((id for receipt in receipts if type(id := receipt.get(key)) is int), None)
        for key in ("eod_id", "bos_id")
    )
    return (eod if data.eod_id is None else data.eod_id), bos


def corpus_folders(data: DataConfig) -> list[Path]:
    is_named = data.blend or data.train is not None or data.path is not None
    return [corpus.train.parent for corpus in corpora(data)] if is_named else []
