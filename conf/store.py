"""What the yaml files refer to: the option classes under `<group>/<name>_schema`, and two interpolations."""

import os

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from conf import environments, policy, schema


def register() -> None:
    """Give Hydra the option classes, and OmegaConf `${rank_tag:}` and `${rank_level:}`.

    `rank_tag` sets a rank's log file apart (empty on rank 0, `-rank3` on rank 3); `rank_level` is the level of what
    reaches the screen, where rank 0 alone is heard below ERROR.
    """
    OmegaConf.register_new_resolver("rank_tag", lambda: f"-rank{_rank()}" if _rank() else "", replace=True)
    OmegaConf.register_new_resolver("rank_level", lambda: "ERROR" if _rank() else "INFO", replace=True)
    store = ConfigStore.instance()
    for group, name, node in [
        (None, "sft_schema", schema.SFTConfig),
        (None, "grpo_schema", policy.GRPOConfig),
        ("model", "tiny_schema", schema.TinyModelConfig),
        ("model", "tiny_warm_schema", schema.TinyWarmConfig),
        ("model", "hf_schema", schema.HFModelConfig),
        ("model", "smollm2_schema", schema.SmolLM2Config),
        ("data", "files_schema", schema.DataConfig),
        ("data", "hub_schema", schema.HubDataConfig),
        ("collate", "collate_schema", schema.CollateConfig),
        ("attention", "attention_schema", schema.AttentionConfig),
        ("positions", "positions_schema", schema.PositionsConfig),
        ("loss", "cross_entropy_schema", schema.CrossEntropyConfig),
        ("loss", "importance_sampling_schema", policy.ImportanceSamplingConfig),
        ("loss", "ppo_schema", policy.PPOConfig),
        ("loss", "cispo_schema", policy.CISPOConfig),
        ("loss", "gspo_schema", policy.GSPOConfig),
        ("loss", "dro_schema", policy.DROConfig),
        ("advantage", "advantage_schema", policy.AdvantageConfig),
        ("environment", "largest_digit_schema", environments.LargestDigitConfig),
        ("environment", "arithmetic_schema", environments.ArithmeticConfig),
        ("environment", "calculator_schema", environments.CalculatorConfig),
        ("environment", "reasoning_gym_schema", environments.ReasoningGymConfig),
        ("environment", "math_schema", environments.MathConfig),
        ("environment", "rows_schema", environments.RowsConfig),
        ("rollout", "hf_schema", policy.HFRolloutConfig),
        ("rollout", "vllm_schema", policy.VLLMRolloutConfig),
        ("optim", "adamw_schema", schema.OptimConfig),
        ("scheduler", "constant_schema", schema.SchedulerConfig),
        ("scheduler", "decaying_schema", schema.DecayingSchedulerConfig),
        ("scheduler", "wsd_schema", schema.WSDSchedulerConfig),
        ("train", "train_schema", schema.TrainConfig),
        ("eval", "eval_schema", schema.EvalConfig),
        ("eval", "policy_schema", policy.PolicyEvalConfig),
        ("checkpoint", "checkpoint_schema", schema.CheckpointConfig),
        ("logger", "logger_schema", schema.LoggerConfig),
        ("logger", "wandb_schema", schema.WandbConfig),
    ]:
        typed = OmegaConf.structured(node)
        if "extras" in typed:
            OmegaConf.set_struct(typed.extras, False)  # the free-form place: `extras.anything=1` needs no `+`
        for mapping in ("rewards", "options"):  # of names that nobody knows beforehand
            if group == "environment" and mapping in typed:
                OmegaConf.set_struct(typed._get_node(mapping), False)
        store.store(group=group, name=name, node=typed)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
