"""The random numbers of sampling: one uniform for each position of each rollout, a function of names and nothing else.

Philox, a counter-based generator, is keyed by the seed and by what names a rollout (stream, step, prompt, sample), and
counts positions. So a number depends on neither the batch its rollout is sampled in, nor the rank, nor a resume, nor on
how many tokens were asked for at a time.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.random import Philox
from numpy.typing import NDArray

from recipes.rollouts.sampler import SampleRequest

__all__ = ["batch_uniforms", "uniforms"]

_BLOCK = 4  # numbers that Philox makes of one counter


def uniforms(seed: int, request: SampleRequest, count: int) -> NDArray[np.float64]:
    """Numbers of `count` positions of a rollout, from `request.position` on.

    Returns:
        float64 [count], each a multiple of 2**-53 in [0, 1). They do not depend on `request.prompt_ids` and
        `request.max_new_tokens`.
    """
    return batch_uniforms(seed, [request], count)[0]


def batch_uniforms(seed: int, requests: Sequence[SampleRequest], count: int) -> NDArray[np.float64]:
    """`uniforms` of several requests, float64 [requests, count]."""
    raw = np.empty((len(requests), count), np.uint64)
    for row, request in enumerate(requests):
        block, skipped = divmod(request.position, _BLOCK)
        raw[row] = Philox(key=_key(seed, request), counter=block).random_raw(skipped + count)[skipped:]
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _key(seed: int, request: SampleRequest) -> int:
    """128 bits. Numbers stand before the one free text, so that no two rollouts are written alike."""
    text = f"{seed},{request.step},{request.prompt},{request.sample},{request.stream}"
    return int.from_bytes(blake2b(text.encode(), digest_size=16).digest(), "little")
