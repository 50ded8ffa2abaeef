"""What a run wrote into its metrics."""

import json
from pathlib import Path
from typing import Any


def records(out: str | Path, *kinds: str) -> list[dict[str, Any]]:
    lines = map(json.loads, Path(out, "metrics.jsonl").read_text().splitlines())
    return [record for record in lines if record["kind"] in kinds]


def losses(out: str | Path) -> list[float]:
    return [record["loss"] for record in records(out, "step")]
