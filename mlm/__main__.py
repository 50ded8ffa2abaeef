"""`python -m mlm` equals `mlm`."""

import signal
import sys


def main() -> int:
    """Run `mlm`. A signal that arrives before `mlm.cli.entry` handles it waits, and kills nothing."""
    if hasattr(signal, "pthread_sigmask"):
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    from mlm.cli import main as run  # after the line above, as imports take time

    return run()


if __name__ == "__main__":
    sys.exit(main())
