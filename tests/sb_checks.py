import os, torch
from mlm.parallel.collectives import all_reduce
def noop(ctx): return os.getpid()
def layer(ctx):
    from mlm.parallel.layers import ColumnParallelLinear
    l=ColumnParallelLinear(8,16,tp=ctx.tp,init_seed=1); l(torch.randn(3,2,8)).sum().backward()
    all_reduce(torch.ones(1), ctx.world); return os.getpid()
