"""Mixture of experts: their choice (router.py), the way to them (dispatch.py), their MLPs (experts.py)."""
