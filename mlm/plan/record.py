"""A plan as JSON: what each rank issues, its timeline, and the numbers."""

from dataclasses import asdict
from typing import Any

from mlm.parallel.pipeline.actions import Action, Instruction, Plan, Send
from mlm.plan.config import PlanScheduleConfig
from mlm.plan.numbers import closed_bubble, rank_numbers


def record(plan: Plan, config: PlanScheduleConfig) -> dict[str, Any]:
    """All of a plan in values that JSON holds; times in the unit of the costs."""
    formula = closed_bubble(config)
    return {
        "format": "mlm-schedule-1",
        "settings": {key: value for key, value in asdict(config).items() if key != "out"},
        "bubble": plan.bubble,
        "bubble_formula": {"formula": formula.words, "value": formula.value, "exact": formula.holds},
        "makespan": plan.makespan,
        "ranks": [
            {
                **asdict(numbers),
                "instructions": [instruction_record(instruction) for instruction in instructions],
                "timeline": [
                    {**action_record(span.action), "start": span.start, "end": span.end} for span in spans
                ],
            }
            for numbers, instructions, spans in zip(
                rank_numbers(plan), plan.instructions, plan.timeline, strict=True
            )
        ],
    }


def instruction_record(instruction: Instruction) -> dict[str, Any]:
    """What a rank issues: do (compute, send, receive), op, chunk, micro_batch, peer."""
    if isinstance(instruction, Action):
        return {"do": "compute", **action_record(instruction)}
    verb = "send" if isinstance(instruction, Send) else "receive"
    return {"do": verb, **action_record(instruction.action), "peer": instruction.peer}


def action_record(action: Action) -> dict[str, Any]:
    """An action's op as F, B or W, its chunk and micro-batch."""
    return {"op": action.op.value, "chunk": action.chunk, "micro_batch": action.micro_batch}
