"""Files and who owns them, errors, terminal, hashing."""
