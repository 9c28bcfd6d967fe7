"""Completions of prompts, sampled from the model in training."""
