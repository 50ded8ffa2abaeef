"""Settings: compose, check, suggest; cli/ is the command line."""
