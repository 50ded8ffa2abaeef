"""What every settings class needs: fields, values as keys, errors, import paths."""
