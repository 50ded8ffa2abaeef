"""Jobs that test_launch.py starts, and the command that starts them as `mlm` would.

The config of a job is a GenerateConfig: `ckpt` is the folder ranks report to.
"""

import json
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from mlm.cli.generate.settings import GenerateConfig
from mlm.launch.config import DistConfig
from mlm.launch.start import run_job
from mlm.launch.stop import StopRequest, note_stop_requests
from mlm.parallel.collectives import all_reduce, start_receive, start_send
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.util.errors import UserError


def tell(config: GenerateConfig, ctx: ParallelContext, /, **facts: object) -> None:
    """Leave facts of this rank for the test, whole or not at all."""
    path = Path(config.ckpt) / f"rank-{ctx.rank}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"pid": os.getpid(), **facts}))
    partial.rename(path)


def facts(config: GenerateConfig, ctx: ParallelContext) -> None:
    """Add up the ranks over tp and tell how this rank was set up."""
    total = torch.tensor([float(ctx.rank + 1)])
    if ctx.tp.group is not None:
        dist.all_reduce(total, group=ctx.tp.group)
    print(f"spoken by rank {ctx.rank}")
    tell(
        config,
        ctx,
        total=total.item(),
        threads=torch.get_num_threads(),
        environment=dict(os.environ),
        config=[type(config).__name__, config.prompt, config.top_p],
        axes=[ctx.tp.size, ctx.pp.size, ctx.dp.size],
        world_size=ctx.world_size,
        backend=dist.get_backend() if dist.is_initialized() else None,
    )


def same_user_error(config: GenerateConfig, ctx: ParallelContext) -> None:
    raise UserError("data.path=nowhere is missing: build it with `mlm data build`")


def crash(config: GenerateConfig, ctx: ParallelContext) -> None:
    """Rank 1 has a bug while rank 0 is where no error reaches it."""
    tell(config, ctx)
    all_reduce(torch.ones(1), ctx.world)  # so that rank 0 has told before it is ended
    if ctx.rank == 1:
        raise ZeroDivisionError("a bug")
    time.sleep(600)


def lose_rank_1(config: GenerateConfig, ctx: ParallelContext) -> None:
    """Rank 1 gets a signal before a communication over an axis at step 2; `prompt` says which of both."""
    name, signal_name = config.prompt.split()
    tell(config, ctx)
    for step in (1, 2):
        ctx.watch.step = step
        if step == 2 and ctx.rank == 1:
            os.kill(os.getpid(), signal.Signals[signal_name])
        communicate(ctx, name)
        time.sleep(step - 1)  # so that who waits for rank 1 over this axis waits longest
        all_reduce(torch.ones(1), ctx.tp)


def communicate(ctx: ParallelContext, name: str) -> None:
    """All-reduce over an axis; over pp, a transfer from the first to the last stage."""
    if name != "pp":
        all_reduce(torch.ones(1), getattr(ctx, name))
    elif ctx.pp.rank == 0:
        start_send(torch.ones(1), ctx.pp, 1).wait()
    else:
        start_receive(torch.empty(1), ctx.pp, 0).wait()


def save_on_request(config: GenerateConfig, ctx: ParallelContext) -> int:
    """A loop that leaves when asked, with the exit code of its command."""
    with StopRequest(announce=ctx.is_main) as stop:
        tell(config, ctx, isatty=sys.stdout.isatty())
        while stop.number is None:
            time.sleep(0.02)
        dist.barrier()  # nobody was ended meanwhile
        tell(config, ctx, isatty=sys.stdout.isatty(), reason=stop.reason)
        return stop.exit_code


def never_save(config: GenerateConfig, ctx: ParallelContext) -> None:
    """A loop that hears the request and continues."""
    with StopRequest() as stop:
        tell(config, ctx, requested=False)
        while stop.number is None:
            time.sleep(0.02)
        tell(config, ctx, requested=True)
        time.sleep(600)


def wait(config: GenerateConfig, ctx: ParallelContext) -> None:
    tell(config, ctx)
    time.sleep(600)


def start(
    job: str,
    folder: Path,
    *,
    tp: int = 2,
    pp: int = 1,
    dp: int = 1,
    threads: int | None = 1,
    master_port: int = 0,
    timeout_s: float = 60,
    prompt: str = "two\nlines",
    saves: bool = True,
) -> int:
    return run_job(
        f"tests.launch.jobs:{job}",
        GenerateConfig(
            ckpt=str(folder),
            prompt=prompt,
            top_p=0.25,
            parallel=ParallelConfig(tp=tp, pp=pp, dp=dp),
            dist=DistConfig(
                device="cpu", threads_per_rank=threads, master_port=master_port, timeout_s=timeout_s
            ),
        ),
        out=folder if saves else None,
    )


if __name__ == "__main__":
    try:
        saves = "JOB_SAVES_NOTHING" not in os.environ
        with note_stop_requests() if saves else nullcontext():
            code = start(sys.argv[1], Path(sys.argv[2]), tp=int((sys.argv[3:] or ["2"])[0]), saves=saves)
    except UserError as error:
        print(f"mlm: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)
