"""Sharded data parallelism: weights, gradients and optimizer state sharded over the dp axis (zero=2|3).

Source: ZeRO (arXiv:1910.02054, section 5), by PyTorch's FSDP2. Each layer is a unit, and so are all other
parameters together. A unit's rows are gathered in one message, while the previous unit computes, and its
gradients are reduce-scattered in one message: in the step's last micro-batch, until which each rank keeps the
full gradient in float32, or in every one (zero_reduce=every), which keeps 1/dp of it. With zero=2 gathered
weights stay until the step's last backward pass; with zero=3 they are dropped after each pass and gathered
again.

FSDP2 splits dim 0 like torch.chunk: the last ranks may hold fewer rows, or none. Its DTensors' plain local
tensors (`ParameterShard.parameter`), in float32 or float64, serve optimizer, clipping and checkpoints.
Gathered weights and the gradients of one pass have the compute dtype; they are summed over micro-batches and
ranks in the dtype of the rows.

Experts are a separate unit inside their layer, over the ranks that hold the same experts. Routers, which
compute in float32, experts of one rank, and adapters are not sharded.

The sum, not the mean, is taken: the loss is already divided by the tokens of the global batch.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from mlm.parallel.collectives import start_all_gather, start_reduce_scatter
from mlm.parallel.config import ZeroReduce
from mlm.parallel.expert.experts import Experts
from mlm.parallel.mesh import Axis
from mlm.parallel.pipeline.engine import Reducer
from mlm.parallel.sharding import DP_SLICES, DataParallelSlice, replica_axis


class ShardedReducer:
    """Reducer that shards parameters over dp, except the `full` ones, which `replicated` reduces.

    Other arguments as in `build_reducer`.
    """

    def __init__(
        self,
        model: nn.Module,
        dp: Axis,
        *,
        zero: int,
        compute_dtype: torch.dtype,
        units: Iterable[nn.Module],
        methods: Sequence[str],
        reduce: ZeroReduce,
        late_weights: bool,
        full: set[nn.Parameter],
        replicated: Reducer,
    ) -> None:
        self.replicated = replicated
        first = next(model.parameters())
        half = compute_dtype in (torch.bfloat16, torch.float16)
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype if half else None,
            reduce_dtype=first.dtype,
            cast_forward_inputs=False,  # the loss scale keeps its dtype
        )

        def shard(unit: nn.Module, axis: Axis, *, drops: bool) -> FSDPModule:
            assert axis.group is not None
            mesh = DeviceMesh.from_group(axis.group, first.device.type, mesh_dim_names=(axis.name,))
            sharded: FSDPModule = fully_shard(
                unit, mesh=mesh, mp_policy=policy, reshard_after_forward=drops, ignored_params=full
            )
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
            sharded.set_custom_all_gather(_Collective(axis))  # type: ignore[arg-type]  # its base class is private
            sharded.set_custom_reduce_scatter(_Collective(axis))  # type: ignore[arg-type]
            return sharded

        self.units: list[FSDPModule] = []
        for unit in units:
            experts = [
                shard(m, m.expert_axes.replicas or dp, drops=zero == 3)
                for m in unit.modules()
                if isinstance(m, Experts) and not full & {*m.parameters(recurse=False)}  # adapters aside
            ]
            self.units += [shard(unit, dp, drops=zero == 3), *experts]
        # other parameters are used at both ends of the forward pass and first in backward: kept in between
        self.root: FSDPModule = shard(model, dp, drops=False)
        # prefetch during the previous unit, also if the host launches slowly
        for before, following in pairwise((self.root, *self.units)):
            before.set_modules_to_forward_prefetch([following])
        # compiled layers return views, which nothing changes in place
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        for name in methods:
            register_fsdp_forward_method(model, name)
        self.keeps_gathered = zero == 2
        self.slices = _assign_slices(model, dp)
        self.every, self.late_weights = reduce == "every", late_weights
        self.sync_late = False  # without effect
        self._passes: tuple[bool, bool] | None = None
        self._reduced = False

    @property
    def sync(self) -> bool:
        return self._passes is not None and self._passes[1]

    @sync.setter
    def sync(self, value: bool) -> None:
        self.replicated.sync = value
        value = (
            value and not self.late_weights
        )  # late gradients would miss the reduction; `finish` reduces all
        self._reduced |= value
        # with late weights a pass has little to reduce: `settle` reduces both
        self._set_passes(reduce=value or (self.every and not self.late_weights), last=value)

    def _set_passes(self, *, reduce: bool, last: bool) -> None:
        """Set if the next backward passes reduce gradients, and are the last, which drop gathered weights."""
        if (reduce, last) == self._passes:
            return
        self._passes = reduce, last
        self.root.set_requires_gradient_sync(reduce)
        self.root.set_is_last_backward(reduce)  # frees the reduce-scatter's input
        self.root.set_reshard_after_backward(last or not self.keeps_gathered)

    def start_step(self) -> None:
        """Clear the gradients, and drop weights gathered by an evaluation."""
        self.replicated.start_step()
        for rows, dp_slice in self.slices:
            rows.grad = dp_slice.parameter.grad = None
        self.drop_gathered()
        self.sync, self._reduced = False, False

    def drop_gathered(self) -> None:
        for unit in (*self.units, self.root):
            unit.reshard()

    def gathered_parameters(self) -> Iterator[Any]:
        """FSDP2's parameters; without reduction in backward passes they have gradients of full weights."""
        for unit in (*self.units, self.root):
            group = unit._get_fsdp_state()._fsdp_param_group
            yield from () if group is None else group.fsdp_params

    def settle(self) -> None:
        assert not self._reduced, "the step's gradients are already reduced"
        self._accumulate(reduce=self.every, last=False)
        self.sync = False

    def _accumulate(self, *, reduce: bool, last: bool) -> None:
        """Add gradients to the sums in the rows' dtype, then reduce these: FSDP2 supports one dtype only."""
        self._set_passes(reduce=False, last=False)
        _run_post_backward(self.root)
        if reduce:
            self._set_passes(reduce=True, last=last)
            _run_post_backward(self.root)

    def finish(self) -> None:
        """Reduce if no backward pass did, and assign the sums to the parameters of `ParameterShard`."""
        if not self._reduced:
            self._accumulate(reduce=True, last=True)
            self._reduced = True
        for rows, dp_slice in self.slices:
            dp_slice.parameter.grad = None if rows.grad is None else _local(rows.grad)
        self.replicated.finish()


