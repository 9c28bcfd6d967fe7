"""The policy-gradient recipe, whole runs on a random tiny model: layouts, resume, staleness, refusals, records."""

import json
import math
import shutil

import pytest
from safetensors.torch import load_file

TIMES = ("time/", "perf/", "mem/")


def rows_of(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in rows]


def rollouts_of(run_dir, step):
    return [json.loads(line) for line in (run_dir / "rollouts" / f"step-{step:08d}.jsonl").read_text().splitlines()]


def weights_of(run_dir):
    return load_file(run_dir / "final" / "model.safetensors")


def assert_same_run(one, other):
    assert rows_of(one) == rows_of(other)
    names = sorted(path.name for path in (one / "rollouts").iterdir())
    assert names == sorted(path.name for path in (other / "rollouts").iterdir())
    for name in names:
        assert (one / "rollouts" / name).read_text() == (other / "rollouts" / name).read_text()
    mine, theirs = weights_of(one), weights_of(other)
    assert all((mine[name] == theirs[name]).all() for name in mine)


def test_a_run_leaves_metrics_rollouts_and_a_model(grpo, tmp_path):
    assert grpo(tmp_path / "run") == 0
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row["train/grad_norm"] > 0 and row["ratio/on_policy"] is True and row["ratio/clip_frac"] == 0
        assert abs(row["ratio/mean"] - 1) < 1e-4 and row["mismatch/max_abs"] < 1e-4 and row["ratio/ess"] > 0.999
        assert row["entropy/mean"] > 0 and row["rollout/staleness"] == 0
        assert 0 <= row["reward/parity"] == row["reward/mean"] <= 1
    lines = rollouts_of(tmp_path / "run", 2)
    assert len(lines) == 12 and {line["policy_version"] for line in lines} == {1}
    for line in lines:
        assert len(line["token_ids"]) == len(line["logprobs"]) == len(line["sampled"])
        assert line["logprob_kind"] == "full"
        assert {"prompt", "completion", "reward", "advantage"} <= line.keys()
    assert json.loads((tmp_path / "run" / "objective.json").read_text())["name"] == "reward/mean"
    assert (tmp_path / "run" / "final" / "config.json").exists()
    assert json.loads((tmp_path / "run" / "data_ledger.json").read_text())["groups"] == 12


def test_padded_packed_and_split_are_the_same_run(grpo, tmp_path):
    options = ["loss=grpo", "loss.kl.coef=0.1", "rollout.recompute_logprobs=true", "rollout.temperature=0.7"]
    layouts = {
        "padded": [],
        "split": ["train.microbatch_size=5"],
        "packed": ["collate=packed", "collate.max_tokens=128"],
    }
    for name, layout in layouts.items():
        assert grpo(tmp_path / name, *options, *layout) == 0
    for name in ("split", "packed"):
        for one, other in zip(rows_of(tmp_path / "padded"), rows_of(tmp_path / name), strict=True):
            assert one["reward/mean"] == other["reward/mean"]
            assert one["train/loss"] == pytest.approx(other["train/loss"], abs=1e-5)
            assert one["train/grad_norm"] == pytest.approx(other["train/grad_norm"], rel=1e-4)
            assert other["ratio/on_policy"] is True
            assert other["ratio/mean"] == pytest.approx(1.0, abs=1e-6)


def test_ratios_are_exactly_one_where_old_logprobs_are_recomputed(grpo, tmp_path):
    for layout in ([], ["collate=packed"]):
        run_dir = tmp_path / str(len(layout))
        assert grpo(run_dir, "rollout.recompute_logprobs=true", "train.max_steps=2", *layout) == 0
        assert [row["ratio/mean"] for row in rows_of(run_dir)] == [1.0, 1.0]


