"""The evidence for `mlm audit`: healthy layouts and planted bugs of code that is not ours, audited.

    python scripts/audit/table.py scripts/results/audit.json
    python scripts/audit/table.py scripts/results/audit.json core  # those of core.py again

A healthy case holds if the audit finds nothing, a bug if its cause is named. Exit code 1 if one does not.
picotron's and nanotron's layouts are judged where PICOTRON and NANOTRON name checkouts of them, those of
torchtitan and DeepSpeed where they are installed.
"""

import json
import os
import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from mlm.util.errors import UserError
from mlm.verify.audit.host import Outcome, audit_layouts, load_build
from mlm.verify.config import AuditConfig

HERE = Path(__file__).parent
sys.path.append(str(HERE))
from held_out import bugs  # noqa: E402
from plain_trainer import bugs_of  # noqa: E402

WRITTEN = TemporaryDirectory()
bugs.write(WRITTEN.name)
TP, DP, PP, CP = {"tp": 2}, {"dp": 2}, {"pp": 2}, {"cp": 2}
PARALLEL = (TP, DP, TP | DP, PP, TP | PP)
PLAIN = (*((layout, "build") for layout in PARALLEL), ({"tp": 4, "dp": 2}, "healthy_sequence_parallel"))
INSTALLED = {
    "picotron_llama": "PICOTRON" in os.environ,
    "nanotron_blocks": "NANOTRON" in os.environ,
    "titan": find_spec("torchtitan"),
    "deepspeed_zero": find_spec("deepspeed"),
}
"""True of those that can be judged here."""
RIGHT = {
    "plain_trainer": PLAIN,
    "gqa_trainer": (
        (TP | DP, "build"),
        (CP, "build"),
        (TP, "healthy_float32_norms healthy_bf16_norms"),
        (DP | CP, "healthy_bf16_norms"),
    ),
    "healthy": (
        (DP, "torch_ddp torch_fsdp2"),
        (TP, "torch_tp torch_tp_sequence"),
        (TP | DP, "torch_fsdp2_tp mlm_gpt2"),
        (CP, "mlm_gpt2"),
    ),
    "plans": ((TP, "llama qwen3 mistral qwen3_moe"),),
    "core": (
        (TP | DP, "healthy"),
        (TP, "healthy_swiglu_rms"),
        (DP, "healthy_per_token healthy_mtp_per_token healthy_moe"),
    ),
    "schedules": (
        (PP | DP, "one_f_one_b"),
        (PP, "gpipe interleaved looped_bfs interleaved_zero_bubble zbv_zero_bubble dual_pipe_v"),
        (DP, "contiguous one_sample_each strided"),
    ),
    "grouped": (({"tp": 4}, "build"), (TP | DP, "fsdp2_beside_tp")),
    "wrapped": (
        (DP, "ddp_static_graph ddp_recomputed ddp_reentrant ddp_checkpoint_wrapper ddp_frozen ddp_tied"),
        (DP, "ddp_compiled ddp_accumulated ddp_zero_optimizer accelerate_ddp"),
        (DP, "fsdp2_recomputed fsdp2_gradients_sharded fsdp2_compiled fsdp2_bf16 accelerate_fsdp2"),
        ({"dp": 4}, "fsdp2_hybrid"),
        (TP, "split_loss tp_compiled"),
        (CP, "ulysses"),
    ),
    "picotron_llama": [(layout, "build") for layout in PARALLEL[:4]],
    "nanotron_blocks": [(layout, "build") for layout in PARALLEL[:3]],
    "titan": ((TP, "llama"), (DP, "llama"), (TP | DP, "recomputed")),
    "deepspeed_zero": ((DP, "stage1 stage2"),),
}
FAMILIES = (
    *(DP, "ddp zero fsdp moe amp autocast"),
    *(TP, "llama_tp gqa seq seq_dropout dtensor muon"),
    *(PP, "pipe"),
    *(CP, "ring cp_plain"),
    *(TP | DP, "tpdp"),
)
LAYOUTS = {
    f: layout for layout, names in zip(FAMILIES[::2], FAMILIES[1::2], strict=True) for f in names.split()
}
"""Of the trainers in held_out."""
HEALTHY = (
    *(
        (file, function, layout)
        for file, rows in RIGHT.items()
        for layout, functions in rows
        for function in functions.split()
        if INSTALLED.get(file, True)
    ),
    *((f"held_out/{family}", "build", layout) for family, layout in LAYOUTS.items()),
)
BUGS = (
    *(
        (f"held_out/{name}", "build", LAYOUTS[bugs.BUGS[name][0]], cause)
        for name, cause in bugs.CAUSES.items()
    ),
    ("grouped", "heads_not_summed", {"tp": 4}, "gradients not summed"),
    *(
        (trainer, name, {axis: 2}, cause)
        for trainer in ("plain_trainer", "gqa_trainer")
        for name, (axis, cause) in bugs_of(trainer).items()
    ),
    ("core", "label_smoothing", TP, "another number"),
    ("core", "gathered_logits", TP, "gathered logits in a split loss"),
    ("core", "mean_of_local_means", DP, "ranks weighed unequally"),
    # its PipelineParallel draws weights of attention and MLPs anew: every tp rank's shards from one seed
    *((("picotron_llama", "build", TP | PP, "shards begin equal"),) if INSTALLED["picotron_llama"] else ()),
)


def judge(file: str, function: str, layout: dict[str, int], cause: str) -> dict:
    path = HERE / f"{file}.py"
    path = path if path.exists() else Path(WRITTEN.name, path.name)
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        try:
            outcome, seconds = pool.submit(audited, f"{path}:{function}", layout).result()
        except UserError as error:
            found, sentence, seconds = "not judged", str(error), 0.0
        else:
            found, sentence = "" if outcome.finding is None else outcome.finding.cause, outcome.sentence
    holds = found == cause
    row = {"subject": f"{file}.py:{function}", "layout": " ".join(f"{a}={n}" for a, n in layout.items())}
    row |= {"holds": holds, "cause": found, "sentence": sentence, "processor_seconds": round(seconds, 1)}
    print("holds" if holds else "DOES NOT HOLD", row["subject"], row["layout"], sentence, flush=True)
    return row


def audited(build: str, layout: dict[str, int]) -> tuple[Outcome, float]:
    """The audit, and the time of processors that it took without imports of torch and mlm."""
    torch.set_num_threads(1)
    outcome = audit_layouts(load_build(build), AuditConfig(build=build, **layout))[0]
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return outcome, sum(each.ru_utime + each.ru_stime for each in used)


def main(out: str, *files: str) -> int:
    """Judge the cases of files whose names begin so, or of all; rows of others stay as they are."""
    kept = json.loads(Path(out).read_text()) if files and Path(out).exists() else {"healthy": [], "bugs": []}
    cases = {"healthy": [(*case, "") for case in HEALTHY], "bugs": BUGS}
    result: dict = {"task": "audit", "hold": {}}
    for name, each in cases.items():
        new = [judge(*case) for case in each if not files or case[0].startswith(files)]
        rows = [row for row in kept[name] if not row["subject"].startswith(files or "")] + new
        result[name] = rows
        result["hold"][name] = f"{sum(row['holds'] for row in rows)} of {len(rows)}"
    result["versions"] = {name: version(name) for name in ("mlm", "torch", "transformers", "megatron-core")}
    Path(out).write_text(json.dumps(result, indent=1) + "\n")
    print(result["hold"])
    return int(not all(row["holds"] for name in cases for row in result[name]))


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
