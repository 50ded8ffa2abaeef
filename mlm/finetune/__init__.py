"""Finetuning on tasks: GLUE, RACE, SQuAD, conversations, and custom ones.

rows.py checks the fields of a record, splits.py makes splits of rows from files and the Hub, with their
examples (examples.py), batches.py makes batches of those. A type of task (task_type.py) is one
object, of classification.py, span.py, chat.py (with packing.py), or a user's own module.
training.py is the loop of one seed, scoring.py makes predictions and metrics, run.py and evaluate.py are the
commands. README.md says where to start reading.
"""
