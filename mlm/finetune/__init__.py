"""Finetuning on tasks: GLUE, RACE, SQuAD, conversations, preferences, and custom ones."""