def _assign_slices(model: nn.Module, dp: Axis) -> list[tuple[nn.Parameter, DataParallelSlice]]:
    """Return FSDP2's parameters with views of their rows, and set DP_SLICES for `parameter_shards`."""
    slices: dict[nn.Parameter, DataParallelSlice] = {}
    for module in model.modules():
        sharded = {n: p for n, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)}
        axis = replica_axis(module, dp)
        for parameter in sharded.values():
            if parameter in slices:
                continue
            rows = nn.Parameter(_local(parameter), requires_grad=parameter.requires_grad)
            share = -(-parameter.shape[0] // axis.size)
            first = min(axis.rank * share, parameter.shape[0])
            count = min(share, parameter.shape[0] - first)
            assert rows.shape[0] == count, "FSDP2 does not split like torch.chunk"
            slices[parameter] = DataParallelSlice(rows, tuple(parameter.shape), first, axis)
        if sharded:
            setattr(module, DP_SLICES, {name: slices[p] for name, p in sharded.items()})
    return list(slices.items())


@torch.no_grad()
def _local(x: Tensor) -> Tensor:
    """This rank's rows of a DTensor, sharing its memory."""
    assert isinstance(x, DTensor)
    return x.to_local().detach()


def _run_post_backward(root: FSDPModule) -> None:
    """Run FSDP2's end of a backward pass for gradients that were computed outside one.

    Private API without a public alternative, also used by torch.distributed.pipelining (stage.py).
    It accumulates gradients; with sync it reduces them, drops gathered weights and makes the device's stream
    wait. Unchanged in torch 2.11 to 2.13.
    """
    root._get_fsdp_state()._root_post_backward_final_callback()


class _Collective:
    """Custom all-gather or reduce-scatter of FSDP2, for reports of hangs.

    Called with FSDP2's arguments; complete on the device's current stream when the call returns.
    """

    def __init__(self, dp: Axis) -> None:
        self.dp = dp

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | None = None,
        async_op: bool = False,
    ) -> None:
        assert not async_op
        if op is None:
            pending = start_all_gather(input_tensor, self.dp, output_tensor.view(self.dp.size, -1))
        else:  # a sum: set_force_sum_reduction_for_comms
            pending = start_reduce_scatter(input_tensor, self.dp, output_tensor)
        pending.wait()
