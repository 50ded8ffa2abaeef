"""Operators of a CPU's training step: the paths that `mlm` chooses among, and where each is faster.

    python scripts/bench_operators.py
    python scripts/bench_operators.py attention loss --repeats 20 --out results.json

Forward and backward on one thread, by processor time, so that other work on the machine counts little: the
least of many repeats, in which the paths take turns. Paths are chosen by flags of the processor, shape and
dtype, never by a measurement at start: all ranks and restarts then compute alike. The table says by how much
the chosen path is ahead of the best other one; below 0.97 its rule needs another look on this processor.

Exit code: 0 every chosen path within 3 % of the best, 1 one is not, 2 a mistake.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from bench.harness import Bench, Result, Say, positive, table_of
from torch import Tensor

from mlm.models import attention, blocked_attention, norms, transformer
from mlm.parallel import cross_entropy, matmul
from mlm.parallel.layers import VocabParallelEmbedding
from mlm.parallel.mesh import Axis
from mlm.training.memory import reuse_large_blocks

Paths = Mapping[str, Callable[[], object]]
CLOSE = 0.97
"""Speed of the chosen path over the best other one from which there is nothing to change."""
HALF, SINGLE = torch.bfloat16, torch.float32


def attention_paths() -> Iterator[tuple[str, str, Paths]]:
    shapes = ((32, 16, 4, 16), (64, 16, 6, 64), (128, 8, 4, 16), (128, 8, 6, 64), (192, 8, 6, 64))
    for dtype in (SINGLE, HALF):
        for s, b, n, d in (*shapes, (256, 4, 4, 64), (512, 2, 6, 64), (1024, 1, 6, 64)):
            x, dy = torch.randn(s, b, 3 * n * d).to(dtype), torch.randn(s, b, n * d).to(dtype)

            def blocks(x: Tensor, d: int = d) -> Tensor:
                heads = x.unflatten(-1, (-1, d))
                return blocked_attention.causal_attention_in_blocks(heads, blocked_attention.FUSED)

            def fused(x: Tensor, d: int = d) -> Tensor:
                return attention.fused_attention(x, d, 0.0)

            chosen = "blocks" if blocked_attention.uses_blocks(x) else "kernel"
            title = f"attention {name_of(dtype)}, S {s}, B {b}, {n} heads of {d}"
            yield title, chosen, {"kernel": both_passes(fused, x, dy), "blocks": both_passes(blocks, x, dy)}


def norm_paths() -> Iterator[tuple[str, str, Paths]]:
    for rows, width in ((1024, 64), (1024, 256), (2048, 384), (1024, 768)):
        x, dy = torch.randn(rows, width).to(HALF), torch.randn(rows, width).to(HALF)
        norm = norms.LayerNorm(width, eps=1e-5)

        def own_sums(x: Tensor, norm: norms.LayerNorm = norm) -> Tensor:
            return OwnSums.apply(x, norm.weight, norm.bias, norm.eps)

        paths = {"float32 kernel": both_passes(norm, x, dy), "own sums": both_passes(own_sums, x, dy)}
        yield f"layer norm bf16, {rows} x {width}", "float32 kernel", paths


class OwnSums(norms._Float32Sums):
    """The kernel for the input's gradient, and PyTorch's passes for weight and bias."""

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        x, weight, bias, mean, scale = ctx.saved_tensors
        dx = torch.ops.aten.native_layer_norm_backward(
            dy, x, x.shape[-1:], mean, scale, weight, bias, [True, False, False]
        )[0]
        return dx, (x.float() - mean).mul_(scale).mul_(dy).sum(0), dy.sum(0, dtype=SINGLE), None


def gelu_paths() -> Iterator[tuple[str, str, Paths]]:
    def kernel(x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    for rows, width in ((1024, 256), (1024, 1024), (2048, 1536), (1024, 3072)):
        x, dy = torch.randn(rows, width).to(HALF), torch.randn(rows, width).to(HALF)
        blocks = both_passes(lambda x: transformer.activate(x, "gelu_tanh"), x, dy)
        paths = {"kernel": both_passes(kernel, x, dy), "blocks": blocks}
        yield f"GELU (tanh) bf16, {rows} x {width}", "blocks", paths


def loss_paths() -> Iterator[tuple[str, str, Paths]]:
    vocabulary = 50_304
    for dtype in (SINGLE, HALF):
        for rows, width in ((2048, 384), (1024, 768)):
            table = VocabParallelEmbedding(vocabulary, vocabulary, width, tp=Axis("tp"))
            x, labels = torch.randn(rows, width).to(dtype), torch.randint(vocabulary, (rows,))

            def loss(x: Tensor, mib: int, table: VocabParallelEmbedding, labels: Tensor) -> Tensor:
                table.weight.grad = None
                scale = torch.tensor(1 / len(labels))
                return cross_entropy.linear_cross_entropy(x, labels, table, scale, mib << 20)

            paths = {
                f"{mib} MiB": both_passes(lambda x, mib=mib, t=table, y=labels: loss(x, mib, t, y), x, None)
                for mib in (64, 128, 256)
            }
            chosen = f"{cross_entropy.CHUNK_BYTES['cpu'] >> 20} MiB"
            if dtype == SINGLE:
                yield f"loss {name_of(dtype)}, {rows} x {width} x {vocabulary:,}, chunks", chosen, paths
            else:  # of as many rows as 512 MiB of float32 logits hold, whatever float32's are
                only = both_passes(lambda x, t=table, y=labels: loss(x, 64, t, y), x, None)
                yield f"loss {name_of(dtype)}, {rows} x {width} x {vocabulary:,}", "chosen", {"chosen": only}


def product_paths() -> Iterator[tuple[str, str, Paths]]:
    for rows, inputs, outputs in ((1024, 64, 256), (1024, 256, 1024), (2048, 384, 1536), (1024, 768, 3072)):
        x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
        paths: dict[str, Callable[[], object]] = {"torch.mm": lambda x=x, w=weight: F.linear(x, w)}
        if matmul._HAS_ONEDNN:
            paths["oneDNN"] = lambda x=x, w=weight: matmul._onednn_product(x, w, None)
        chosen = "oneDNN" if matmul.uses_onednn(x, weight) else "torch.mm"
        yield f"product fp32, {rows} x {inputs} x {outputs}", chosen, paths


OPERATORS = {
    "attention": attention_paths,
    "norm": norm_paths,
    "gelu": gelu_paths,
    "loss": loss_paths,
    "product": product_paths,
}


def name_of(dtype: torch.dtype) -> str:
    return "bf16" if dtype == HALF else "fp32"


def both_passes(function: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor | None) -> Callable[[], object]:
    """A call of forward and backward; dy is the output's gradient, None for a scalar."""
    x = x.clone().requires_grad_()

    def run() -> None:
        function(x).backward(dy)
        x.grad = None

    return run


