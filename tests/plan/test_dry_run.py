"""`mlm plan dry-run`: what one rank's real trainer counts equals the closed formulas of the papers.

s sequence, b micro-batch, h hidden, a heads, l layers, V padded vocabulary, B global batch, t = tp, d = dp.
"""

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from mlm.cli.compose.composition import load_config
from mlm.cli.plan import check_plan_dry_run
from mlm.parallel.mesh import ParallelContext, shape_context
from mlm.plan.config import PlanDryRunConfig
from mlm.plan.dry_run import flops_of, run
from mlm.plan.dry_run_memory import ACTIVATIONS, CASTS, GRADIENTS, STATE, TABLES, VOCABULARY, WEIGHTS
from mlm.plan.dry_run_meter import IN_ATTENTION
from mlm.plan.dry_run_rank import DryRun, batches_of, dry_run
from mlm.plan.layer_counts import counts_of
from mlm.plan.layout import PlannedLayout
from mlm.plan.memory import MemoryModel
from mlm.plan.trace import Message
from mlm.training.trainer import Trainer
from tests.slow import slow

S, B, H, A, L, V, BATCH = 128, 2, 64, 4, 2, 512, 8
TINY = (
    "model=gpt2_tiny",
    f"model.num_layers={L}",
    "model.hidden_dropout=0.1",
    "model.attention_dropout=0.1",
    "model.vocab_multiple=16",
    "precision=bf16",
    f"train.micro_batch_size={B}",
    f"train.global_batch_size={BATCH}",
)
CPU = torch.device("cpu")


def config_of(*overrides: str) -> PlanDryRunConfig:
    config: PlanDryRunConfig = load_config("plan_dry_run", [*TINY, *overrides])
    return config


@cache
def dry(layout: str, rank: int = 0) -> DryRun:
    return dry_run(config_of(*layout.split()), rank)


def messages(found: DryRun, axis: str) -> Counter[tuple[str, int]]:
    """(operation, bytes) over an axis, but for the scalars of loss and norm."""
    return Counter(
        {
            (m.operation, m.bytes): n
            for m, n in found.counts.messages.items()
            if m.axis == axis and m.bytes > 8
        }
    )


