"""Compare conversations with `transformers` and TRL, for each chat template and form of row.

    python scripts/compare_chat_templates.py [FOLDER or FILE.jinja …]

Without arguments the templates are those that the installed TRL knows. The tokenizer is one of bytes, with
the special tokens that a template's text spells out. Printed is a table for the record: "equal" where the ids
are those of `apply_chat_template` and the answers those of TRL, else why not. The answers of TRL are: of
messages the {% generation %} blocks of its training variant, of prompts with completions what follows the
tokens of the prompt (SFTTrainer), of preferences the same of both answers (DPOTrainer).
"""

import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import yaml
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from mlm.config.build import build
from mlm.config.paths import CONFIG_DIR
from mlm.data.chat_files import find_chat_template
from mlm.data.chat_template import ChatError
from mlm.data.tokenizer import Tokenizer
from mlm.finetune.chat import CHAT, PREFERENCES
from mlm.finetune.config import TaskConfig
from mlm.finetune.examples import Frame
from mlm.finetune.rows import ExampleError, RowError

FAMILIES = (
    *(
        "chatml",
        "llama3",
        "llama3_1",
        "qwen2_5",
        "qwen3",
        "qwen3_instruct_2507",
        "qwen3_5_think",
        "gemma",
        "gemma3",
    ),
    *("gemma4_v5", "phi3", "phi3_5", "deepseekv3", "gptoss", "cohere2", "glm4moe", "lfm2", "nemotron_3_nano"),
)
NAMES = re.compile(r"<\|[^|<>\s]{1,40}\|>|<｜[^｜]{1,40}｜>|<[a-z_]{1,20}_of_turn>|<\|?turn\|?>|\[/?INST\]")
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
USER, ANSWER = {"role": "user", "content": "Who wrote it?"}, {"role": "assistant", "content": "Bob did."}
MORE = [{"role": "user", "content": "When?"}, {"role": "assistant", "content": "In May."}]
FORMS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [USER, ANSWER]},
    "several turns": {"messages": [USER, ANSWER, *MORE]},
    "assistant first": {"messages": [ANSWER, *MORE]},
    "tools": {
        "messages": [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "3"},
            ANSWER,
        ],
        "tools": [TOOL],
    },
    "completion": {"prompt": [USER, ANSWER, MORE[0]], "completion": [MORE[1]]},
    "preference": {
        "prompt": [USER],
        "chosen": [ANSWER, *MORE],
        "rejected": [{**ANSWER, "content": "No."}, *MORE],
    },
}
TURNS_FOR = ("qwen3", "qwen3_5_think", "glm4moe")
"""Templates that TRL trains with others in place of: with `data.chat_template=turns` compared with those."""


