"""Finetuning on tasks: GLUE, RACE, SQuAD, and whatever a YAML of the same form says.

From data to scores: sources.py and nested.py read files and the Hub, parsing.py checks their records, rows.py
makes splits of them; making.py and spans.py make tokens of those (tokens.py), examples.py gathers them;
answers.py and predictions.py read the model's outputs, metrics.py scores and submission.py writes them.
kinds.py says what a kind of task does at each step; README.md says how to add a task. None knows a model.
"""
