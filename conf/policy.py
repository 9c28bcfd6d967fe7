"""Options of training by policy gradients (`python -m recipes.grpo`): objective, advantages, rollouts, environment.

The groups shared with supervised fine-tuning stand in `conf.schema`, the shipped environments in `conf.environments`.
This module imports no torch.
"""

from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Any
from urllib.parse import urlsplit

from omegaconf import MISSING

from conf.closed import ConfigError
from conf.ranges import above_zero, at_least, fraction, from_zero, one_of
from conf.schema import (
    Aggregation,
    CommonConfig,
    CrossEntropyConfig,
    LossConfig,
    Scope,
    TinyWarmConfig,
)

# ------------------------------------------------------------------------------------------------------------- choices


class KLEstimator(Enum):
    """How the divergence from the reference is estimated at a token (docs/losses.md)."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class KLPlace(Enum):
    """Where the divergence from the reference counts: as a term of the loss, or as a deduction from the reward."""

    loss = "loss"
    reward = "reward"


class Correction(Enum):
    """What is done with the ratio of trainer to sampler: nothing, cut at a cap, or leave out what lies outside."""

    none = "none"
    truncate = "truncate"
    mask = "mask"


class Level(Enum):
    """Whether a ratio belongs to a token or to its whole sequence."""

    token = "token"
    sequence = "sequence"


class Std(Enum):
    """Standard deviation with n - 1 (sample) or n (population) in the denominator."""

    sample = "sample"
    population = "population"


class ZeroVariance(Enum):
    """Groups whose rewards are all equal: kept, dropped, or dropped and replaced by further prompts up to a bound."""

    keep = "keep"
    drop = "drop"
    refill = "refill"


class Overlong(Enum):
    """Completions that were cut off: trained like others, masked (weight 0), or with a penalty that grows before."""

    keep = "keep"
    mask = "mask"
    penalty = "penalty"


class Unfinished(Enum):
    """Reward of a completion that was cut off: 0, or what the reward functions say."""

    zero = "zero"
    score = "score"


class WeightSync(Enum):
    """How weights reach a server: all of them as a folder that it can read, or a LoRA adapter."""

    disk = "disk"
    lora = "lora"


# -------------------------------------------------------------------------------------------------------------- losses


@dataclass
class KLConfig:
    """Divergence from a frozen reference: the model as the run began, or the base under LoRA adapters."""

    coef: float = 0.0  # factor; 0: no reference is kept
    estimator: KLEstimator = KLEstimator.k3  # k1 belongs to place=reward, k2 and k3 to place=loss
    place: KLPlace = KLPlace.loss  # a term of the loss, or a deduction from the reward

    def __post_init__(self) -> None:
        from_zero("loss.kl.coef", self.coef)
        if self.place == KLPlace.reward and self.estimator != KLEstimator.k1:
            raise ConfigError(
                f"loss.kl.estimator={self.estimator.name} with loss.kl.place=reward: the reward takes k1; give "
                "loss.kl.estimator=k1"
            )


@dataclass
class PolicyLossConfig(LossConfig):
    """What the policy-gradient losses share: divergence from a reference, correction of the sampler's mismatch."""

    kl: KLConfig = field(default_factory=KLConfig)  # divergence from the reference
    correction: Correction = Correction.none  # of the difference between sampler and trainer
    correction_level: Level = Level.token  # ratio of a token, or of its whole sequence
    correction_cap: float = 2.0  # largest ratio
    correction_low: float = 0.0  # mask only: smallest ratio

    def __post_init__(self) -> None:
        super().__post_init__()
        above_zero("loss.correction_cap", self.correction_cap)
        from_zero("loss.correction_low", self.correction_low)
        check_correction(self.correction.value, low=self.correction_low, cap=self.correction_cap)


@dataclass
class ImportanceSamplingConfig(PolicyLossConfig):
    """Policy gradient with the importance ratio, unclipped."""

    _target_: str = "recipes.losses.importance_sampling.ImportanceSampling"


@dataclass
class ClippedLossConfig(PolicyLossConfig):
    """Losses that clip the ratio to [1 - clip_low, 1 + clip_high]."""

    clip_low: float = 0.2  # 1 - clip_low is the smallest ratio
    clip_high: float = 0.2  # 1 + clip_high is the largest ratio

    def __post_init__(self) -> None:
        super().__post_init__()
        fraction("loss.clip_low", self.clip_low, closed=True)
        from_zero("loss.clip_high", self.clip_high)


