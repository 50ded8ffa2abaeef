"""Optimizers and decays of users, and those of torch.optim: at each layout, their state, their problems."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlm.config.imports import TRUST, OwnCodeError, trusting
from mlm.data.sampler import SyntheticDataset, collate
from mlm.optim.adamw import applied_steps, apply, ensure_state
from mlm.optim.config import OptimizerConfig, ScheduleConfig
from mlm.optim.user import TORCH_ELEMENTWISE, check_optimizer, decay_share, layout_problem, user_optimizer
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import Axis, ParallelContext, shape_context
from mlm.parallel.sharding import ParameterShard, parameter_shards
from mlm.training.trainer import Trainer
from mlm.util.errors import format_settings
from tests.ranks import run_on_ranks
from tests.training.test_trainer import SEQ, VOCAB, config, steps_of

OWN = """
import torch

class Normed(torch.optim.Optimizer):
    "A step of length lr for each parameter, as LAMB's and Muon's: it reads whole matrices."
    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / (p.grad.norm() + 1e-12), alpha=group["lr"])

class Whole(Normed):
    elementwise = False

class Elementwise(Normed):
    elementwise = True

def build(groups, config):
    return Normed(groups, config.lr)

def build_whole(groups, config):
    return Whole(groups, config.lr)

def build_sgd(groups, config):
    return torch.optim.SGD(groups, lr=config.lr)

def build_declared(groups, config):
    return Normed(groups, config.lr)
build_declared.elementwise = True

class CountsInGroup(Elementwise):
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1

class CountsInSelf(Elementwise):
    steps = 0
    def step(self, closure=None):
        self.steps = self.steps + 1

class SumsInSelf(Elementwise):
    def __init__(self, groups, lr):
        super().__init__(groups, lr)
        self.kept, self.sums = torch.arange(3.0), torch.zeros(3)
    def step(self, closure=None):
        self.sums += 1

class RowsFromTheStart(Elementwise):
    def __init__(self, groups, lr):
        super().__init__(groups, lr)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["row"] = torch.zeros(p.shape[:1] + (2,))

class StateOfAll(Elementwise):
    def __init__(self, groups, lr):
        super().__init__(groups, lr)
        self.state["k"] = {"sum": torch.zeros(1)}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)


@pytest.fixture(autouse=True)
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRUST, "mine,torch.optim")


def losses(ctx: ParallelContext, zero: int) -> dict[str, list[float]]:
    with trusting(["torch.optim:SGD"]):
        return {name: steps_of(trainer_of(name, ctx, zero), 3) for name in TORCH_ELEMENTWISE}


def trainer_of(name: str, ctx: ParallelContext, zero: int = 0) -> Trainer:
    spec = config()
    parallel = replace(spec.parallel, tp=ctx.tp.size, zero=zero)
    optimizer = replace(spec.optimizer, kind=f"torch.optim:{name}", clip_grad_norm=0.0)
    return Trainer(replace(spec, parallel=parallel, optimizer=optimizer), ctx)


def test_optimizers_of_torch_train_alike_over_sharded_replicas() -> None:
    split = run_on_ranks(losses, 3, dp=2)[0]
    for name, alone in losses(shape_context(), 0).items():
        # float64: sums over ranks are of two parts in another order
        assert split[name] == pytest.approx(alone, rel=1e-9), name