def write_folder(folder: Path, source: str) -> Path:
    """Write a tokenizer of bytes with the special tokens of a template."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: id for id, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    names = sorted({"<s>", "</s>", *NAMES.findall(source)})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", extra_special_tokens=names
    )
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(source)
    return folder


def our_ends(folder: Path, row: dict[str, Any], template: str | None) -> list[tuple[list[int], list[bool]]]:
    """Return ids and answers of each conversation of a row in `mlm`. Raises ChatError, RowError."""
    tokenizer = Tokenizer.load(folder)
    found = find_chat_template(folder, tokenizer, template)
    assert found is not None
    kind, name = (PREFERENCES, "preferences") if "chosen" in row else (CHAT, "chat")
    content = yaml.safe_load((CONFIG_DIR / "task" / f"{name}.yaml").read_text())
    frame = Frame(np.array([], np.int32), np.array([0], np.int32), causal=True, max_length=1 << 20)
    task, tokenizer.chat_template = build(TaskConfig, content), found
    (made,) = kind.make_examples(task, [kind.parse(task, row, "0")], tokenizer, frame)
    if isinstance(made, ExampleError):
        raise made
    (example,) = made[0]
    labels = example.label.texts if "chosen" in row else [example.label]
    return [
        (text.tokens.tolist(), [False, *(np.array(label)[:-1] >= 0).tolist()])
        for text, label in zip(example.texts, labels, strict=True)
    ]


def their_ends(folder: Path, row: dict[str, Any]) -> list[tuple[list[int], list[bool] | None]]:
    """Return the same of `transformers` and TRL; no answers where TRL has no template to train with."""
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl.chat_template_utils import get_training_chat_template
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.sft_trainer import SFTTrainer

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    args = SimpleNamespace(
        dataset_num_proc=None,
        dataset_text_field="text",
        max_length=None,
        assistant_only_loss="messages" in row,
        shuffle_dataset=False,
        truncation_mode="keep_start",
    )
    trainer = SimpleNamespace(chat_template=None, completion_only_loss=True, _tokenizer=tokenizer)
    data = Dataset.from_list([row])
    if "chosen" in row:
        (made,) = DPOTrainer._prepare_dataset(trainer, data, tokenizer, args, "rows")
        begin = len(made["prompt_ids"])
        ends = ([*made["prompt_ids"], *made[name]] for name in ("chosen_ids", "rejected_ids"))
        return [(ids, [n >= begin for n in range(len(ids))]) for ids in ends]
    stock = (
        tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"))["input_ids"]
        if "messages" in row
        else None
    )
    if stock is not None:
        try:
            trainer.chat_template = get_training_chat_template(tokenizer)
        except ValueError:
            return [(stock, None)]
    (made,) = SFTTrainer._prepare_dataset(trainer, data, tokenizer, args, False, None, "rows")
    mask = [label != -100 for label in made["labels"]]
    if stock is not None and stock != made["input_ids"]:
        return [(stock, None), (made["input_ids"], mask)]
    return [(made["input_ids"], mask)]


def outcome(folder: Path, row: dict[str, Any], template: str | None) -> str:
    try:
        theirs = their_ends(folder, row)
    except Exception as error:  # what a template raises, through TRL
        theirs = None
        reason = f"rejected by the template ({' '.join(str(error).split())[:50]})"
    try:
        ours = our_ends(folder, row, template)
    except (ChatError, RowError) as error:
        return reason if theirs is None else f"error: {' '.join(str(error).split())[:400]}"
    if theirs is None:
        return f"read here; {reason}"
    if template is not None:
        theirs = theirs[-1:]
    same_ids = [mine[0] == other[0] for mine, other in zip(ours, theirs, strict=False)]
    if not all(same_ids):
        return "other ids"
    if theirs[0][1] is None:
        return "ids equal; no answers of TRL" if len(theirs) == 1 else "ids equal; TRL trains on others"
    wrong = [(mine, other) for mine, other in zip(ours, theirs, strict=False) if mine[1] != other[1]]
    if not wrong:
        return "equal"
    (ids, mask), (_, wanted) = wrong[0]
    differ = [n for n in range(len(ids)) if mask[n] != wanted[n]]
    words = Tokenizer.load(folder).decode([ids[n] for n in differ])
    return f"ids equal; of the answers {words!r} differs" + (" (ours)" if mask[differ[0]] else " (TRL's)")


def main(paths: list[str]) -> None:
    if not paths:
        import trl

        folder = Path(trl.__file__).parent / "chat_templates"
        paths = [str(folder / f"{name}.jinja") for name in FAMILIES if name != "chatml"]
    files = [
        file
        for path in map(Path, paths)
        for file in (sorted(path.glob("*.jinja")) if path.is_dir() else [path])
    ]
    print("| template | " + " | ".join(FORMS) + " |\n|" + " --- |" * (len(FORMS) + 1))
    for file in files:
        with tempfile.TemporaryDirectory() as made:
            folder = write_folder(Path(made), file.read_text())
            turns = "turns" if file.stem in TURNS_FOR else None
            found = [outcome(folder, row, turns if "messages" in row else None) for row in FORMS.values()]
        print(f"| {file.stem} | " + " | ".join(found) + " |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
