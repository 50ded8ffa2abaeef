"""`mlm finetune chat`: equal to a plain loop of `transformers`, packed or not, at every layout."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers

from mlm.cli import main
from mlm.finetune import training
from mlm.finetune.batches import ExampleOrder
from mlm.finetune.config import FinetuneConfig, FinetuneScheduleConfig
from mlm.finetune.inputs import load_body, read_splits, read_start, tokenize_split
from mlm.finetune.packing import AnswerLoss, PackedBatch, Packer, first_fit
from mlm.finetune.splits import TaskSplit, TokenizedSplit, held_out_part, read_split
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.sharding import parameter_shards
from mlm.training.pipelined import PipelinedModel
from mlm.util.errors import UserError
from tests.data.chats import CHATML, theirs
from tests.finetune.chats import POSITIONS, chat_task, chatting, write_llama
from tests.finetune.material import TALK, write_rows
from tests.finetune.runs import GPT2, check_layout, finetune, json_lines, losses, read, weights, write_model
from tests.slow import slow_but

SHORT = {"epochs": 1, "global_batch_size": 8}


@pytest.fixture(scope="module")
def folder(chats: Path) -> Path:
    """Runs of one process: `alone`, and `alone-experts` of a mixture of experts."""
    for model, name in (("llama", "alone"), ("mixtral", "alone-experts")):
        finetune(chatting(chats, ckpt=str(chats / model), out=str(chats / name), train=SHORT))
    return chats


def evaluation(config: FinetuneConfig) -> TokenizedSplit:
    return tokenize_split(config.task, read_splits(config)[config.task.train], read_start(config))


@pytest.mark.parametrize("kind", slow_but({0}, ["llama", "mixtral"]))
def test_losses_equal_a_plain_loop_of_transformers(folder: Path, kind: str) -> None:
    """Ten steps in float32, rows of each step alone in their sequences there and packed here."""
    constant = FinetuneScheduleConfig(decay="constant", warmup=0.0)
    config = chatting(
        folder,
        ckpt=str(folder / kind),
        out=str(folder / f"sft-{kind}"),
        schedule=constant,
        precision=PrecisionConfig(dtype="fp32"),
    )
    result = finetune(config)
    order = ExampleOrder(evaluation(config).examples, batch_size=4, sort_batches=1, seed=config.seed)
    rows = [row["messages"] for row in json_lines(folder / "chat/train.jsonl")]
    tokenizer = theirs(folder / kind)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / kind)
    given = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=given.lr, betas=given.betas, eps=given.eps, weight_decay=0.0
    )
    found = []
    for step in range(10):
        sums, count = torch.zeros(()), 0
        for number in order.batch(step):
            said = tokenizer.apply_chat_template(
                rows[number], return_dict=True, return_assistant_tokens_mask=True
            )
            ids = torch.tensor([said["input_ids"]])
            labels = ids.masked_fill(torch.tensor([said["assistant_masks"]]) == 0, -100)
            logits = model(ids).logits
            sums = sums + F.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum", ignore_index=-100)
            count += int((labels[0, 1:] != -100).sum())
        optimizer.zero_grad()
        (sums / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), given.clip_grad_norm)
        optimizer.step()
        found.append(float(sums.detach() / count))
    assert losses(Path(config.out)) == pytest.approx(found, rel=0, abs=1e-5)
    assert found[-1] < found[0] - 0.1  # it learns: losses of nothing would be equal too
    assert result["scores"]["validation"].keys() == {"loss", "perplexity"}


def summed(
    config: FinetuneConfig, packer: Packer
) -> tuple[float, int, list[torch.Tensor], list[PackedBatch]]:
    """Loss of all conversations summed, scored tokens, gradients, and the micro-batches."""
    start, ctx = read_start(config), ParallelContext()
    model = PipelinedModel(start.model, ParallelConfig(), PrecisionConfig(dtype="fp64"), ctx)
    shards = [shard for chunk in model.chunks for shard in parameter_shards(chunk, ctx.tp)]
    load_body(shards, start.source, ctx)
    objective = AnswerLoss(ctx, torch.float64)
    examples = evaluation(config).examples
    order = sorted(range(len(examples)), key=lambda n: -len(examples[n].texts[0]))
    batches = packer.micro_batches(examples, order, 0)
    losses = [
        objective.output(model.chunks[0], batch, torch.ones(1, dtype=torch.float64), None, None)  # type: ignore[arg-type]
        for batch in batches
    ]
    torch.cat(losses).sum().backward()
    count = sum(objective.counts(batch)[0] for batch in batches)
    gradients = [shard.parameter.grad for shard in shards if shard.parameter.grad is not None]
    return torch.cat(losses).sum().item(), count, gradients, batches


def test_packing_changes_neither_loss_nor_gradients(folder: Path) -> None:
    config = chatting(folder)
    packer = partial(Packer, rank=0, size=1, budget=2 * POSITIONS)
    packed, alone = (summed(config, packer(length=length)) for length in (POSITIONS, 1))
    assert len(packed[3]) < len(alone[3])
    assert any(batch.ends is not None for batch in packed[3])
    assert all(batch.ends is None for batch in alone[3])
    assert packed[1] == alone[1]
    assert packed[0] == pytest.approx(alone[0], rel=1e-12)
    torch.testing.assert_close(packed[2], alone[2], rtol=1e-10, atol=1e-10)


LAYOUTS = {
    "tp2-pp2-sp": ParallelConfig(tp=2, pp=2, sequence_parallel=True),
    "pp2-dp2-zero2": ParallelConfig(pp=2, dp=2, zero=2),
    "experts": ParallelConfig(dp=2, ep=2),
}


@pytest.mark.parametrize("layout", slow_but({1, 2}, LAYOUTS))
def test_run_is_the_same_at_every_layout(folder: Path, tmp_path: Path, layout: str) -> None:
    """Losses, weights and scores, in float64. Steps of 8, 8 and 4 conversations: some ranks have none."""
    ckpt, alone = ("mixtral", "alone-experts") if layout == "experts" else ("llama", "alone")
    runs = [folder / alone, tmp_path]
    parallel, ckpt = LAYOUTS[layout], str(folder / ckpt)
    check_layout(chatting(folder, ckpt=ckpt, out=str(tmp_path), parallel=parallel, train=SHORT), runs[0])
    whole, split = (read(out / "result.json") for out in runs)
    assert split["best_step"] == whole["best_step"]
    assert split["scores"]["validation"] == pytest.approx(whole["scores"]["validation"], rel=1e-9)
    best_whole, best_split = (weights(out / "best" / "checkpoints") for out in runs)
    torch.testing.assert_close(best_split, best_whole, rtol=1e-7, atol=1e-9)


def test_single_file_holds_out_the_share_of_its_conversations_that_was_typed(tmp_path: Path) -> None:
    """0.575 * 100 is 57.49999999999999, and 57.5 rounds to even."""

    def part_of(name: str, file: Path, share: float = 0.1) -> TaskSplit:
        task = chat_task(held_out=share)
        return held_out_part(task, read_split(task, name, path=str(file)), str(file))

    rows = [{"messages": [{**TALK[0], "content": str(n % 30)}, TALK[1]]} for n in range(40)]
    file = write_rows(tmp_path / "conversations.jsonl", rows)
    train, held = (part_of(name, file) for name in ("train", "validation"))
    mine, others = ({row.texts for row in split.rows} for split in (train, held))
    assert len(others) == 3  # of 30 distinct ones
    assert not mine & others
    assert len(train) + len(held) == 40
    again = part_of("validation", write_rows(tmp_path / "other.jsonl", rows[::-1]))
    assert {row.texts for row in again.rows} == others
    assert held.note == f"{file}: {len(held)} of 40 conversations are validation"
    rows = [{"messages": [{**TALK[0], "content": str(n)}, TALK[1]]} for n in range(100)]
    assert len(part_of("validation", write_rows(file, rows), 0.575)) == 58


def test_command_trains_on_one_file_and_evaluates_what_it_held_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = shutil.copy(folder / "chat/train.jsonl", tmp_path / "talks.jsonl"), tmp_path / "out"
    with open(file, "a") as f:
        f.write('{"messages": []}\n')
    words = [f"ckpt={folder / 'llama'}", "task.held_out=0.2", "train.epochs=1", "dist.device=cpu"]
    words += ["train.global_batch_size=8", "optimizer.lr=1e-2", "data.bad_rows=skip"]
    assert main(["finetune", "chat", f"data={file}", f"out={out}", *words]) == 0
    printed = capsys.readouterr().out
    assert f"{file}: 16 of 20 conversations are train" in printed
    scores = read(out / "result.json")["scores"]["validation"]
    assert main(["eval", "chat", f"ckpt={out}", "dist.device=cpu"]) == 0
    (found,) = read(out / "eval-chat.json")["results"]
    assert found["rows"] == 4
    assert found["metrics"] == pytest.approx(scores, rel=1e-6)


def test_answers_beyond_the_context_are_truncated_and_counted(folder: Path, tmp_path: Path) -> None:
    long = {"messages": [TALK[0], {**TALK[1], "content": "cat " * 90}]}
    late = {"messages": [{**TALK[0], "content": "cat " * 90}, TALK[1]]}
    write_rows(tmp_path / "train.jsonl", [long, late, {"messages": TALK}])
    write_rows(tmp_path / "validation.jsonl", [{"messages": TALK}])
    found = evaluation(chatting(folder, data={"path": str(tmp_path)}))
    assert len(found.examples[0].texts[0]) == POSITIONS
    assert found.examples[0].texts[0].tokens.base is None  # of a longer array, which it would keep
    assert [example.row for example in found.examples] == [0, 2]
    note = (
        f"{tmp_path}: 2 of 3 rows of train were truncated to 96 tokens, 1 of them left out: no answer begins"
    )
    assert found.notes()[-1].startswith(note)
    assert f"{tmp_path}: 1 rows of train: an answer was cut" in found.notes()


def problem_of(config: FinetuneConfig) -> str:
    problems = training.preflight(config)
    if not problems:
        with pytest.raises(UserError) as error:
            training.tokenize_inputs(config, read_start(config), read_splits(config))
        problems = list(error.value.problems)
    assert len(problems) == 1
    assert "\n" not in problems[0]
    return problems[0]


def test_conversation_whose_answers_a_template_leaves_out_is_named_by_file_and_line(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role + ':' }}"
        "{% generation %}{{ m.content if m.role == 'assistant' }}{% endgeneration %}{% endfor %}"
    )
    rows = [{"messages": TALK}, {"messages": [TALK[0], {**TALK[1], "content": ""}]}]
    write_llama(tmp_path / "llama", template)
    write_rows(tmp_path / "chat" / "train.jsonl", rows)
    write_rows(tmp_path / "chat" / "validation.jsonl", rows[:1])
    found = problem_of(chatting(tmp_path))
    assert found.startswith(f"{tmp_path / 'chat' / 'train.jsonl'}:2: ")
    assert "renders its answers as no text" in found


REJECTS = (
    "{% for m in messages %}{% if 'no' in m.content %}{{ raise_exception('no such talk') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_rows_that_cannot_be_read_or_rendered_are_problems_together_or_skipped_and_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A template rejects three, one cannot be read, two are good, one of them without its null."""
    write_llama(tmp_path / "llama", REJECTS)
    bad = {"messages": [{**TALK[0], "content": "no"}, TALK[1]]}
    tools = {"messages": TALK, "tools": [{"name": "f", "strict": None}]}
    rows = [bad, {"messages": TALK}, bad, {"messages": TALK[:1]}, bad, tools]
    file = write_rows(tmp_path / "chat" / "train.jsonl", rows)
    write_rows(tmp_path / "chat" / "validation.jsonl", rows[1:2])
    config = chatting(tmp_path, train=SHORT)
    found = training.preflight(config)
    assert [line.split(": ")[0].rpartition(":")[2] for line in found] == ["4", "1", "3", "5"]
    assert "has no message of the assistant" in found[0]
    assert all("chat_template fails (no such talk)" in line for line in found[1:])
    assert found[-1].endswith("; data.bad_rows=skip leaves such rows out")

    config = replace(config, data=replace(config.data, bad_rows="skip"))
    assert len(evaluation(config).examples) == 2
    notes = finetune(config)["notes"]
    skipped = [note for note in notes if note.startswith("skipped ")]
    assert [note.split(": ")[0] for note in skipped] == [f"skipped {file}:{line}" for line in (4, 1, 3, 5)]
    assert f"{config.data.path}: 4 rows of train skipped (data.bad_rows=skip)" in notes
    assert f"{config.data.path}: 1 rows of train: nulls removed from tools" in " ".join(notes)
    assert f"{config.data.path}: 1 rows of train: tools rendered by " in " ".join(notes)
    printed = capsys.readouterr().out
    assert all(" ".join(note.split()[:3]) in printed for note in notes)