FULL = "recompute=full"
LAYOUTS = (
    f"{FULL} tp=2 pp=2 dp=2 sequence_parallel=true",
    slow(f"{FULL} pp=2 vp=2 dp=2 model.num_layers=4"),
    slow(f"{FULL} dp=2 zero=3"),
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flops_of_all_ranks_are_equation_3(layout: str) -> None:
    """96 B s l h² (1 + s/6h + V/16lh), arXiv:2104.04473, recomputation of layers counted."""
    config = config_of(*layout.split())
    p, dp, layers, total = config.parallel, config.parallel.dp or 1, config.model.num_layers, 0
    for stage in range(p.pp):
        found = flops_of(dry(layout, stage * p.tp * dp))
        total += (found["hardware"] - found[IN_ATTENTION]) * p.tp * dp
    exact = 96 * BATCH * S * layers * H**2 + 16 * BATCH * S**2 * layers * H + 6 * BATCH * S * H * V
    assert total == exact


def test_without_recomputation_model_and_hardware_differ_by_what_fused_attention_does_again() -> None:
    found = flops_of(dry("tp=2 dp=2"))
    assert found["recomputed"] == 0
    assert found["hardware"] - found["model"] == found[IN_ATTENTION]
    assert found[IN_ATTENTION] == 2 * BATCH // 2 * L * S**2 * H // 2  # q k^T of the layers, on half the heads


def test_a_layer_has_two_all_reduces_each_way() -> None:
    """arXiv:1909.08053, section 3; one more behind the layers (f of the loss), one of the embedding."""
    micro_batches, hidden = BATCH // 2 // B, 2 * S * B * H
    plain, again = messages(dry("tp=2 dp=2"), "tp"), messages(dry(f"{FULL} tp=2 dp=2"), "tp")
    assert plain["all-reduce", hidden] == micro_batches * (4 * L + 1)
    assert again["all-reduce", hidden] == micro_batches * (6 * L + 1)
    assert plain["all-reduce", 2 * hidden] == micro_batches  # float32
    assert set(plain) == {
        ("all-reduce", hidden),
        ("all-reduce", 2 * hidden),
        ("all-gather", 2 * 2 * 4 * S * B),
    }


def test_sequence_parallelism_gathers_and_scatters_in_their_place() -> None:
    """arXiv:2205.05198, section 4.2.2: as many bytes in a ring; backward gathers inputs again."""
    found = messages(dry("tp=4 sequence_parallel=true tp_overlap=1"), "tp")
    micro_batches, hidden = BATCH // B, 2 * S * B * H
    assert found["reduce-scatter", hidden] == micro_batches * (4 * L + 1)
    assert found["all-gather", hidden] == micro_batches * (6 * L + 1)
    assert Message("tp", "all-reduce", 4, 12).ring_bytes == sum(
        Message("tp", kind, 4, 12).ring_bytes for kind in ("all-gather", "reduce-scatter")
    )


@pytest.mark.parametrize(("layout", "share"), [("tp=2 dp=2", 2 * 1 / 2), ("dp=4", 2 * 3 / 4)])
def test_gradients_travel_twice_less_a_share(layout: str, share: float) -> None:
    """2 (d - 1) / d of their bytes by each rank of a ring, float32."""
    found = dry(layout)
    sent = sum(m.ring_bytes * n for m, n in found.counts.messages.items() if m.axis == "dp" and m.bytes > 8)
    assert sent == share * 4 * found.parameters


def test_ranks_vote_once_a_step_on_stopping() -> None:
    """8 bytes over all ranks; none where there is one."""
    assert dry("tp=2 dp=2").counts.messages[Message("world", "all-reduce", 4, 8)] == 1
    assert not any(message.axis == "world" for message in dry("tp=1").counts.messages)


def test_sharded_gradients_travel_once() -> None:
    """zero=3: float32 gradients are scattered, bfloat16 weights gathered for forward and for backward."""
    found = dry("dp=2 zero=3 train.global_batch_size=4")
    whole = 2 * found.parameters  # of both ranks
    moved = messages(found, "dp")
    scattered = sum(size * n for (kind, size), n in moved.items() if kind == "reduce-scatter")
    gathered = sum(size * n for (kind, size), n in moved.items() if kind == "all-gather")
    ends = 2 * sum(
        p.numel() for n, p in built("dp=2").model.chunks[0].named_parameters() if "layers" not in n
    )
    assert scattered == 4 * whole
    assert gathered == 2 * (2 * whole) - ends  # the ends of the model stay from forward to backward


def kept_per_layer(layout: str, device: torch.device) -> int:
    """Bytes that a micro-batch keeps for backward in each layer: of three layers, less those of two."""
    kept = [
        sum(
            block.size
            for block, change in dry_run(
                config_of(*layout.split(), f"model.num_layers={layers}", f"train.global_batch_size={B}"),
                0,
                device=device,
            ).log.events
            if change > 0 and block.purpose == ACTIVATIONS
        )
        for layers in (3, 2)
    ]
    return kept[0] - kept[1]


@pytest.mark.parametrize(
    ("layout", "t", "sequence"),
    [("tp=4", 4, 1), slow(("tp=2 sequence_parallel=true", 2, 2)), slow(("tp=2 recompute=selective", 2, 1))],
)
def test_activations_of_a_layer_are_table_2(layout: str, t: int, sequence: int) -> None:
    """arXiv:2205.05198: sbh (10 + 24/t), 34 sbh / t with sequence parallelism, attention scores not kept.

    On top is what the table leaves out: mean and deviation of the norms, the logarithms of softmax sums, and
    a random state. The norms' weights in bfloat16 are cast once a step.
    """
    sbh = S * B * H
    table = 10 * sbh // sequence + 24 * sbh // t
    left_out = 16 * S * B // sequence + 4 * A * S * B // t + 24
    assert kept_per_layer(layout, torch.device("meta")) == table + left_out


def test_full_recomputation_keeps_the_input_of_a_layer() -> None:
    layout = f"{FULL} tp=4 sequence_parallel=true"
    assert kept_per_layer(layout, torch.device("meta")) == 2 * S * B * H // 4


def test_attention_that_is_not_fused_keeps_5_bytes_per_score() -> None:
    """Table 2 without selective recomputation: 5 a s² b / t more; by a CPU's real numbers."""
    layout = "tp=2 data.seq_length=32"
    none, selective = (kept_per_layer(f"{layout} recompute={kind}", CPU) for kind in ("none", "selective"))
    assert none - selective == 5 * A * 32**2 * B // 2


@cache
def built(layout: str) -> Trainer:
    """A trainer of a rank, with real numbers and no neighbours."""
    config = config_of(*layout.split())
    p = config.parallel
    ctx = replace(shape_context(0, tp=p.tp, pp=p.pp, dp=p.dp or 1), device=CPU)
    return Trainer(config, ctx)


@pytest.mark.parametrize(
    "layout", ["tp=2 dp=2", "tp=4 sequence_parallel=true", "pp=2 vp=2 dp=2 model.num_layers=4"]
)
def test_state_is_that_of_a_built_rank(layout: str) -> None:
    found, trainer = dry(layout), built(layout)
    parts = found.log.peak().parts
    parameters = [shard.parameter for shard in trainer.shards]
    buffers = sum(buffer.nbytes for chunk in trainer.model.chunks for buffer in chunk.buffers())
    state = {x for s in parameters for x in trainer.optimizer.state[s].values()}  # one count for all
    assert found.parameters == sum(p.numel() for p in parameters)
    assert parts[WEIGHTS] == sum(p.nbytes for p in parameters)
    assert parts[TABLES] == buffers > 0
    assert parts[GRADIENTS] == sum(p.nbytes for p in parameters)
    assert parts[STATE] == sum(x.nbytes for x in state)


def test_state_of_another_optimizer_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLM_TRUST", "torch.optim")
    found = dry("tp=2 optimizer.kind=torch.optim:Adagrad")
    assert found.log.peak().parts.get(STATE, 0) == pytest.approx(4 * found.parameters, abs=4096)


@pytest.mark.parametrize(
    ("layout", "rank", "few", "many"),
    [
        ("dp=2 zero=2 zero_reduce=every", 1, 3, 5),
        slow(("pp=2 recompute=full", 1, 11, 14)),
        slow(("pp=2 vp=2 model.num_layers=4", 0, 6, 10)),
    ],
)
def test_a_step_need_not_be_run_in_full(layout: str, rank: int, few: int, many: int) -> None:
    """FLOPs, messages and the peak of many micro-batches from few: the same as those of all."""
    dp = 2 if "dp=2" in layout else 1
    config = config_of(*layout.split(), "data.seq_length=16", f"train.global_batch_size={many * B * dp}")
    short, whole = (dry_run(config, rank, in_full=in_full) for in_full in (False, True))
    assert (short.micro_batches_run, whole.micro_batches_run) == (few, many)
    assert short.counts == whole.counts
    losses = 4 * (many - few) if short.ctx.pp.rank == short.ctx.pp.size - 1 else 0
    assert whole.log.peak().bytes - short.log.peak().bytes == losses


def test_the_parts_of_the_peak_are_all_of_it() -> None:
    for layout, stage_ranks in (
        ("tp=2 pp=2 dp=2 sequence_parallel=true recompute=full", (0, 7)),
        ("tp=2 dp=2", (3,)),
    ):
        for rank in stage_ranks:
            peak = dry(layout, rank).log.peak()
            assert sum(peak.parts.values()) == peak.bytes
            tagged = (WEIGHTS, CASTS, GRADIENTS, STATE, TABLES)
            assert peak.parts.keys() > set(tagged)
            assert (VOCABULARY in peak.parts) == (rank in (7, 3))


@pytest.mark.parametrize(
    ("pp", "dp", "pipeline", "micro_batches"),
    [(2, 1, "1f1b", 8), (2, 2, "gpipe", 8), slow((1, 1, "1f1b", 1))],
)
def test_the_last_stage_is_as_full_as_plans_predict(
    pp: int, dp: int, pipeline: Literal["1f1b", "gpipe"], micro_batches: int
) -> None:
    """With a table that outweighs everything: how often it is held shows."""
    batch = B * micro_batches * dp
    layout = f"pp={pp} dp={dp} pipeline={pipeline} model.vocab_size=8192 train.global_batch_size={batch}"
    config, rank = config_of(*layout.split()), (pp - 1) * dp
    found = dry_run(config, rank, in_full=True).log.peak()
    predicted = MemoryModel(counts_of(config, "gpu")).peak(
        PlannedLayout(pp=pp, dp=dp, pipeline=pipeline, micro_batch=B, global_batch=batch), pp - 1
    )
    assert predicted.total - predicted.parts["allocator"] == pytest.approx(found.bytes, rel=0.02)


@pytest.mark.slow
def test_memory_of_a_cpu_is_that_of_its_own_tensors() -> None:
    """As PyTorch tells its profiler; in half precision a loss takes other pieces than on a GPU."""
    settings = ["dp=1", "model.vocab_size=8192", "train.global_batch_size=4", "dist.device=cpu"]
    config = config_of(*settings)
    found = run(config).log.peak().bytes
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer = Trainer(config, ParallelContext())
        for _ in range(2):
            trainer.train_step(batches_of(config, [B] * 2))
    blocks = [e.nbytes() for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert found == pytest.approx(max(accumulate(blocks)), rel=0.02)
    assert dry_run(config, 0).log.peak().bytes != pytest.approx(found, rel=0.05)


def test_the_record_holds_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rank.json"
    found = run(config_of("tp=2", "dp=2", "rank=3", f"out={out}"))
    record, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert record["parameters"] == found.parameters
    assert record["memory"]["peak"] == sum(record["memory"]["parts"].values())
    for number in (record["flops"]["hardware"], record["memory"]["peak"], found.parameters):
        assert f"{number:,}" in printed
    sent = {(m["axis"], m["operation"], m["bytes"]): m["count"] for m in record["communication"]}
    assert sent["tp", "all-reduce", 2 * S * B * H] == 2 * (4 * L + 1)
    assert max(map(len, printed.splitlines()[:-2])) <= 100


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["tp=2", "dp=2", "rank=4"], "rank=4 is none of the 4 ranks of tp=2 * pp=1 * dp=2; use rank=0 to 3"),
        (["tp=3"], "tp=3 does not divide model.num_heads=4; use tp=2 or tp=4 (its divisors: 1, 2, 4)"),
        (["out=x.html"], "out=x.html must end in .json; use out=x.json"),
    ],
)
def test_a_mistake_is_one_line(overrides: list[str], problem: str) -> None:
    (line,) = check_plan_dry_run(config_of(*overrides))
    assert line.startswith(problem)
