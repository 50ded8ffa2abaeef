"""`python -m mlm.evaluate.lm_eval`, the same as `mlm-lm-eval`."""

import sys

from mlm.evaluate.lm_eval import main

sys.exit(main())
