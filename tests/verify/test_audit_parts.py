"""Parts of tensors that fewer groups than ranks hold: of key and value heads, of which there are fewer."""

import torch

from mlm import Replicated, Split
from mlm.verify.audit.compare import placement_of
from mlm.verify.audit.parts import Parts, match_at
from mlm.verify.audit.record import Record

LAYOUT = {"pp": 1, "dp": 1, "cp": 1, "tp": 4}
WHOLE = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))  # two heads of three rows
PARTS: Parts = {(0, 0, rank): WHOLE.chunk(2)[rank // 2] for rank in range(4)}


def records(splits: tuple[Split, ...] | None) -> dict[tuple[int, ...], Record]:
    return {(0, *at): Record(splits={"k": splits}) for at in PARTS}


def test_shapes_show_groups_of_ranks_that_hold_the_same() -> None:
    placement = placement_of("k", PARTS, WHOLE, records(None), LAYOUT)
    assert placement == {"tp": Split(0, groups=2)}
    assert match_at(placement, PARTS, WHOLE).error == 0.0


def test_copies_are_those_of_a_group() -> None:
    match = match_at({"tp": Split(0, groups=2)}, PARTS, WHOLE)
    assert [sorted(group) for group in match.copies("tp")] == [[(0, 0, 0), (0, 0, 1)], [(0, 0, 2), (0, 0, 3)]]


def test_gradients_of_a_group_are_addends() -> None:
    addends = {at: part * (0.25 if at[-1] % 2 else 0.75) for at, part in PARTS.items()}
    match = match_at({"tp": Split(0, groups=2, is_sum=True)}, addends, WHOLE)
    assert match.error < 1e-12


def test_as_many_groups_as_ranks_are_a_split() -> None:
    """So that one line of placements= is right at each tp."""
    halves: Parts = {(0, 0, rank): WHOLE.chunk(2)[rank] for rank in range(2)}
    for groups in (2, 4):
        declared = Replicated(groups=groups)
        splits = (Split(declared.dim, declared.axis, groups=declared.groups),)
        ranks = {(0, *at): Record(splits={"k": splits}) for at in halves}
        assert placement_of("k", halves, WHOLE, ranks, LAYOUT | {"tp": 2}) == {"tp": Split(0)}