def test_base_without_a_template_trains_with_the_built_in_one(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_llama(tmp_path / "llama", None)
    given = {"ckpt": str(tmp_path / "llama"), "out": str(tmp_path / "out"), "train": SHORT}
    config = chatting(folder, data={"chat_template": "chatml"}, **given)
    finetune(config)
    saved = theirs(tmp_path / "out/best").apply_chat_template(TALK, tokenize=False)
    assert saved == "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\nsat on the mat<|im_end|>\n"
    assert "chat template chatml" not in capsys.readouterr().out  # its own token ends a turn
    write_model(tmp_path / "gpt2", GPT2)
    config = replace(config, ckpt=str(tmp_path / "gpt2"), out=str(tmp_path / "other"))
    finetune(config)
    line = "chat template chatml: a turn ends with <|endoftext|>, as the vocabulary has no <|im_end|>"
    assert line in capsys.readouterr().out


def test_template_is_needed_and_may_be_given_to_a_model_that_reads_from_left_to_right(
    folder: Path, tmp_path: Path
) -> None:
    write_llama(tmp_path / "llama", None)
    config = chatting(folder, ckpt=str(tmp_path / "llama"), out=str(tmp_path / "out"), train=SHORT)
    found = problem_of(config)
    assert found.startswith(f"data.chat_template=null: {tmp_path / 'llama'} holds no chat template")
    file = tmp_path / "chatml.jinja"
    file.write_text(CHATML)
    config = replace(config, data=replace(config.data, chat_template=str(file)))
    finetune(config)
    file.write_text(CHATML + "{# other #}")  # a run that resumes keeps its template
    assert "another chat template" in problem_of(config)
    write_model(tmp_path / "bert")
    bert = chatting(folder, ckpt=str(tmp_path / "bert"), out=str(tmp_path / "other"))
    assert "does not read from left to right" in problem_of(bert)


def test_conversations_are_packed_in_as_few_sequences_as_first_fit_finds() -> None:
    assert first_fit([9, 6, 5, 4, 3, 1], 10) == [[0, 5], [1, 3], [2, 4]]
    assert first_fit([12, 3], 10) == [[0], [1]]
