#!/usr/bin/env bash
# Bring a SLURM cluster of two nodes up on this machine, plant faults in its jobs, and record what comes of them:
#   scripts/slurm/rehearse.sh [--only CASE …] [--list]
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-.venv/bin/python}" scripts/slurm/rehearse.py "$@"