@dataclass
class PPOConfig(ClippedLossConfig):
    """The clipped surrogate of PPO."""

    _target_: str = "recipes.losses.ppo.PPO"
    dual_clip: float | None = None  # above 1: largest multiple of |A| that a negative advantage costs

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dual_clip is not None and not 1 < self.dual_clip < inf:
            raise ConfigError(f"loss.dual_clip={self.dual_clip}: accepted are numbers above 1, or null")


@dataclass
class CISPOConfig(ClippedLossConfig):
    """Policy gradient with a clipped ratio as a constant factor, so that no token loses its gradient."""

    _target_: str = "recipes.losses.cispo.CISPO"
    clip_low: float = 1.0  # 1 - clip_low is the smallest factor
    clip_high: float = 4.0  # 1 + clip_high is the largest factor


@dataclass
class GSPOConfig(ClippedLossConfig):
    """PPO with one ratio a sequence: the geometric mean of its tokens' ratios."""

    _target_: str = "recipes.losses.gspo.GSPO"
    aggregation: Aggregation = Aggregation.sequence  # what the step's sum is divided by (docs/losses.md)
    clip_low: float = 3e-4  # 1 - clip_low is the smallest ratio
    clip_high: float = 4e-4  # 1 + clip_high is the largest ratio
    variant: Level = Level.sequence  # token: the gradient is that of each token's own log-probability


@dataclass
class DROConfig(PolicyLossConfig):
    """Policy gradient with a quadratic penalty on the distance from the sampling policy."""

    _target_: str = "recipes.losses.dro.DRO"
    beta: float = 0.05  # strength of the penalty

    def __post_init__(self) -> None:
        super().__post_init__()
        from_zero("loss.beta", self.beta)


# ------------------------------------------------------------------------------------------------------ other groups

_HAS_WARM_UP = tuple(f"recipes.environments.{name}" for name in ("largest_digit", "arithmetic", "calculator"))
WARM_UP_FALLBACK = f"{_HAS_WARM_UP[0]}.warm_up_rows"
"""Rows for an environment that shows no answers itself."""

ADVANTAGES = ("group_mean", "grpo", "rloo", "batch_std", "reinforce_pp", "none")
NEEDS_GROUP = ("group_mean", "grpo", "rloo", "batch_std")


@dataclass
class AdvantageConfig:
    """From rewards to advantages; `name` is the group option."""

    name: str = MISSING  # the group option sets it
    std: Std = Std.sample  # of the normalised ones
    eps: float = 1e-6  # added to a standard deviation

    def __post_init__(self) -> None:
        one_of("advantage.name", self.name, ADVANTAGES, "choose another by advantage=<name>")
        from_zero("advantage.eps", self.eps)


@dataclass
class RolloutConfig:
    """Sampling: groups of completions of each prompt."""

    _target_: str = MISSING  # function that builds the sampler
    prompts_per_step: int = 32  # prompts a rollout batch, over all ranks
    group_size: int = 8  # completions a prompt
    temperature: float = 1.0  # of the sampler and of the trainer's log-probabilities
    top_p: float = 1.0  # below 1: needs loss.correction
    top_k: int = 0  # above 0: needs loss.correction
    max_new_tokens: int = 16  # of a turn
    max_staleness: int = 0  # policy versions that a sample may be old; 0: sampling and training take turns
    recompute_logprobs: bool | None = None  # old_logprobs by the trainer before the first update; null: if corrected
    batch_size: int = 256  # sequences sampled together
    epochs: int = 1  # passes over a rollout batch
    zero_variance: ZeroVariance = ZeroVariance.keep  # groups whose rewards are all equal
    max_refills: int = 3  # refill only: further rounds of prompts
    overlong: Overlong = Overlong.keep  # completions that were cut off
    penalty_tokens: int | None = None  # overlong=penalty: tokens before the limit over which the penalty grows to 1
    show: int = 4  # completions of the newest batch shown in a table
    show_every: int = 25  # rollout batches between two tables; 0: none

    def __post_init__(self) -> None:
        for name in ("prompts_per_step", "group_size", "max_new_tokens", "batch_size", "epochs", "max_refills"):
            at_least(f"rollout.{name}", getattr(self, name), 1)
        for name in ("max_staleness", "top_k", "show", "show_every"):
            at_least(f"rollout.{name}", getattr(self, name), 0)
        above_zero("rollout.temperature", self.temperature)
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"rollout.top_p={self.top_p}: accepted are numbers above 0 up to 1")
        if (self.overlong == Overlong.penalty) != (self.penalty_tokens is not None):
            raise ConfigError(
                f"rollout.overlong={self.overlong.name}, rollout.penalty_tokens={self.penalty_tokens}: penalty_tokens "
                "belongs to overlong=penalty; set both or neither"
            )
        if self.penalty_tokens is not None and not 1 <= self.penalty_tokens <= self.max_new_tokens:
            raise ConfigError(
                f"rollout.penalty_tokens={self.penalty_tokens}: accepted are whole numbers from 1 to "
                f"rollout.max_new_tokens={self.max_new_tokens}"
            )

    @property
    def renormalises(self) -> bool:
        """Whether the sampler draws from less than the whole vocabulary."""
        return self.top_p < 1 or self.top_k > 0


