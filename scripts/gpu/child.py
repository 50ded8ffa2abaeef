"""The process of one step: calls its function, which reports rows, notes and problems as it goes."""

import ctypes
import importlib
import json
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.record import finite


@dataclass(frozen=True)
class Case:
    """Place of a step, and of its report."""

    device: str
    """cuda or cpu."""
    quick: bool
    """True for tiny sizes: a rehearsal."""
    record: Path
    """The JSON file of the steps before."""
    results: Path
    """JSON lines, one entry each."""

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def scratch(self) -> Path:
        return Path(os.environ.get("GPU_CHECK_SCRATCH", self.results.parent))

    def row(self, table: str, **values: Any) -> None:
        """Add a row to a table, at once: a kill later loses nothing."""
        self._add({"table": table, "row": values})
        shown = (
            f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in values.items()
        )
        print(f"· {table}: {', '.join(shown)}")

    def note(self, text: str) -> None:
        self._add({"note": text})
        print(f"· {text}")

    def problem(self, text: str) -> None:
        self._add({"problem": text})
        print(f"· PROBLEM {text}")

    def _add(self, entry: dict[str, Any]) -> None:
        with self.results.open("a") as file:
            file.write(json.dumps(finite(entry)) + "\n")

    def known(self, step: str, table: str) -> list[dict[str, Any]]:
        """Rows of an earlier step; empty if it did not run."""
        if not self.record.exists():
            return []
        entries = json.loads(self.record.read_text())["steps"].get(step, {}).get("entries", [])
        return [entry["row"] for entry in entries if entry.get("table") == table]


def run(target: str, case: Case) -> int:
    """Call `module:function`; 0, or 1 after reporting what ended it."""
    module, _, name = target.partition(":")
    try:
        getattr(importlib.import_module(module), name)(case)
    except ModuleNotFoundError as error:
        case.problem(f"the package {(error.name or '?').partition('.')[0]} is not installed")
        return 1
    except Exception as error:
        traceback.print_exc()
        case.problem(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")
        return 1
    return 0


def main(words: list[str]) -> int:
    target, results, options = words
    given = json.loads(options)
    record = Path(given.pop("record"))
    return run(target, Case(**given, record=record, results=Path(results)))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    if path := os.environ.get("MLM_FAKE_GPU_KERNELS"):  # fake_gpu.py --kernels
        ctypes.CDLL("libcuda.so.1").fake_list(f"{path}.{os.getpid()}".encode())
    os._exit(code)  # results are written; threads and queues of a device must not keep the process
