"""Evaluations of texts without training on the task: WikiText-103 and LAMBADA, each by two protocols.

sources.py reads the texts, detokenise.py undoes WikiText's tokenisation, wikitext103.py and lambada.py turn
texts into requests and scores into metrics, evaluate.py is the commands, receipt.py what they leave behind.
../README.md has the protocols.
"""
