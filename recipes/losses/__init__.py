"""Objectives: token scores from a model's head, terms per token, and the one normaliser of a step."""
