"""`mlm-lm-eval`: lm-eval's own command line, with our checkpoints as its model `mlm`."""

import sys
from importlib import import_module

from mlm.util.errors import UserError

EXTRA = "pip install 'mlm[lm-eval]'"


def main() -> int:
    """Run lm-eval on this process's arguments; return the exit code."""
    try:
        import_module("mlm.evaluate.lm_eval.adapter")
        command = import_module("lm_eval.__main__")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("lm_eval", "tqdm"):
            raise
        print(f"mlm-lm-eval: lm-eval is not installed: {EXTRA}", file=sys.stderr)
        return 2
    try:
        command.cli_evaluate()
    except UserError as error:
        for line in str(error).splitlines():
            print(f"mlm-lm-eval: {line}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0
