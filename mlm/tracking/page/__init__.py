"""`mlm report`: runs as one page for a browser, and as tables in a terminal."""