@dataclass
class HFRolloutConfig(RolloutConfig):
    """Generation in this process with the model in training."""

    _target_: str = "recipes.rollouts.hf.build"


@dataclass
class VLLMRolloutConfig(RolloutConfig):
    """Running vLLM servers."""

    _target_: str = "recipes.rollouts.vllm.build"
    servers: list[str] = field(default_factory=lambda: ["http://127.0.0.1:8000"])  # addresses
    model: str | None = None  # name that the servers use; null: model.name
    sync: WeightSync = WeightSync.disk  # how weights reach the servers
    sync_dir: str | None = None  # folder that the servers can read; null: weights/ in the run folder
    timeout_s: float = 120.0  # of a request
    retries: int = 5  # of a request, with growing pauses
    backoff_s: float = 0.5  # first pause, doubled each time
    concurrency: int = 32  # requests under way together

    def __post_init__(self) -> None:
        super().__post_init__()
        above_zero("rollout.timeout_s", self.timeout_s)
        from_zero("rollout.backoff_s", self.backoff_s)
        at_least("rollout.retries", self.retries, 0)
        at_least("rollout.concurrency", self.concurrency, 1)
        if not self.servers:
            raise ConfigError("rollout.servers=[]: give at least one address, for example [http://127.0.0.1:8000]")
        for server in self.servers:
            if not _is_address(server):
                raise ConfigError(
                    f"rollout.servers: {server} is no address; accepted are those like http://127.0.0.1:8000"
                )


@dataclass
class EnvironmentConfig:
    """Prompts and rewards."""

    _target_: str = MISSING  # function (config, seed) -> Environment
    rewards: dict[str, Any] = field(default_factory=dict)  # name -> {function, weight}; the first one is the accuracy
    system_prompt: str | None = None  # first message of every prompt
    train_size: int | None = None  # problems to train on; null: the environment's own number
    eval_size: int | None = None  # held-out problems; null: the environment's own number
    unfinished: Unfinished = Unfinished.zero  # reward of a completion that was cut off
    timeout_s: float = 10.0  # of a call of a reward function

    def __post_init__(self) -> None:
        above_zero("environment.timeout_s", self.timeout_s)
        for name in ("train_size", "eval_size"):
            if getattr(self, name) is not None:
                at_least(f"environment.{name}", getattr(self, name), 1)
        _check_rewards(self.rewards)


@dataclass
class PolicyEvalConfig:
    """Evaluation on held-out prompts: greedy, sampled, and pass@k."""

    every_steps: int = 0  # 0: no evaluation at all
    max_rows: int | None = None  # the first n held-out problems
    samples: int = 4  # completions a problem at rollout.temperature, for the sampled reward and pass@k; 0: greedy alone
    show_samples: int = 3  # completions printed after each evaluation

    def __post_init__(self) -> None:
        for name in ("every_steps", "samples", "show_samples"):
            at_least(f"eval.{name}", getattr(self, name), 0)
        if self.max_rows is not None:
            at_least("eval.max_rows", self.max_rows, 1)


