"""A cluster of two nodes on one machine, and what is planted in the jobs that run on it."""
