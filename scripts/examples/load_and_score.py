"""A trained model in a notebook: generate, compute logits, score documents.

python scripts/examples/load_and_score.py runs/shakespeare
"""

import sys

import torch

import mlm

model = mlm.load(sys.argv[1])  # a run, a checkpoint, or a Hugging Face folder or id
print(model)

# Text: the same as `mlm generate` prints for the same seed.
print(model.generate("ROMEO.", max_new_tokens=20, temperature=0.7, seed=1))
for text in model.generate(["To be", "or not"], max_new_tokens=8, temperature=0):
    print(repr(text))

# Logits: [B, S] token ids -> [B, S, V].
tokens = torch.tensor([model.tokenizer.encode("To be, or not to be")])
probabilities = model.logits(tokens)[0, -1].softmax(-1)
for p, token in zip(*probabilities.topk(3), strict=True):
    print(f"{model.tokenizer.decode([int(token)])!r} follows with probability {p:.3f}")

# Scores: log-likelihoods in nats; the higher, the better the model predicts the document.
documents = ["To be, or not to be", "be not To or be, to"]
for document, score in zip(documents, model.score(documents), strict=True):
    print(f"{score:8.2f}  {document}")
