"""Environments: what a policy is asked, and what its answers are worth (docs/environments.md)."""
