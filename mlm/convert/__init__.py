"""Files of other libraries, both ways, and what a name holds."""