def least_times(paths: Paths, repeats: int) -> dict[str, float]:
    """The least processor time of each path in ms; they take turns, every second time in reverse."""
    best = dict.fromkeys(paths, float("inf"))
    for run in paths.values():
        run()
    for n in range(repeats):
        for name in list(paths)[:: 1 if n % 2 else -1]:
            begin = time.process_time()
            paths[name]()
            best[name] = min(best[name], 1000 * (time.process_time() - begin))
    return best


def add_options(parser: argparse.ArgumentParser) -> None:
    words = f"some of {', '.join(OPERATORS)} (default all)"
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", choices=[*OPERATORS, []], help=words)
    parser.add_argument("--repeats", type=positive, default=15, help="of each path (default %(default)s)")


def measure(args: argparse.Namespace, say: Say) -> Result:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    reuse_large_blocks()
    rows = []
    for operator in args.operators or OPERATORS:
        for title, chosen, paths in OPERATORS[operator]():
            say(title)
            rows.append({"case": title, "chosen": chosen, "ms": least_times(paths, args.repeats)})
    flags = {
        "amx": torch.cpu._is_amx_tile_supported(),
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
        "onednn_is_faster": matmul.onednn_is_faster(),
    }
    return {"flags": flags, "operators": rows}


def lead(row: Result) -> float:
    """Speed of the chosen path over the best other one; 1 without others."""
    others = [ms for name, ms in row["ms"].items() if name != row["chosen"]]
    return min(others) / row["ms"][row["chosen"]] if others else 1.0


def tables(result: Result) -> Iterator[object]:
    flags = ", ".join(f"{name} {'yes' if value else 'no'}" for name, value in result["flags"].items())
    rows = [
        (
            row["case"],
            ", ".join(f"{name} {ms:.2f}" for name, ms in row["ms"].items()),
            row["chosen"],
            f"{lead(row):.2f}",
        )
        for row in result["operators"]
    ]
    yield table_of(("operator", "ms by path", "chosen", "lead"), rows, flags)


BENCH = Bench(
    name="bench_operators",
    doc=__doc__,
    add_options=add_options,
    measure=measure,
    tables=tables,
    is_success=lambda result: all(lead(row) >= CLOSE for row in result["operators"]),
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
