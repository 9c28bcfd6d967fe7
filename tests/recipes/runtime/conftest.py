"""Recipes are run in an empty working directory, as rank 0 of 1, and leave the logging of the tests as it was."""

import logging

import pytest


@pytest.fixture(autouse=True)
def _alone_in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "HYDRA_FULL_ERROR"):
        monkeypatch.delenv(name, raising=False)
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.setLevel(level)
    root.handlers[:] = handlers
