"""History of the corpora that a run has read: segments of the run, each with one blend.

Checkpoints hold it, so that a run resumed with other weights or corpora continues in each corpus where it
stopped. A corpus is identified by its content, not its path.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import Any

import xxhash

from mlm.data.blend import MAX_SAMPLES, samples_per_source
from mlm.data.blend_checks import MAX_SOURCES
from mlm.util.files import DIGEST, whole_number

SAME_SHARE = 1e-9  # weights written as 3, 7 and as 0.3, 0.7 differ in the last bits


@dataclass(frozen=True, kw_only=True)
class BlendSource:
    """A corpus of a blend. Digests are `xxh3:<hex>`, empty where unknown."""

    name: str
    """Name in logs."""
    path: str
    """Prefix of its .bin/.idx, as in the settings."""
    digest: str
    """Digest of the .idx, which determines the order of samples."""
    tokens: str = ""
    """Digest of the .bin, by its receipt."""
    sampled: str = ""
    """Digest of samples of the .bin (`files.sampled_digest`)."""
    receipt: str = ""
    """Digest of the receipt, corpus.json."""
    recipe: str = ""
    """Digest of the cleaning settings in the receipt."""
    tokenizer: str = ""
    """Digest of the tokenizer, by its receipt."""
    weight: float = 1.0
    """Share of the samples; a blend's shares sum to 1."""
    first: int = 0
    """Samples of it that were read before the segment."""
    order: int = 0
    """Rule of its sample order. 0: shuffled by the seed of the run, like a single corpus; 1: by a seed
    derived from its digest."""

    def is_same(self, other: "BlendSource") -> bool:
        pairs = ((self.tokens, other.tokens), (self.sampled, other.sampled))
        return self.digest == other.digest and all(not (a and b) or a == b for a, b in pairs)


@dataclass(frozen=True)
class Segment:
    """A blend, and the sample of the run it begins with."""

    from_sample: int
    sources: tuple[BlendSource, ...]


BlendSegments = tuple[Segment, ...]


def continue_history(history: BlendSegments, blend: Sequence[BlendSource], consumed: int) -> BlendSegments:
    """Return the history of a run that has read `consumed` samples and continues with `blend`.

    An equal blend continues its segment; another begins a new one, each corpus where the run stopped in it.
    """
    while history and history[-1].from_sample == consumed:  # segments without a sample
        history = history[:-1]
    previous = history[-1].sources if history else ()
    is_same = len(previous) == len(blend) and all(
        a.is_same(b) and math.isclose(a.weight, b.weight, rel_tol=SAME_SHARE)
        for a, b in zip(previous, blend, strict=True)
    )
    if history and is_same:
        # Paths may have changed; weights keep their exact bits.
        continued = [
            replace(s, weight=old.weight, first=old.first, order=old.order)
            for s, old in zip(blend, previous, strict=True)
        ]
        return (*history[:-1], Segment(history[-1].from_sample, tuple(continued)))
    new_sources = list[BlendSource]()
    for source in blend:
        # A corpus that was read before keeps its sample order.
        earlier = (old for segment in reversed(history) for old in segment.sources if old.is_same(source))
        order = next((old.order for old in earlier), source.order)
        new_sources.append(replace(source, first=samples_read(history, source, consumed), order=order))
    return (*history, Segment(consumed, tuple(new_sources)))


def samples_read(history: BlendSegments, source: BlendSource, consumed: int) -> int:
    """Count the samples of a corpus that a run has read after `consumed` in all."""
    end = consumed
    for segment in reversed(history):
        for i, earlier in enumerate(segment.sources):
            if earlier.is_same(source):
                weights = [s.weight for s in segment.sources]
                return earlier.first + int(samples_per_source(weights, end - segment.from_sample)[i])
        end = segment.from_sample
    return 0


def seed_of(source: BlendSource, seed: int) -> int:
    if source.order == 0:
        return seed
    digest = xxhash.xxh3_64_intdigest(f"{seed} {source.digest} {source.tokens}".encode())
    return digest >> 1  # 63 bits, which every generator accepts


def samples_needed(segment: Segment, num_samples: int) -> list[int]:
    """Count the samples of each source in a run's first `num_samples`, all blends together."""
    weights = [s.weight for s in segment.sources]
    counts = samples_per_source(weights, max(0, num_samples - segment.from_sample))
    return [s.first + count for s, count in zip(segment.sources, counts.tolist(), strict=True)]