@pytest.mark.parametrize("name", TORCH_ELEMENTWISE)
def test_optimizer_of_torch_steps_as_torch_steps_it(name: str) -> None:
    """Its state begins as torch's does, although it is made before the first step."""
    trainer = trainer_of(name, shape_context())
    copies = [shard.parameter.detach().clone() for shard in trainer.shards]
    groups = [
        {"params": [p for p in copies if p.dim() > 1], "weight_decay": trainer.config.optimizer.weight_decay},
        {"params": [p for p in copies if p.dim() == 1], "weight_decay": 0.0},
    ]
    reference = vars(torch.optim)[name](groups, lr=trainer.config.optimizer.lr)
    samples = SyntheticDataset(VOCAB, SEQ, 16, seed=3)
    for step in range(2):
        parts = trainer.compute_gradients([collate(samples.gather(range(8 * step, 8 * step + 8)), 8 * step)])
        for copy, shard in zip(copies, trainer.shards, strict=True):
            copy.grad = shard.parameter.grad.clone()
        lr = trainer.clip_and_update(parts).lr
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
    for copy, shard in zip(copies, trainer.shards, strict=True):
        torch.testing.assert_close(shard.parameter.detach(), copy, rtol=0, atol=1e-15)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("kind", "layout"), [("Normed", {"zero": 2}), ("build", {"tp": 2, "zero": 3, "pp": 2})]
)
def test_optimizer_that_declares_nothing_is_rejected_where_a_rank_holds_a_part(
    kind: str, layout: dict[str, int]
) -> None:
    problem = layout_problem(OptimizerConfig(kind=f"mine:{kind}"), ParallelConfig(**layout))
    assert problem.keys == ("optimizer.kind", *(key for key in ("tp", "pp", "zero") if key in layout))
    whole = {"tp": 1, "pp": 1, "zero": 0}
    assert problem.fix.startswith(
        f"use {format_settings({key: whole[key] for key in problem.keys[1:]})}, or set"
    )


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("kind", ["Whole", "build_whole"])
def test_optimizer_of_whole_parameters_may_have_stages(kind: str) -> None:
    optimizer = OptimizerConfig(kind=f"mine:{kind}")
    assert layout_problem(optimizer, ParallelConfig(pp=2, cp=2, dp=2)) is None
    problem = layout_problem(optimizer, ParallelConfig(pp=2, tp=2))
    assert (problem.keys, problem.fix) == (("optimizer.kind", "tp"), "use tp=1")


def whole_losses(ctx: ParallelContext, folder: str) -> list[float]:
    spec, kind = config(), "optimizer_of_whole:Whole"
    spec = replace(spec, parallel=replace(spec.parallel, pp=ctx.pp.size))
    sys.path.insert(0, folder)
    try:
        with trusting([kind]):
            return steps_of(Trainer(replace(spec, optimizer=replace(spec.optimizer, kind=kind)), ctx), 3)
    finally:
        sys.path.remove(folder)


@pytest.mark.parametrize("layout", [{"pp": 2}, {"dp": 2}])
def test_optimizer_of_whole_parameters_trains_alike_over_stages_and_replicas(
    tmp_path: Path, layout: dict[str, int]
) -> None:
    """The tied token table, a copy in each of the two stages, among them."""
    (tmp_path / "optimizer_of_whole.py").write_text(OWN)
    alone = run_on_ranks(whole_losses, str(tmp_path))[0]
    split = run_on_ranks(whole_losses, str(tmp_path), **layout)[0]
    assert split == pytest.approx(alone, rel=1e-9)  # float64


ADAM = "torch.optim:Adam"


@pytest.mark.parametrize(
    ("kind", "settings", "problem"),
    [
        ("mine:CountsInGroup", {}, "changes param_groups[0]['step'], which checkpoints do not hold"),
        ("mine:CountsInSelf", {}, "changes self.steps, which checkpoints do not hold"),
        ("mine:SumsInSelf", {}, "changes self.sums, which checkpoints do not hold"),
        ("mine:RowsFromTheStart", {}, "checkpoints cannot hold its state row"),
        ("mine:StateOfAll", {}, "checkpoints cannot hold its state 'k' of no parameter"),
        *(
            (f"torch.optim:{name}", {}, f"optimizer.kind=torch.optim:{name}: {name} is not supported")
            for name in ("LBFGS", "SparseAdam")
        ),
        ("mine:Elementwise", {"betas": (0.5, 0.6)}, "betas"),
        (
            ADAM,
            {"cautious_decay": True},
            "optimizer.cautious_decay=true: optimizer.kind=torch.optim:Adam has",
        ),
        (ADAM, {"options": {"lr": 0.5}}, "optimizer.options.lr: has no effect; set optimizer.lr"),
        (ADAM, {"options": {"weight_decay": 0.5}}, "has no effect; set optimizer.weight_decay"),
    ],
)
def test_an_optimizer_that_cannot_train_is_rejected_before_training(
    own: None, kind: str, settings: dict[str, Any], problem: str
) -> None:
    """What a checkpoint would lose, classes of torch that need more than a step, settings without effect."""
    with pytest.raises(OwnCodeError) as error:
        check_optimizer(OptimizerConfig(kind=kind, **settings))
    assert problem in str(error.value)


