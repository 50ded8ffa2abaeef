"""Settings toolbox: fields, values as keys, errors, import paths."""
