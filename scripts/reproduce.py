"""Run a figure or table of a paper on this machine, and compare it with the paper: see reproduce/README.md.

python scripts/reproduce.py                    # lists the experiments
python scripts/reproduce.py ptdp-bubble        # runs one; Ctrl-C stops, the same command continues
python scripts/reproduce.py ptdp-bubble --dry-run
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # mlm of this checkout, installed or not

from reproduce.main import main  # the folder: Python prefers a package to a module of the same name

if __name__ == "__main__":
    sys.exit(main())