@dataclass
class GRPOConfig(CommonConfig):
    """Policy-gradient training from rewards: `python -m recipes.grpo`."""

    environment: EnvironmentConfig = MISSING  # prompts and rewards
    rollout: RolloutConfig = MISSING  # rollout=hf|vllm
    advantage: AdvantageConfig = MISSING  # advantage=group_mean|grpo|rloo|batch_std|reinforce_pp|none
    eval: PolicyEvalConfig = MISSING  # eval=policy

    def __post_init__(self) -> None:
        super().__post_init__()
        self._choose_warm_up()
        rollout, loss = self.rollout, self.loss
        if self.attention.scope == Scope.xdoc:
            raise ConfigError(
                "attention=xdoc in recipes.grpo: a ratio needs the context that the sampler had; use "
                "attention=per_document"
            )
        if isinstance(loss, CrossEntropyConfig):
            raise ConfigError(
                "loss=cross_entropy in recipes.grpo: it reads neither advantages nor logprobs, so rewards would have "
                "no effect; use importance_sampling, ppo, grpo, dapo, cispo, gspo or dro"
            )
        if rollout.group_size == 1 and self.advantage.name in NEEDS_GROUP:
            raise ConfigError(
                f"rollout.group_size=1 with advantage={self.advantage.name}: its baseline needs a group of at least 2; "
                "raise the size, or use advantage=reinforce_pp or none"
            )
        samples, update = rollout.prompts_per_step * rollout.group_size, self.train.global_batch_size
        if update is not None and samples % update:
            raise ConfigError(
                f"train.global_batch_size={update} does not divide the {samples} samples of a rollout batch "
                f"(rollout.prompts_per_step={rollout.prompts_per_step} x rollout.group_size={rollout.group_size})"
            )
        correction = loss.correction if isinstance(loss, PolicyLossConfig) else Correction.none
        if correction != Correction.none and rollout.recompute_logprobs is False:
            raise ConfigError(
                f"loss.correction={correction.name} with rollout.recompute_logprobs=false: without old logprobs of the "
                "trainer there is no mismatch to correct; leave recompute_logprobs out"
            )
        if isinstance(rollout, VLLMRolloutConfig) and rollout.sync == WeightSync.lora and self.model.lora.rank == 0:
            raise ConfigError(
                "rollout.sync=lora with model.lora.rank=0: there is no adapter to hand over; use sync=disk"
            )
        if rollout.zero_variance != ZeroVariance.keep:
            self._check_zero_variance()
        if rollout.renormalises and correction == Correction.none:
            raise ConfigError(
                f"rollout.top_p={rollout.top_p}, rollout.top_k={rollout.top_k}: the sampler's log-probabilities would "
                "be of another kind than the trainer's; give loss.correction=truncate or mask, or top_p=1 and top_k=0"
            )

    def _check_zero_variance(self) -> None:
        """Groups of equal rewards are worth nothing under a group baseline alone."""
        key = f"rollout.zero_variance={self.rollout.zero_variance.name}"
        if self.advantage.name not in NEEDS_GROUP:
            raise ConfigError(
                f"{key} with advantage={self.advantage.name}: without a baseline of the group, one of equal rewards is "
                f"trained on like others; use zero_variance=keep, or one of {', '.join(NEEDS_GROUP)}"
            )
        if isinstance(self.loss, PolicyLossConfig) and self.loss.kl.coef > 0 and self.loss.kl.place == KLPlace.reward:
            raise ConfigError(
                f"{key} with loss.kl.place=reward: the divergence tells the completions of such a group apart; use "
                "zero_variance=keep, or loss.kl.place=loss"
            )

    def _choose_warm_up(self) -> None:
        """A model that is warmed up learns the form of this environment's answers, if it shows any."""
        if isinstance(self.model, TinyWarmConfig) and self.model.rows is None:
            module = self.environment._target_.rpartition(".")[0]
            self.model.rows = f"{module}.warm_up_rows" if module in _HAS_WARM_UP else WARM_UP_FALLBACK

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps a rollout batch."""
        samples = self.rollout.prompts_per_step * self.rollout.group_size
        return self.rollout.epochs * (samples // (self.train.global_batch_size or samples))

    @property
    def recomputes_logprobs(self) -> bool:
        """Whether the trainer scores a rollout batch before its first update."""
        corrects = isinstance(self.loss, PolicyLossConfig) and self.loss.correction != Correction.none
        return corrects if self.rollout.recompute_logprobs is None else self.rollout.recompute_logprobs


def check_correction(correction: str, *, low: float, cap: float) -> None:
    """Refuse bounds of the correction that do not go together."""
    if low > 0 and correction == "truncate":
        raise ConfigError(
            f"loss.correction_low={low} with loss.correction=truncate: a lower bound belongs to loss.correction=mask"
        )
    if low > cap:
        raise ConfigError(f"loss.correction_low={low} is above loss.correction_cap={cap}")


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # a port that is no port
        return False


def _check_rewards(rewards: Any) -> None:
    shape = "a mapping like {correct: {function: my_rewards.correct, weight: 1.0}}"
    if not isinstance(rewards, dict) or not rewards:
        raise ConfigError(f"environment.rewards={rewards!r}: accepted is {shape}")
    for name, reward in rewards.items():
        key = f"environment.rewards.{name}"
        if not isinstance(reward, dict) or not isinstance(reward.get("function"), str):
            raise ConfigError(f"{key}={reward!r}: accepted is {shape}")
        if unknown := sorted(reward.keys() - {"function", "weight"}):
            raise ConfigError(f"unknown key {key}.{unknown[0]}; a reward has function, weight")
        weight = reward.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not -inf < weight < inf:
            raise ConfigError(f"{key}.weight={weight!r}: accepted are finite numbers")
        if str(name) in ("mean", "std", "frac_zero_std", "errors"):
            raise ConfigError(f"{key}: reward/{name} is a metric of its own; choose another name")
