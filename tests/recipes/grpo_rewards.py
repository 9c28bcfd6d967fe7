"""Rewards of the tests, in which a random model's completions differ, and environments that are wrong."""

import time
import zlib

from recipes.environments.environment import Environment, Problem, WeightedReward


def parity(completions, rows):
    return [float(zlib.crc32(completion.encode()) % 2) for completion in completions]


def level(completions, rows):
    return [zlib.crc32(completion.encode()) % 7 / 7 for completion in completions]


def constant(completions, rows):
    return [1.0] * len(completions)


def sometimes(completions, rows):
    """Rewards some, abstains on some, fails on some."""
    rewards = []
    for completion in completions:
        kind = zlib.crc32(completion.encode()) % 4
        if kind == 3 and len(completions) == 1:
            raise ValueError("cannot judge this")
        if kind == 3:
            raise ValueError("one of them cannot be judged")
        rewards.append(None if kind == 2 else float(kind))
    return rewards


def one_for_all(completions, rows):
    return [1.0]


def slow(completions, rows):
    time.sleep(60)


def wrong_rewards(config, seed):
    return Environment("wrong", [Problem("p", ({"role": "user", "content": "x"},), {})], [], {"r": parity})


def wrong_problems(config, seed):
    return Environment("wrong", [{"prompt": "x"}], [], {"r": WeightedReward("grpo_rewards.parity")})


def raising(config, seed):
    raise RuntimeError("no")
