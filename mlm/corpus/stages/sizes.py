"""How much each task of a stage has to do, in the unit its progress counts."""

from mlm.corpus.stages.markers import counts_of
from mlm.corpus.stages.plan import Plan


def units_of(plan: Plan, stage: str) -> list[int]:
    """Units of every task of a stage; the stages before it are done."""
    match stage:
        case "clean":
            many = plan.stages["clean"].tasks
            return [max(1, sum(s.end - s.begin for s in plan.shards_of(task))) for task in range(many)]
        case "tokenise":
            cleaned = plan.stages["clean"]
            return [max(1, count["kept_bytes"]) for count in counts_of(cleaned.folder, cleaned.tasks)]
        case "verify":
            tasks = plan.stages["verify"].tasks
            documents = counts_of(plan.stages["group"].folder, 1)[0]["documents"]
            return [max(1, documents // tasks)] * tasks
        case "merge":
            tokenised = plan.stages["tokenise"]
            counts = counts_of(tokenised.folder, tokenised.tasks)
            return [max(1, sum(count["parts"][part]["tokens"] for count in counts)) for part in plan.parts]
        case _:
            return [1] * plan.stages[stage].tasks
