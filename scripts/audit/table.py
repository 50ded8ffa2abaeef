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

WRITTEN = TemporaryDirectory()
bugs.write(WRITTEN.name)
PARALLEL = ({"tp": 2}, {"dp": 2}, {"tp": 2, "dp": 2}, {"pp": 2}, {"tp": 2, "pp": 2})
HEALTHY = (
    *(("plain_trainer", "build", layout) for layout in PARALLEL),
    ("plain_trainer", "healthy_sequence_parallel", {"tp": 4, "dp": 2}),
    ("gqa_trainer", "build", {"tp": 2, "dp": 2}),
    ("gqa_trainer", "build", {"cp": 2}),
    ("gqa_trainer", "healthy_float32_norms", {"tp": 2}),
    ("gqa_trainer", "healthy_bf16_norms", {"tp": 2}),
    ("gqa_trainer", "healthy_bf16_norms", {"dp": 2, "cp": 2}),
    ("healthy", "torch_ddp", {"dp": 2}),
    ("healthy", "torch_fsdp2", {"dp": 2}),
    ("healthy", "torch_tp", {"tp": 2}),
    ("healthy", "torch_tp_sequence", {"tp": 2}),
    ("healthy", "torch_fsdp2_tp", {"tp": 2, "dp": 2}),
    ("healthy", "mlm_gpt2", {"tp": 2, "dp": 2}),
    ("healthy", "mlm_gpt2", {"cp": 2}),
    ("plans", "llama", {"tp": 2}),
    ("plans", "qwen3", {"tp": 2}),
    ("plans", "mistral", {"tp": 2}),
    ("plans", "qwen3_moe", {"tp": 2}),
    ("core", "healthy", {"tp": 2, "dp": 2}),
    ("core", "healthy_swiglu_rms", {"tp": 2}),
    ("core", "healthy_per_token", {"dp": 2}),
    ("core", "healthy_mtp_per_token", {"dp": 2}),
    ("core", "healthy_moe", {"dp": 2}),
    ("schedules", "one_f_one_b", {"pp": 2, "dp": 2}),
    ("schedules", "gpipe", {"pp": 2}),
    ("schedules", "interleaved", {"pp": 2}),
    ("schedules", "looped_bfs", {"pp": 2}),
    ("schedules", "interleaved_zero_bubble", {"pp": 2}),
    ("schedules", "zbv_zero_bubble", {"pp": 2}),
    ("schedules", "dual_pipe_v", {"pp": 2}),
    ("schedules", "contiguous", {"dp": 2}),
    ("schedules", "one_sample_each", {"dp": 2}),
    ("schedules", "strided", {"dp": 2}),
    ("grouped", "build", {"tp": 4}),
    ("grouped", "fsdp2_beside_tp", {"tp": 2, "dp": 2}),
    ("wrapped", "ddp_static_graph", {"dp": 2}),
    ("wrapped", "ddp_recomputed", {"dp": 2}),
    ("wrapped", "ddp_reentrant", {"dp": 2}),
    ("wrapped", "ddp_checkpoint_wrapper", {"dp": 2}),
    ("wrapped", "ddp_frozen", {"dp": 2}),
    ("wrapped", "ddp_tied", {"dp": 2}),
    ("wrapped", "ddp_compiled", {"dp": 2}),
    ("wrapped", "ddp_accumulated", {"dp": 2}),
    ("wrapped", "ddp_zero_optimizer", {"dp": 2}),
    ("wrapped", "fsdp2_recomputed", {"dp": 2}),
    ("wrapped", "fsdp2_gradients_sharded", {"dp": 2}),
    ("wrapped", "fsdp2_compiled", {"dp": 2}),
    ("wrapped", "fsdp2_bf16", {"dp": 2}),
    ("wrapped", "fsdp2_hybrid", {"dp": 4}),
    ("wrapped", "split_loss", {"tp": 2}),
    ("wrapped", "tp_compiled", {"tp": 2}),
    ("wrapped", "accelerate_fsdp2", {"dp": 2}),
    ("wrapped", "accelerate_ddp", {"dp": 2}),
    ("wrapped", "ulysses", {"cp": 2}),
    *(("picotron_llama", "build", layout) for layout in PARALLEL[:4] if "PICOTRON" in os.environ),
    *(("nanotron_blocks", "build", layout) for layout in PARALLEL[:3] if "NANOTRON" in os.environ),
    *(("titan", "llama", layout) for layout in PARALLEL[:2] if find_spec("torchtitan")),
    *(("titan", "recomputed", layout) for layout in PARALLEL[2:3] if find_spec("torchtitan")),
    *(("deepspeed_zero", stage, {"dp": 2}) for stage in ("stage1", "stage2") if find_spec("deepspeed")),
)
TP, DP, PP, CP = {"tp": 2}, {"dp": 2}, {"pp": 2}, {"cp": 2}
FAMILIES = {
    "ddp": DP,
    "zero": DP,
    "fsdp": DP,
    "moe": DP,
    "amp": DP,
    "autocast": DP,
    "llama_tp": TP,
    "gqa": TP,
}
FAMILIES |= {"seq": TP, "seq_dropout": TP, "dtensor": TP, "muon": TP, "pipe": PP, "ring": CP, "cp_plain": CP}
FAMILIES |= {"tpdp": TP | DP}
HEALTHY = (*HEALTHY, *((f"held_out/{name}", "build", layout) for name, layout in FAMILIES.items()))
PLANTED = (
    ("mlp_output_not_reduced", TP, "missing all-reduce"),
    ("attention_output_reduced_twice", TP, "doubled all-reduce"),
    ("attention_output_averaged", TP, "averaged instead of summed"),
    ("input_gradient_not_reduced", TP, "missing all-reduce of a gradient"),
    ("reduce_again_in_backward", TP, "doubled all-reduce of a gradient"),
    ("bias_on_every_rank", TP, "bias added on every rank"),
    ("reduced_twice_before_bias", TP, "doubled all-reduce"),
    ("divided_by_root_of_ranks", TP, "wrong divisor"),
    ("qkv_order", TP, "shards permuted"),
    ("local_rms", TP, "local statistics"),
    ("local_softmax", TP, "local statistics"),
    ("sequence_gather_order", TP, "shards permuted"),
    ("norm_gradients_not_reduced", TP, "gradients not summed"),
    ("sum_over_replicas", DP, "unscaled mean"),
    ("mean_of_local_means", DP, "divided by local tokens"),
    ("replicas_not_reduced", DP, "gradients not reduced"),
    ("tied_not_summed", PP, "tied weights not summed"),
    ("norm_misses_shards", TP, "norm misses parameters"),
    ("norm_repeats_copies", TP, "norm repeats parameters"),
    ("weights_by_rank", TP, "weights depend on the rank"),
    ("equal_shards", TP, "shards begin equal"),
    ("dropout_equal", TP, "dropout streams"),
    ("dropout_apart", TP, "dropout streams"),
    ("rate_by_rank", DP, "replicas drift"),
    ("position_offset", TP, "the same part on each rank"),
)
GQA = (
    ("gradients_in_bf16", DP, "reduction in a narrow format"),
    ("decay_twice_beside_bf16_norms", TP, "weight decay"),
    ("norm_skips_kv", TP, "norm misses parameters"),
    ("z_loss_of_own_vocabulary", TP, "local statistics"),
    ("smoothing_over_own_vocabulary", TP, "local statistics"),
    ("mask_of_own_rows", CP, "positions begin again"),
    ("loss_times_own_count", DP, "divided by local tokens"),
    ("kv_gradients_of_own_queries", CP, "gradients not summed"),
    ("norm_of_roots", TP, "norm of roots"),
    ("labels_shifted_in_chunks", CP, "labels at the ends of chunks"),
    ("positions_begin_again", CP, "positions begin again"),
    ("same_samples", DP, "other samples"),
    ("keys_of_own_tokens", CP, "part taken for all"),
    ("gate_and_up_in_one_block", TP, "shards permuted"),
    ("no_decay_on_a_rank", TP, "replicas drift"),
    ("rate_times_replicas", DP, "update scaled"),
    ("norm_without_table", TP, "norm misses parameters"),
    ("head_summed_twice", DP, "unscaled mean"),
    ("stale_half", DP, "replicas drift"),
    ("row_products_in_bf16", TP, "reduction in a narrow format"),
    ("input_gradient_averaged", TP, "averaged instead of summed"),
    ("cp_not_reduced", CP, "gradients not summed"),
    ("clip_by_own_norm", TP, "clipped by another norm"),
    ("update_before_reduction", DP, "gradients not reduced"),
    ("norms_not_reduced_over_cp", CP, "gradients not summed"),
    # found, without a cause: no hypothesis reproduces them
    ("scale_of_own_width", TP, "depends on the layout"),
    ("kv_repeated_by_rank", TP, "depends on the layout"),
)
CORE = (
    ("label_smoothing", TP, "loss"),
    ("gathered_logits", TP, "gathered logits in a split loss"),
    ("mean_of_local_means", DP, "divided by local tokens"),
)
PICOTRON = (("build", {"tp": 2, "pp": 2}, "shards begin equal"),) if "PICOTRON" in os.environ else ()
"""Its PipelineParallel draws the weights of attention and MLPs anew: every tp rank's shards from one seed."""
HELD_OUT = (
    ("01_token_mean", "divided by local tokens"),
    ("02_warmup", "update scaled"),
    ("03_decay_names", "weight decay"),
    ("04_overlap", "other samples"),
    ("05_reduce_in_loop", "micro-batches counted unequally"),
    ("06_unowned", "not updated"),
    ("07_last_bucket", "gradients not reduced"),
    ("08_smoothing", "local statistics"),
    ("09_zloss", "local statistics"),
    ("10_kv_heads", "the same part on each rank"),
    ("11_qnorm_backward", "gradients not summed"),
    ("12_head_gather", "doubled all-reduce of a gradient"),
    ("13_gather_view", "shards permuted"),
    ("14_dropout_seed", "dropout streams"),
    ("16_muon_part", "part taken for all"),
    ("17_stale_optimizer", "not updated"),
    ("18_tied_mean", "averaged instead of summed"),
    ("19_layer_index", "another layer's function"),
    ("21_gather_backward", "gradients not summed"),
    ("22_expert_scale", "unscaled mean"),
    ("23_double_mean", "wrong divisor"),
    ("24_local_norm", "norm misses parameters"),
    ("25_scale_grads", "wrong divisor"),
    ("26_sum_of_norms", "norm of roots"),
    ("27_label_shift", "labels at the ends of chunks"),
    ("29_knorm_sum", "gradients not summed"),
    ("30_norm_repeats", "norm repeats parameters"),
    # found, without a cause
    ("15_heads_view", "depends on the layout"),
    ("20_zigzag_rotary", "depends on the layout"),
    ("28_aux_part", "depends on the layout"),
)
"""Causes after repairs; those of the first judgement are in scripts/results/audit_held_out.json."""
GROUPED = (("heads_not_summed", {"tp": 4}, "gradients not summed"),)
BUGS = (
    *((f"held_out/bug_{n}", "build", FAMILIES[bugs.BUGS[f"bug_{n}"][0]], cause) for n, cause in HELD_OUT),
    ("held_out/torch_all_gather", "build", CP, "depends on the layout"),
    *(("grouped", *case) for case in GROUPED),
    *(("plain_trainer", *case) for case in PLANTED),
    *(("gqa_trainer", *case) for case in GQA),
    *(("core", *case) for case in CORE),
    *(("picotron_llama", *case) for case in PICOTRON),
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
    sys.exit(main(*sys.argv[1:]))
