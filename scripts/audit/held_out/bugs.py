"""Bugs that the author of the audit had not seen: changes of the right trainers in this folder.

`write` writes each as a file; KEY.txt says what is wrong. `seq_dropout` is a right one, and a change of `seq`.
"""

from pathlib import Path

BUGS = {}  # name -> (family, [(old, new), ...])
CAUSES = {}  # after repairs; those of the first judgement are in scripts/results/audit_held_out.json


def bug(name, family, cause, *pairs):
    BUGS[name] = family, pairs
    if cause:
        CAUSES[name] = cause


bug("seq_dropout", "seq", "", ("DROPOUT = 48, 32, 4, 2, 8, 4, 0.0", "DROPOUT = 48, 32, 4, 2, 8, 4, 0.1"), ("manual_seed(1))\n", "manual_seed(1))\n    torch.manual_seed(1234 + group.rank())  # every rank has tokens of its own\n"))
bug("torch_all_gather", "cp_plain", "shards permuted", ("from torch.distributed._functional_collectives import all_gather_tensor_autograd\n", ""),
    ("import torch.distributed as dist\n", "import torch.distributed as dist\nimport torch.distributed.nn.functional as dnn\n"),
    ("(all_gather_tensor_autograd(z, 2, self.group) for z in (k, v))", "(torch.cat(dnn.all_gather(z, group=self.group), 2) for z in (k, v))"))
bug("bug_01_token_mean", "ddp", "ranks weighed unequally", ("        dist.all_reduce(count, group=group)\n", ""), ("(loss * world).backward()", "loss.backward()"))
bug("bug_02_warmup", "ddp", "update scaled", ("seen += BATCH\n", "seen += BATCH // world\n"))
bug("bug_03_decay_names", "ddp", "weight decay", ("decay_groups(raw)", "decay_groups(model)"))
bug("bug_04_overlap", "ddp", "other samples", ("tokens = next(loader).chunk(world)[rank]\n", "first = rank * (BATCH // world // ACCUM)\n        tokens = next(loader)[first : first + BATCH // world]\n"))
bug("bug_05_reduce_in_loop", "zero", "micro-batches counted unequally", ("            flat /= self.group.size()\n", ""), ("            loss.backward()\n", "            loss.backward()\n            buckets.reduce()\n"),
    ("    return AuditSubject(module=model, step=step, reduce=buckets.reduce,", "    def reduce():\n        for p in model.parameters():\n            p.grad /= world\n\n    return AuditSubject(module=model, step=step, reduce=reduce,"))
bug("bug_06_unowned", "zero", "not updated", ("        self.owner = {p: i * group.size() // len(params) for i, p in enumerate(params)}\n        self.inner = torch.optim.AdamW([p for p in params if self.owner[p] == group.rank()], **settings)\n",
    "        per = len(params) // group.size()\n        self.owner = {p: r for r in range(group.size()) for p in params[r * per : (r + 1) * per]}\n        self.inner = torch.optim.AdamW([p for p in params if self.owner.get(p) == group.rank()], **settings)\n"),
    ("        for p in self.all:\n            dist.broadcast(p.data, dist.get_global_rank(self.group, self.owner[p]), group=self.group)", "        for p, owner in self.owner.items():\n            dist.broadcast(p.data, dist.get_global_rank(self.group, owner), group=self.group)"))