@pytest.mark.parametrize("stop", [3, 4], ids=["inside a batch", "between batches"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(grpo, tmp_path, stop):
    options = [
        *(
            "loss=grpo",
            "train.global_batch_size=6",
            "rollout.epochs=2",
            "rollout.prompts_per_step=3",
            "loss.kl.coef=0.1",
        ),
        *("rollout.recompute_logprobs=true", "checkpoint.every_steps=1"),
    ]
    assert grpo(tmp_path / "whole", *options, "train.max_steps=9") == 0
    assert grpo(tmp_path / "cut", *options, f"train.max_steps={stop}") == 0
    assert grpo(tmp_path / "cut", *options, "train.max_steps=9", "checkpoint.resume=auto") == 0
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    assert sorted(path.name for path in (tmp_path / "whole" / "rollouts").iterdir()) == [
        "step-00000001.jsonl",
        "step-00000005.jsonl",
        "step-00000009.jsonl",
    ]


def test_another_reference_is_refused_on_resume(grpo, prompts_path, tmp_path, capsys):
    options = ["loss.kl.coef=0.1", "checkpoint.every_steps=1", "model=hf"]
    assert grpo(tmp_path / "first", "train.max_steps=1", "train.seed=5") == 0
    base = tmp_path / "base"
    (tmp_path / "first" / "final").rename(base)
    assert grpo(tmp_path / "run", *options, f"model.name={base}", "train.max_steps=1", small=False) == 0
    assert grpo(tmp_path / "second", "train.max_steps=1", "train.seed=6") == 0
    shutil.rmtree(base)
    (tmp_path / "second" / "final").rename(base)
    more = [f"model.name={base}", "train.max_steps=2", "checkpoint.resume=auto"]
    assert grpo(tmp_path / "run", *options, *more, small=False) == 2
    assert "against another reference" in capsys.readouterr().err


def test_sampling_ahead_is_bounded_and_zero_is_the_synchronous_run(grpo, tmp_path):
    assert grpo(tmp_path / "zero", "rollout.max_staleness=0") == 0
    assert grpo(tmp_path / "default") == 0
    assert_same_run(tmp_path / "zero", tmp_path / "default")
    assert grpo(tmp_path / "ahead", "rollout.max_staleness=1", "train.max_steps=5") == 0
    rows = rows_of(tmp_path / "ahead")
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 1, 1, 1]
    assert [row["rollout/policy_version"] for row in rows] == [0, 0, 1, 2, 3]
    assert [row["ratio/on_policy"] for row in rows] == [True, False, False, False, False]
    assert all(row["rollout/dropped_stale"] == 0 for row in rows)


def test_groups_without_variance_are_kept_dropped_or_refilled(grpo, tmp_path):
    kept, dropped, refilled = (tmp_path / name for name in ("keep", "drop", "refill"))
    for run_dir in (kept, dropped, refilled):
        options = [f"rollout.zero_variance={run_dir.name}", "rollout.group_size=2", "train.max_steps=3"]
        options += ["rollout.max_refills=20"]
        assert grpo(run_dir, *options) == 0
    for row in rows_of(kept):
        assert row["rollout/groups"] == 3 and row["rollout/dropped_zero_std"] == 0
    for one, other in zip(rows_of(kept)[:1], rows_of(dropped)[:1], strict=True):
        flat = round(one["reward/frac_zero_std"] * 3)
        assert flat > 0 and other["rollout/groups"] == 3 - flat and other["rollout/dropped_zero_std"] == flat
        assert other["train/weight_total"] < one["train/weight_total"]
    assert all(row["rollout/groups"] == 3 for row in rows_of(refilled))
    assert sum(row["rollout/dropped_zero_std"] for row in rows_of(refilled)) > 0
    places = [{line["place"] for line in rollouts_of(refilled, step)} for step in (1, 2)]
    assert min(places[1]) == max(places[0]) + 1  # no prompt is skipped or used twice


def test_a_batch_without_any_signal_is_a_counted_step_without_an_update(grpo, tmp_path):
    assert grpo(tmp_path / "run", "rollout.zero_variance=drop", "train.max_steps=2", rewards="constant") == 0
    rows = rows_of(tmp_path / "run")
    assert [row["train/skipped"] for row in rows] == [1, 2]
    assert all(row["train/loss"] is None and row["train/weight_total"] == 0 for row in rows)
    assert all(row["reward/frac_zero_std"] == 1.0 and row["rollout/groups"] == 0 for row in rows)


def test_abstentions_and_failures_are_counted_and_weigh_nothing(grpo, tmp_path):
    assert grpo(tmp_path / "run", "train.max_steps=2", "rollout.group_size=6", rewards="sometimes") == 0
    lines = rollouts_of(tmp_path / "run", 1)
    row = rows_of(tmp_path / "run")[0]
    abstained = [line for line in lines if line["reward"] is None]
    assert row["rollout/abstained"] == len(abstained) > row["reward/errors"] > 0
    assert all(line["is_trained"] is False for line in abstained)
    trained = sum(sum(line["sampled"]) for line in lines if line["is_trained"])
    assert row["train/weight_total"] == trained


def test_cut_off_completions_can_be_masked_and_stay_in_the_baseline(grpo, tmp_path):
    options = ["train.max_steps=1", "environment.unfinished=score", "rollout.max_new_tokens=3"]
    assert grpo(tmp_path / "keep", *options) == 0
    assert grpo(tmp_path / "mask", *options, "rollout.overlong=mask") == 0
    kept, masked = rollouts_of(tmp_path / "keep", 1), rollouts_of(tmp_path / "mask", 1)
    assert [line["advantage"] for line in kept] == [line["advantage"] for line in masked]
    assert any(not line["is_finished"] for line in masked)
    assert all(line["is_trained"] == line["is_finished"] for line in masked)


def test_a_soft_length_penalty_lowers_the_reward(grpo, tmp_path):
    options = ["train.max_steps=1", "environment.unfinished=score", "rollout.overlong=penalty"]
    assert grpo(tmp_path / "run", *options, "rollout.penalty_tokens=2", rewards="constant") == 0
    for line in rollouts_of(tmp_path / "run", 1):
        length = sum(line["sampled"])
        assert line["reward"] == 1.0 - max(0, length - 3) / 2 and line["rewards"] == {"constant": 1.0}


def test_divergence_in_the_reward_moves_advantages_and_not_the_loss(grpo, tmp_path):
    kl = ["loss.kl.coef=0.5", "loss.kl.estimator=k1", "loss.kl.place=reward", "advantage=group_mean"]
    assert grpo(tmp_path / "run", *kl, "train.max_steps=2", "optim.lr=1e-2") == 0
    lines = rollouts_of(tmp_path / "run", 2)
    for place in {line["place"] for line in lines}:
        group = [line for line in lines if line["place"] == place]
        shaped = [g["reward"] - 0.5 * sum(b - r for b, r in zip(g["logprobs"], g["ref_logprobs"])) for g in group]
        mean = math.fsum(shaped) / len(shaped)
        assert [g["advantage"] for g in group] == pytest.approx([value - mean for value in shaped], abs=1e-9)
    assert "kl/ref" in rows_of(tmp_path / "run")[1]


def test_several_updates_and_passes_leave_the_first_policy(grpo, tmp_path):
    options = ["train.global_batch_size=6", "rollout.epochs=2", "train.max_steps=4", "optim.lr=1e-2"]
    assert grpo(tmp_path / "run", *options) == 0
    rows = rows_of(tmp_path / "run")
    assert [row["ratio/on_policy"] for row in rows] == [True, False, False, False]
    assert ["reward/mean" in row for row in rows] == [True, False, False, False]


REFUSED = {
    "environment=nowhere": "environment has no option nowhere",
    "rollout.group_size=1": "its baseline needs a group of at least 2",
    "train.global_batch_size=5": "does not divide the 12 samples",
    "attention=xdoc collate=packed": "attention=xdoc in recipes.grpo",
    "loss=cross_entropy": "reads neither advantages nor logprobs",
    "loss.correction=mask rollout.recompute_logprobs=false": "without old logprobs",
    "rollout.top_p=0.9": "another kind than the trainer's",
    "loss.kl.place=reward loss.kl.coef=0.1": "the reward takes k1",
    "rollout.overlong=penalty": "penalty_tokens",
    "rollout.max_new_tokens=4000": "go beyond the model's context of 2048",
    "environment.path=nowhere.jsonl": "nowhere.jsonl",
    "collate=packed collate.max_tokens=8": "a Datum is never cut",
    "environment.rewards.parity.wieght=2": "environment.rewards.parity.wieght",
    "rollout.temperature=0": "rollout.temperature",
    "rollout.zero_variance=drop advantage=reinforce_pp": "trained on like others",
    "rollout.zero_variance=drop loss.kl.place=reward loss.kl.estimator=k1 loss.kl.coef=0.1": "tells the completions",
    "environment._target_=grpo_rewards.wrong_rewards": "its reward 'r' is no WeightedReward",
    "environment._target_=grpo_rewards.wrong_problems": "is no Problem(id, messages, row)",
    "environment._target_=grpo_rewards.raising": "failed with these options (RuntimeError: no)",
    "rollout=vllm rollout.servers=[foo]": "foo is no address",
    "rollout=vllm rollout.sync=lora": "there is no adapter to hand over",
    "advantage=mean": "advantage has no option mean",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_bad_input_ends_with_2_before_anything_is_left(grpo, tmp_path, capsys, overrides):
    assert grpo(tmp_path / "run", *overrides.split()) == 2
    error = capsys.readouterr().err
    assert REFUSED[overrides] in error and len(error.splitlines()) <= 3, error
    assert not (tmp_path / "run").exists()


def test_a_reward_of_the_wrong_shape_is_found_by_a_dry_call(grpo, tmp_path, capsys):
    assert grpo(tmp_path / "run", rewards="one_for_all") == 2
    assert "expected 3 rewards, got 1" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_prompt_set_without_prompts_is_refused(grpo, tmp_path, capsys):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert grpo(tmp_path / "run", f"environment.path={empty}") == 2
    assert "empty.jsonl" in capsys.readouterr().err


def test_stale_samples_need_a_loss_that_looks_at_logprobs(grpo, tmp_path, capsys):
    own = [
        "loss=importance_sampling",
        "loss._target_=grpo_losses.Reinforce",
        "allow_targets=[grpo_rewards,grpo_losses]",
    ]
    assert grpo(tmp_path / "run", *own, "rollout.max_staleness=1") == 2
    assert "it ignores logprobs" in capsys.readouterr().err
    assert grpo(tmp_path / "run", *own, "train.max_steps=1") == 0


def test_a_server_that_is_not_there_ends_the_run_with_1(grpo, tmp_path, capsys):
    server = ["rollout=vllm", "rollout.servers=[http://127.0.0.1:9]", "rollout.retries=1", "rollout.backoff_s=0.01"]
    assert grpo(tmp_path / "run", *server, "rollout.model=m") == 1
    error = capsys.readouterr().err
    assert "rollout error: " in error and "http://127.0.0.1:9" in error and "Traceback" not in error


def test_the_first_update_is_explained(grpo, tmp_path, capfd):
    assert grpo(tmp_path / "run", "train.max_steps=1", "rollout.show=2") == 0
    text = (tmp_path / "run" / "run.log").read_text()
    for part in ("objective:", "aggregation=token", "example: two prompts", "first update: loss", "rollouts of step 1"):
        assert part in text
    assert "not 0: watch train/grad_norm" in text


def test_an_evaluation_is_greedy_sampled_and_pass_at_k(grpo, tmp_path, prompts_path):
    options = [f"environment.eval_path={prompts_path.parent / 'held.jsonl'}", "eval.every_steps=2", "eval.samples=3"]
    (prompts_path.parent / "held.jsonl").write_text(
        "".join(json.dumps({"prompt": f"Tell {n}"}) + "\n" for n in range(5))
    )
    assert grpo(tmp_path / "run", *options) == 0
    rows = rows_of(tmp_path / "run")
    evaluated = [row for row in rows if "eval/accuracy" in row]
    assert [row["step"] for row in evaluated] == [0, 2, 4]
    for row in evaluated:
        assert 0 <= row["eval/sampled_accuracy"] <= row["eval/pass_at_3"] <= 1
    assert json.loads((tmp_path / "run" / "objective.json").read_text())["name"] == "eval/accuracy"


def test_a_masked_completion_is_scored_all_the_same(grpo, tmp_path):
    """Its divergence counts in the baseline: where policy and reference agree, nothing is moved."""
    options = [
        *("loss.kl.coef=0.5", "loss.kl.estimator=k1", "loss.kl.place=reward", "advantage=rloo", "train.max_steps=1"),
        *("rollout.overlong=mask", "rollout.max_new_tokens=3"),
    ]
    for recompute in ("true", "false"):
        run_dir = tmp_path / recompute
        assert grpo(run_dir, *options, f"rollout.recompute_logprobs={recompute}", rewards="constant") == 0
        lines = rollouts_of(run_dir, 1)
        assert any(not line["is_trained"] for line in lines)
        for line in lines:
            assert line["ref_logprobs"] == pytest.approx(line["logprobs"], abs=1e-5)
            assert line["advantage"] == pytest.approx(0.0, abs=1e-4)


def test_groups_with_too_few_rewards_are_left_out_and_counted_apart(grpo, tmp_path):
    counted = []
    for policy in ("keep", "drop"):
        options = ["train.max_steps=1", "rollout.group_size=2", "rollout.prompts_per_step=6"]
        assert grpo(tmp_path / policy, *options, f"rollout.zero_variance={policy}", rewards="sometimes") == 0
        row = rows_of(tmp_path / policy)[0]
        counted.append(row["rollout/dropped_no_baseline"])
        assert row["rollout/groups"] + row["rollout/dropped_no_baseline"] + row["rollout/dropped_zero_std"] == 6
    assert counted[0] == counted[1] > 0
