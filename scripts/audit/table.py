"""The evidence for `mlm audit`: healthy layouts and planted bugs of code that is not ours, audited.

    python scripts/audit/table.py scripts/results/audit.json
    python scripts/audit/table.py scripts/results/audit.json core  # those of core.py again

A healthy case holds if the audit finds nothing, a bug if its cause is named. Exit code 1 if one does not.
picotron's and nanotron's layouts are judged where PICOTRON and NANOTRON name checkouts of them, those of
torchtitan and DeepSpeed where they are installed.
"""

import json
import os
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from mlm.util.errors import UserError
from mlm.verify.audit.api import audit

HERE = Path(__file__).parent
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
    ("position_offset", TP, "positions begin again"),
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
    ("same_samples", DP, "the same part on each rank"),
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
GROUPED = (("heads_not_summed", {"tp": 4}, "gradients not summed"),)
BUGS = (
    *(("grouped", *case) for case in GROUPED),
    *(("plain_trainer", *case) for case in PLANTED),
    *(("gqa_trainer", *case) for case in GQA),
    *(("core", *case) for case in CORE),
    *(("picotron_llama", *case) for case in PICOTRON),
)


def judge(file: str, function: str, layout: dict[str, int], cause: str) -> dict:
    begin = time.monotonic()
    try:
        outcome = audit(f"{HERE / file}.py:{function}", **layout)
    except UserError as error:
        found, sentence = "not judged", str(error)
    else:
        found = "" if outcome.finding is None else outcome.finding.cause
        sentence = outcome.sentence
    holds = found == cause
    row = {"subject": f"{file}.py:{function}", "layout": " ".join(f"{a}={n}" for a, n in layout.items())}
    row |= {
        "holds": holds,
        "cause": found,
        "sentence": sentence,
        "seconds": round(time.monotonic() - begin, 1),
    }
    print("holds" if holds else "DOES NOT HOLD", row["subject"], row["layout"], sentence, flush=True)
    return row


def main(out: str, *files: str) -> int:
    """Judge the cases of some files, or of all; rows of others stay as they are."""
    kept = json.loads(Path(out).read_text()) if files and Path(out).exists() else {"healthy": [], "bugs": []}
    cases = {"healthy": [(*case, "") for case in HEALTHY], "bugs": BUGS}
    result: dict = {"task": "audit", "hold": {}}
    for name, each in cases.items():
        new = [judge(*case) for case in each if not files or case[0] in files]
        rows = [row for row in kept[name] if row["subject"].partition(".")[0] not in files] + new
        result[name] = rows
        result["hold"][name] = f"{sum(row['holds'] for row in rows)} of {len(rows)}"
    result["versions"] = {name: version(name) for name in ("mlm", "torch", "transformers", "megatron-core")}
    Path(out).write_text(json.dumps(result, indent=1) + "\n")
    print(result["hold"])
    return int(not all(row["holds"] for name in cases for row in result[name]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