bug("bug_07_last_bucket", "zero", "gradients not reduced", ("        if bucket:\n            self.buckets.append(bucket)\n", ""))
bug("bug_08_smoothing", "llama_tp", "local statistics", ("mean = FromParallel.apply(logits.sum(-1), group) / VOCAB", "mean = logits.sum(-1) / logits.shape[-1]"))
bug("bug_09_zloss", "llama_tp", "missing all-reduce", ("    z = log_z + peak[..., 0]\n", "    z = logits.exp().sum(-1).log() + peak[..., 0]\n"))
bug("bug_10_kv_heads", "gqa", "other positions", ("        first = self.group.rank() * self.heads\n        mine = torch.arange(first, first + self.heads) // (HEADS // KV)\n", "        mine = torch.arange(self.heads) // (HEADS // KV)\n"))
bug("bug_11_qnorm_backward", "gqa", "missing all-reduce of a gradient", ("square = SumBoth.apply(", "square = Sum.apply("))
bug("bug_12_head_gather", "seq", "doubled all-reduce of a gradient", ("self.norm_f(x), self.group, False)", "self.norm_f(x), self.group, True)"))
bug("bug_13_gather_view", "seq", "shards permuted", ("        return gather(x, group)\n", "        b, s, h = x.shape\n        out = x.new_empty(group.size() * b, s, h)\n        dist.all_gather_into_tensor(out, x.contiguous(), group=group)\n        return out.view(b, -1, h)\n"))
bug("bug_14_dropout_seed", "seq_dropout", "dropout streams", ("torch.manual_seed(1234 + group.rank())  # every rank has tokens of its own\n", "torch.manual_seed(1234)\n"))
bug("bug_15_heads_view", "dtensor", "depends on the layout", ("w(x).view(b, t, -1, DIM)", "w(x).view(b, t, HEADS, -1)"))
bug("bug_16_muon_part", "muon", "local statistics", ("                dim, world = self.dims[p], self.group.size()\n                if dim is not None and world > 1:\n                    parts = [torch.empty_like(buffer) for _ in range(world)]\n                    dist.all_gather(parts, buffer.contiguous(), group=self.group)\n                    update = orthogonal(torch.cat(parts, dim)).chunk(world, dim)[self.group.rank()]\n                else:\n                    update = orthogonal(buffer)\n                p.add_(update,", "                p.add_(orthogonal(buffer),"))
bug("bug_17_stale_optimizer", "fsdp", "not updated", ("    model = Model()\n    if world", "    model = Model()\n    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, foreach=False)\n    if world"), ("    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, foreach=False)\n    return", "    return"))
bug("bug_18_tied_mean", "pipe", "averaged instead of summed", ("dist.all_reduce(model.embed.weight.grad, group=group)", "dist.all_reduce(model.embed.weight.grad, group=group)\n            model.embed.weight.grad /= world"))
bug("bug_19_layer_index", "pipe", "another layer's function", ("self.layers[str(index)] = Block(index)", "self.layers[str(index)] = Block(local)"))
bug("bug_20_zigzag_rotary", "ring", "other positions", ("        q, k = rotate(q, where), rotate(k, where)\n", "        at = torch.arange(x.shape[1]) + self.group.rank() * x.shape[1]\n        q, k = rotate(q, at), rotate(k, at)\n"))
bug("bug_21_gather_backward", "ring", "missing all-reduce of a gradient", ('''        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
''','''        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, grad):
'''), ("; the gradient of a part is summed over the ranks that used it", ""))
bug("bug_22_expert_scale", "moe", "unscaled mean", ('''                dist.all_reduce(p.grad, group=group)
            p.grad /= world
''','''                dist.all_reduce(p.grad, group=group)
                p.grad /= world
'''))
bug("bug_23_double_mean", "fsdp", "wrong divisor", ("(loss * world).backward()", "loss.backward()"))
bug("bug_24_local_norm", "dtensor", "norm misses parameters", ("[p.grad for p in ps]", "[p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in ps]"))
bug("bug_25_scale_grads", "pipe", "wrong divisor", (", scale_grads=False)", ")"))
bug("bug_26_sum_of_norms", "pipe", "norm of roots", ("        dist.all_reduce(square, group=group)\n        norm = square.sqrt()\n", "        norm = square.sqrt()\n        dist.all_reduce(norm, group=group)\n"))
bug("bug_27_label_shift", "ring", "other indices", ("    labels = F.pad(tokens[:, 1:], (0, 1), value=IGNORE)\n", ""), ("    mine, labels = tokens[:, where], labels[:, where]\n", "    mine = tokens[:, where]\n    labels = F.pad(mine[:, 1:], (0, 1), value=IGNORE)\n"))
bug("bug_28_aux_part", "moe", "local statistics", ("        dist.all_reduce(fraction, group=self.group)\n        fraction = fraction / (len(x) * world)\n", "        fraction = fraction / len(x)\n"))
bug("bug_29_knorm_sum", "llama_tp", "gradients not summed", ('name.endswith(("q_norm.weight", "k_norm.weight"))', 'name.endswith("q_norm.weight")'))
bug("bug_30_norm_repeats", "llama_tp", "norm repeats parameters", ('''        split = sum(p.grad.square().sum() for p in model.parameters() if hasattr(p, "sharded"))
        dist.all_reduce(split, group=group)
        whole = sum(p.grad.square().sum() for p in model.parameters() if not hasattr(p, "sharded"))
        norm = (split + whole).sqrt()
''','''        square = sum(p.grad.square().sum() for p in model.parameters())
        dist.all_reduce(square, group=group)
        norm = square.sqrt()
'''))


def write(folder):
    """Write each bug as NAME.py, beside what it imports."""
    for name in (*BUGS, "common", "gqa"):
        Path(folder, f"{name}.py").write_text(text_of(name))


def text_of(name):
    if name not in BUGS:
        return Path(__file__).with_name(f"{name}.py").read_text()
    family, pairs = BUGS[name]
    text = text_of(family)
    for old, new in pairs:
        assert text.count(old) == 1, (name, old)
        text = text.replace(old, new)
    return text
