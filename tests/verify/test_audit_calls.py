"""Calls of modules of two replicas beside one process's: whose samples, how many of them, in which order."""

import torch
from torch import Tensor

from mlm.verify.audit.calls import match_calls
from mlm.verify.audit.record import Key, Record

LAYOUT = {"pp": 1, "dp": 2, "cp": 1, "tp": 1}
INPUTS = torch.randn(8, 3, 2, generator=torch.Generator().manual_seed(0))  # [N, S, H]
OUTPUTS = INPUTS.cumsum(1) ** 3  # [N, S, H]


def record(*micro_batches: tuple[Tensor, Tensor]) -> Record:
    """A module called with an input a micro-batch, and what it returned."""
    tensors = {}
    for micro, (x, y) in enumerate(micro_batches):
        tensors |= {
            Key(0, kind, "m", micro=micro): t
            for kind, t in (("input", x), ("output", y), ("backward", 2 * y))
        }
    return Record(tensors)


def run_samples(*micro_batches: list[int]) -> Record:
    return record(*((INPUTS[ids], OUTPUTS[ids]) for ids in micro_batches))


def matched(reference: Record, *replicas: Record) -> tuple[Record, list[Record], list[str]]:
    ranks = {(0, number, 0, 0): replica for number, replica in enumerate(replicas)}
    whole, parts, problems, _ = match_calls(reference, ranks, LAYOUT)
    return whole, list(parts.values()), problems


def test_other_micro_batches_become_the_samples_of_each_replica_sorted() -> None:
    replicas = run_samples([6], [3], [0], [5]), run_samples([1, 2], [7, 4])
    whole, parts, problems = matched(run_samples([0, 1, 2, 3], [4, 5, 6, 7]), *replicas)
    order = [0, 3, 5, 6, 1, 2, 4, 7]
    for kind, right in (("output", OUTPUTS), ("backward", 2 * OUTPUTS)):
        key = Key(0, kind, "m")
        assert torch.equal(whole.tensors[key], right[order])
        assert torch.equal(torch.cat([part.tensors[key] for part in parts]), right[order])
        assert key._replace(micro=1) not in whole.tensors
    assert not problems


def test_passes_before_those_of_the_step_are_left_out() -> None:
    """As stages infer shapes: later ones from memory as it is, the first from its first samples."""
    garbage, twice = (torch.full_like(INPUTS[:2], torch.nan),) * 2, (INPUTS[:2], OUTPUTS[:2] + 1)
    for extra in (garbage, twice):
        own = record(extra, (INPUTS[:2], OUTPUTS[:2]), (INPUTS[2:4], OUTPUTS[2:4]))
        whole, parts, _ = matched(run_samples([*range(8)]), own, run_samples([4, 5], [6, 7]))
        assert torch.equal(whole.tensors[Key(0, "output", "m")], OUTPUTS)
        assert torch.equal(parts[0].tensors[Key(0, "output", "m")], OUTPUTS[:4])


def test_wrong_outputs_are_matched_by_the_inputs() -> None:
    wrong = torch.zeros_like(OUTPUTS[4:])
    other = record((INPUTS[4:6], wrong[:2]), (INPUTS[6:], wrong[2:]))
    whole, parts, _ = matched(run_samples([*range(8)]), run_samples([0, 1], [2, 3]), other)
    assert torch.equal(whole.tensors[Key(0, "output", "m")], OUTPUTS)
    assert torch.equal(parts[1].tensors[Key(0, "output", "m")], wrong)


def test_gradients_are_compared_where_other_passes_have_none() -> None:
    """A frozen reference model reads the same samples after the policy, without gradients."""

    def passes(ids: list[int]) -> Record:
        both = record((INPUTS[ids], OUTPUTS[ids]), (INPUTS[ids], OUTPUTS[ids] + 1))
        del both.tensors[Key(0, "backward", "m", micro=1)]
        return both

    key = Key(0, "backward", "m")
    whole, parts, problems = matched(passes([*range(8)]), passes([0, 1, 2, 3]), passes([4, 5, 6, 7]))
    assert torch.equal(whole.tensors[key], 2 * OUTPUTS)
    assert torch.equal(torch.cat([part.tensors[key] for part in parts]), 2 * OUTPUTS)
    assert not problems


def test_sums_are_compared_where_samples_are_not_to_be_told_and_the_report_says_so() -> None:
    """Equal samples: which of them a replica has is nowhere to be seen."""
    x, y = INPUTS[:1].expand(8, 3, 2), OUTPUTS[:1].expand(8, 3, 2)
    one = [(a, b) for a, b in zip(x.split(1), y.split(1), strict=True)]
    whole, parts, problems = matched(record((x, y)), record(*one[:4]), record(*one[4:]))
    assert set(whole.tensors) == {Key(0, "output", "m")}
    for side in (whole, *parts):
        torch.testing.assert_close(side.tensors[Key(0, "output", "m")], y.sum((0, 1)))
    assert "their sums over a step are" in problems[0]


def test_what_is_the_same_in_each_micro_batch_is_compared_once() -> None:
    """Rotary angles [S, H]: their gradient adds up over micro-batches."""
    angles = INPUTS[0]
    reference, *replicas = (
        record(*((INPUTS[ids], angles) for ids in split))
        for split in ([[0, 1, 2, 3], [4, 5, 6, 7]], [[0], [1], [2], [3]], [[4], [5], [6], [7]])
    )
    whole, parts, _ = matched(reference, *replicas)
    assert torch.equal(whole.tensors[Key(0, "output", "m")], angles)
    assert torch.equal(parts[0].tensors[Key(0, "output", "m")], angles)
    assert torch.equal(parts[0].tensors[Key(0, "backward", "m")], 8 * angles)
