"""The page of runs: `mlm report`."""