@pytest.mark.parametrize("name", TORCH_ELEMENTWISE)
@pytest.mark.parametrize("option", ["fused", "foreach"])
def test_flags_that_a_step_of_torch_sets_are_no_counts(name: str, option: str) -> None:
    if option not in inspect.signature(vars(torch.optim)[name]).parameters:
        pytest.skip(f"{name} has no {option}")
    check_optimizer(OptimizerConfig(kind=f"torch.optim:{name}", options={option: True}))


def test_betas_and_eps_reach_classes_that_take_them() -> None:
    build = user_optimizer(OptimizerConfig(kind=ADAM, betas=(0.5, 0.6), eps=1e-3))
    (group,) = build([{"params": [torch.nn.Parameter(torch.zeros(2))]}]).param_groups
    assert (group["betas"], group["eps"]) == ((0.5, 0.6), 1e-3)


class Counting(torch.optim.Optimizer):
    """Decays weights whatever the gradient, and counts its steps: in an int, or in a tensor."""

    def __init__(self, params: Any, count: Callable[[], Any]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.count = count

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("step", self.count())
                state.setdefault("sum", torch.ones_like(p)).add_(p.grad)
                state["step"] += 1
                p.mul_(0.5).add_(p.grad)


def counting(count: Callable[[], Any] = int) -> tuple[Counting, list[ParameterShard], Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)
    return Counting(model.parameters(), count), list(parameter_shards(model, Axis("tp"))), model.weight


@pytest.mark.parametrize("count", [int, lambda: torch.zeros(())], ids=["an int", "a tensor"])
def test_state_is_made_without_a_trace_and_counts_from_where_it_should(count: Callable[[], Any]) -> None:
    optimizer, _, weight = counting(count)
    before = weight.detach().clone()
    ensure_state(optimizer, 5.0)
    assert torch.equal(weight, before)
    assert weight.grad is None
    assert not optimizer.state[weight]["sum"].any()
    assert applied_steps(optimizer) == 5.0
    assert type(optimizer.state[weight]["step"]) is type(count())


@pytest.mark.parametrize("overflow", [False, True])
def test_an_overflow_leaves_out_the_step_of_an_unfused_optimizer(overflow: bool) -> None:
    optimizer, shards, weight = counting()
    ensure_state(optimizer)
    before = weight.detach().clone()
    weight.grad = torch.ones_like(weight)
    apply(optimizer, shards, torch.tensor(0.25), torch.tensor(float(overflow)))
    torch.testing.assert_close(weight.detach(), before if overflow else 0.5 * before + 0.25)


@pytest.mark.parametrize(("value", "share"), [(0.3, 0.3), (1 + 1e-7, 1.0), (-1e-7, 0.0), (True, 1.0)])
def test_a_decays_share_is_from_0_to_1_but_for_rounding(value: float, share: float) -> None:
    assert decay_share(ScheduleConfig(), lambda _: value, 0.5) == share


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), None, "0.5"])
def test_a_decay_that_is_no_share_is_an_error(value: Any) -> None:
    with pytest.raises(OwnCodeError, match=r"decay\(0\.5\) is .*return a number from 0 to 1"):
        decay_share(ScheduleConfig(), lambda _: value, 0.5)