def changed_corpus_problem(history: BlendSegments, blend: Sequence[BlendSource]) -> str | None:
    """Return the problem of a new corpus at the path of one that the run has read, or None.

    Continuing with it would silently repeat and skip samples.
    """
    earlier_sources = [source for segment in reversed(history) for source in segment.sources]
    for source in blend:
        if any(old.is_same(source) for old in earlier_sources):
            continue
        path = os.path.realpath(source.path)
        old = next((old for old in earlier_sources if os.path.realpath(old.path) == path), None)
        if old is not None:
            suffix = "idx" if old.digest != source.digest else "bin"
            return (
                f"{source.path}.{suffix} is not what this run was trained on: restore that corpus, or rename "
                "this one's folder to continue with it as a new corpus"
            )
    return None


def describe_change(history: BlendSegments, consumed: int) -> str | None:
    """Describe the changes of the newest segment in a line; None without any."""
    if len(history) < 2 or history[-1].from_sample != consumed:
        return None
    previous, current = history[-2].sources, history[-1].sources
    parts = []
    for source in current:
        earlier = next((s for s in previous if s.is_same(source)), None)
        share = f"{source.name} {source.weight:.2%}"
        if earlier is not None and math.isclose(earlier.weight, source.weight, rel_tol=SAME_SHARE):
            parts.append(share)
        elif earlier is not None:
            parts.append(f"{share} (was {earlier.weight:.2%})")
        else:
            parts.append(f"{share} ({f'back, after {source.first:,}' if source.first else 'new'})")
    removed = [s.name for s in previous if not any(s.is_same(source) for source in current)]
    suffix = f"; without {', '.join(removed)}" if removed else ""
    return f"data changed at sample {consumed:,}: {', '.join(parts)}{suffix}"


def trained_on(history: BlendSegments) -> list[dict[str, Any]]:
    """Return the corpora of the newest blend as JSON, for records and scores; empty for synthetic data."""
    keys = ("name", "weight", "digest", "receipt")
    return [{key: asdict(source)[key] or None for key in keys} for s in history[-1:] for source in s.sources]


def encode(history: BlendSegments) -> list[dict[str, Any]]:
    return [{"from_sample": s.from_sample, "sources": [asdict(c) for c in s.sources]} for s in history]


def decode(saved: Any, consumed: int) -> BlendSegments:
    """Parse a saved history of a run that has read `consumed` samples.

    Raises ValueError, KeyError or TypeError for anything else.
    """
    if not isinstance(saved, list) or len(saved) > 1000:
        raise ValueError("its segments are not a list, or too many")
    segments = list[Segment]()
    for segment in saved:
        sources = segment["sources"]
        if not isinstance(sources, list) or not 0 < len(sources) <= MAX_SOURCES:
            raise ValueError("the sources of a segment are not a list, or too many")
        for source in sources:
            for name in ("name", "path"):
                text = source[name]
                if (
                    not isinstance(text, str) or not text.isprintable() or len(text) > 4096
                ):  # they are printed
                    raise ValueError(f"{name} is not allowed")
            for name in ("digest", "tokens", "sampled", "receipt", "recipe", "tokenizer"):
                if known_digest(source[name]) != source[name]:
                    raise ValueError(f"{name} is not a digest")
            if type(source["weight"]) is not float or not 0 < source["weight"] <= 1:
                raise ValueError("a weight is out of range")
            whole_number(source["first"], MAX_SAMPLES)
            whole_number(source["order"], 1)
        names = [field.name for field in fields(BlendSource)]
        decoded = tuple(BlendSource(**{name: source[name] for name in names}) for source in sources)
        if not math.isclose(math.fsum(s.weight for s in decoded), 1.0, rel_tol=SAME_SHARE):
            raise ValueError("the weights of a segment do not sum to 1")
        segments.append(Segment(whole_number(segment["from_sample"], MAX_SAMPLES), decoded))
    edges = [*(segment.from_sample for segment in segments), consumed + 1]
    if segments and (edges[0] != 0 or any(a >= b for a, b in pairwise(edges))):
        raise ValueError(f"its segments do not lead from sample 0 to {consumed}")
    return tuple(segments)


def known_digest(value: Any) -> str:
    """Return a value that is a digest, else ""."""
    return value if isinstance(value, str) and DIGEST.fullmatch(value) else ""
