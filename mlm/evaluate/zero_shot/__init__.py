"""Evaluations on text without training on the task: WikiText-103 and LAMBADA, each by two protocols.

sources.py reads the texts, wikitext103.py and lambada.py turn texts into requests and scores into metrics
(protocol.py). The guide on evaluation describes the protocols.
"""
