"""A trained model at any layout: load, generate, score; api.py is the Python API."""
