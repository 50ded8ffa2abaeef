"""The commands `mlm finetune` and `mlm eval TASK`."""

from mlm.cli.command import Command
from mlm.finetune.checks import check_eval_task, check_finetune
from mlm.finetune.config import EvalTaskConfig, FinetuneConfig

COMMANDS = (
    Command(
        words=("finetune",),
        also=("fine_tune",),
        spec=FinetuneConfig,
        target="mlm.finetune.run:run",
        check=check_finetune,
        preflight="mlm.finetune.run:preflight",
        out_is_run_folder=True,
        has_runs=True,
        positional=("task",),
        aliases=(("data", "data.path"),),
        summary="train a model on a task: RACE, GLUE, SQuAD, conversations, or a custom one",
        about=(
            "Puts a new head on a pretrained model and trains both on a task, from the Hub or local files. "
            "On conversations it trains the model's own output layer, on the assistant's answers alone. "
            "Keeps the checkpoint that scores best on the validation split, and resumes when it is started "
            "again. Starts from checkpoints of mlm and from models of Hugging Face. Prints the "
            "scores, and saves them as result.json; with seeds=5 the medians over five seeds."
        ),
        examples=(
            ("Finetune a BERT on RACE, which the Hub supplies", "mlm finetune race ckpt=runs/bert_336m"),
            ("Files, on two ranks", "mlm finetune sst2 ckpt=runs/bert data.path=glue/sst2 tp=2"),
            (
                "The median of five seeds, and predictions to hand in",
                "mlm finetune mnli ckpt=google-bert/bert-base-uncased seeds=5 data.predict_tests=true",
            ),
            (
                "A sweep: each job in its own folder below `out`, and a table of them at the end",
                "mlm finetune --multirun rte ckpt=runs/bert optimizer.lr=1e-5,2e-5,3e-5 "
                "train.global_batch_size=16,32",
            ),
            (
                "Conversations, packed into sequences of 2,048 tokens",
                "mlm finetune chat data=conversations.jsonl ckpt=HuggingFaceTB/SmolLM2-135M-Instruct",
            ),
            ("A run that was stopped, with its own settings", "mlm finetune resume=runs/race"),
            (
                "A task of your own: my_configs/task/reviews.yaml",
                "mlm finetune reviews --config-dir my_configs ckpt=runs/bert data.path=reviews",
            ),
        ),
        keys=(
            *("ckpt", "data.path", "out", "seed", "seeds", "dropout", "train.epochs"),
            *("train.global_batch_size", "train.micro_batch_size", "train.patience", "optimizer.lr"),
            *("schedule.warmup", "data.train_rows", "data.predict_tests", "task.max_length"),
            *("tp", "pp", "dp", "sequence_parallel", "zero", "recompute", "dist.device"),
        ),
    ),
    Command(
        words=("eval",),
        also=("evaluate", "test"),
        spec=EvalTaskConfig,
        target="mlm.finetune.evaluate:run",
        check=check_eval_task,
        preflight="mlm.finetune.evaluate:preflight",
        positional=("task",),
        aliases=(("data", "data.path"),),
        summary="score a finetuned checkpoint on its task, or write its predictions",
        about=(
            "Scores what `mlm finetune` wrote on a split of the task, with its official metrics, or writes "
            "predictions in the form that GLUE and SQuAD take. The scores do not depend on tp, pp, dp or the "
            "batch size. They are printed and saved as JSON."
        ),
        examples=(
            ("Score a finetuned run on the validation split", "mlm eval race ckpt=runs/race"),
            (
                "Predictions of the test split, to hand in",
                "mlm eval sst2 ckpt=runs/sst2 split=test predictions=submission",
            ),
        ),
        keys=(
            *("ckpt", "split", "predictions", "data.path", "out", "batch_size", "task.max_length"),
            *("tp", "pp", "dp", "dist.device"),
        ),
    ),
)
