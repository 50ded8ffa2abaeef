"""`python -m mlm` equals `mlm`."""

import sys

from mlm.cli import main

if __name__ == "__main__":
    sys.exit(main())
