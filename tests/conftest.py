"""Settings of every test: no hub; the same made-up examples in every run, however long a busy machine takes.

HYPOTHESIS_PROFILE=explore python -m pytest        # other examples each time
"""

import os

from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
settings.register_profile("repository", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repository"))
