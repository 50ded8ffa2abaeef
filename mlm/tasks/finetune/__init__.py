"""Finetuning on tasks: GLUE, RACE, SQuAD, and whatever a YAML of the same form says.

From data to scores: sources.py and nested.py read files and the Hub, parsing.py checks their rows, rows.py makes
splits of them, examples.py (spans.py, choices.py) tokens; predictions.py (answers.py), metrics.py and
submission.py make answers, scores and files of the model's outputs. kinds.py says what a kind of task does at
each step. None of these knows a model.
"""
