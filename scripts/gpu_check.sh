#!/usr/bin/env bash
# What CI cannot see: CUDA, NCCL, fused kernels, memory and MFU on one GPU. Writes a report to $1.
# Usage: scripts/gpu_check.sh [REPORT_FOLDER]      (default: scripts/results/gpu)
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-scripts/results/gpu}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

check() {  # check NAME COMMAND…: run it, keep its output, say how it ended
  local name=$1
  shift
  echo "== $name: $*"
  if "$@" >"$out/$name.log" 2>&1; then echo "ok   $name"; else echo "FAIL $name (see $out/$name.log)"; failed=1; fi
}

tiny="model=gpt2_124m data=synthetic train.global_batch_size=16 train.micro_batch_size=8 log.every=5
      train.validate_every=0 schedule.warmup_steps=2 dist.device=cuda"

python - <<'PY' | tee "$out/machine.txt"
import torch
print("torch", torch.__version__, "cuda", torch.version.cuda, "nccl", torch.cuda.nccl.version())
print(torch.cuda.get_device_name(0))
PY
check tests       python -m pytest
check fp32        python -m mlm pretrain $tiny precision=fp32 train.steps=20 out="$work/fp32"
check bf16        python -m mlm pretrain $tiny precision=bf16 train.steps=20 out="$work/bf16"
check fp16        python -m mlm pretrain $tiny precision=fp16 train.steps=60 out="$work/fp16"
check compiled    python -m mlm pretrain $tiny precision=bf16 compile=true train.steps=20 out="$work/compiled"
check recompute   python -m mlm pretrain $tiny precision=bf16 recompute=full train.steps=20 out="$work/recompute"
check resume      python -m mlm pretrain $tiny precision=bf16 train.steps=30 out="$work/bf16"
# Saves every other step: copied on a stream of their own while the next step runs, and resumed bit for bit.
check saves       python -m mlm pretrain $tiny precision=bf16 train.steps=20 checkpoint.save_every=2 out="$work/saves"
check resume-bits python -m mlm verify-resume dist.device=cuda precision=bf16 steps=4 out="$work/verify-resume"
check torchrun    python -m torch.distributed.run --nproc-per-node 1 -m mlm pretrain $tiny precision=bf16 \
                    train.steps=5 out="$work/torchrun"
for layout in "recompute=full" "recompute=selective model.attention_dropout=0.1 model.hidden_dropout=0.1"; do
  check "parity-${layout%% *}" python -m mlm parity $layout dist.device=cuda precision=bf16
done
# Two ranks on one GPU: NCCL refuses that, gloo moves CUDA tensors through the host. The logic, not the speed.
for layout in "tp=2" "tp=2 sequence_parallel=true" "dp=2" "dp=2 zero=3" "pp=2" "pp=2 pipeline=zb_h1"; do
  check "gloo-${layout// /-}" python -m torch.distributed.run --nproc-per-node 2 -m mlm parity $layout \
                    dist.device=cuda dist.backend=gloo precision=fp32
done
check bench       python scripts/bench_train.py --device cuda --dtype bf16 --shape report --out "$out/bench.json"
exit $failed
