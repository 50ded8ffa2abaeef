"""Signals by every road, in every phase, to real runs of `mlm pretrain`: nothing may be lost or left behind.

    python scripts/torture_stop.py --layouts tp=2 --phases mid,saving --roads "all TERM,timeout INT"

Each run pauses in a phase until the signal has come; its exit code, its words, the promised checkpoint and
its processes are looked at, and it is started again, by one rank, to its end.
Exit code: 0 nothing was found, 1 something was.
"""

import argparse
import sys
import tempfile
from itertools import product
from pathlib import Path

from torture.signals import ROADS, Work, run

STEPS = 8
PHASES = {
    "importing": "torch",
    "composing": "mlm.config.cli.compose:compose:1",
    "rendezvous": "mlm.launch.rendezvous:call_roll:1",
    "loading": "mlm.training.pretrain.run:resume:1",
    "first": "mlm.training.trainer:Trainer.train_step:1",
    "mid": "mlm.training.trainer:Trainer.train_step:4",
    "last": f"mlm.training.trainer:Trainer.train_step:{STEPS}",
    "validating": "mlm.training.trainer:evaluate:1",
    "saving": "mlm.checkpoint.native.save_load:save_checkpoint:1",
    "finishing": "mlm.training.saver:Saver.finish:1",
    "summary": "mlm.training.pretrain.run:finish_directory:1",
}
WORDS = (
    *("pretrain", "model=gpt2_tiny", "model.vocab_size=64", "model.num_layers=2", "model.hidden_size=16"),
    *("model.num_heads=2", "data=synthetic", "data.seq_length=8", f"train.steps={STEPS}", "out={out}"),
    *("train.global_batch_size=2", "train.micro_batch_size=1", "train.validate_every=3"),
    *("train.validate_batches=3", "schedule.warmup_steps=1", "checkpoint.save_every=2"),
    *("dist.device=cpu", "dist.threads_per_rank=1", "dist.peak_tflops=1"),
)


def main() -> int:
    """Run each layout, phase and road."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layouts", default="dp=1,tp=2", help="dp=1, tp=2, pp=2 or dp=2")
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--roads", default=",".join(ROADS))
    args = parser.parse_args()
    folder, count = Path(tempfile.mkdtemp(prefix="torture-")), 0
    for number, (layout, phase, road) in enumerate(
        product(args.layouts.split(","), args.phases.split(","), args.roads.split(","))
    ):
        work = Work((*WORDS, layout), ranks=int(layout[-1]), steps=STEPS)
        place = folder / str(number)
        outcome = run(work, place / "out", place, PHASES[phase], road)
        count += bool(outcome.found)
        verdict = "; ".join(outcome.found) or "fine"
        print(f"{layout}, {phase}, {road}: {outcome.code}, step {outcome.saved}: {verdict}", flush=True)
    print(f"{count} with findings; the runs stay in {folder}")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
