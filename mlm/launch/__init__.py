"""Starting a job on all its ranks, stopping it, and reporting failures."""
