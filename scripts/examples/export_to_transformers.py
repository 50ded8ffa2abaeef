"""A checkpoint as a folder of `transformers`, which then computes the same logits.

python scripts/examples/export_to_transformers.py runs/shakespeare hf/shakespeare
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import mlm

run, folder = sys.argv[1:]
mlm.export_hf(run, folder)  # compares the logits itself, unless verify=False

theirs, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
tokens = tokenizer("To be, or not to be", return_tensors="pt").input_ids
with torch.no_grad():
    difference = (mlm.load(run).logits(tokens) - theirs(tokens).logits).abs().max()
print(f"{folder}: largest difference of a logit {difference:.1e}")
assert difference < 1e-4
