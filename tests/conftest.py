"""Settings of every test: no hub, and examples that may take as long as a busy machine makes them."""

import os

from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
settings.register_profile("repository", deadline=None)
settings.load_profile("repository")
