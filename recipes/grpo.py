"""Policy-gradient training from rewards: GRPO and its relatives.

    python -m recipes.grpo                                                    # the offline demo
    python -m recipes.grpo model=hf model.name=path-or-hub-id environment=math environment.path=problems.jsonl
    python -m recipes.grpo checkpoint.resume=auto hydra.run.dir=outputs/grpo/<run>

prompts -> groups of completions -> rewards -> advantages -> Datums -> the train step of `recipes.sft` -> weights
handed over to the sampler -> again. `train` shows all of it. Which prompts form a rollout batch is a function of (seed,
batch); with rollout=hf each completion is a function of the weights and (seed, batch, prompt, sample), for any number
of ranks.
"""

from pathlib import Path

from conf.policy import GRPOConfig
from conf.schema import NonFinite
from recipes.runtime.entry import recipe


def train(config: GRPOConfig, run_dir: Path) -> float | None:
    """Train, fill the run folder, and return the objective."""
    # Imported here, so that `--cfg job` and TAB completion need no torch.
    import time

    from recipes.losses.statistics import PolicyStatistics
    from recipes.models.build import build_configured_model
    from recipes.rollouts.build import (
        build_environment,
        build_evaluation,
        build_policy_loss,
        build_rewards,
        build_rollouts,
    )
    from recipes.rollouts.notes import announce, conclude, explain_first_step, show_rollouts
    from recipes.rollouts.record import batch_metrics, cut_back_rollouts, metric_names, write_rollouts
    from recipes.rollouts.updates import Updates, set_advantages
    from recipes.runtime.interrupt import Interrupt
    from recipes.runtime.outcome import StopRun, note_first_step
    from recipes.training.notes import not_finite, trace
    from recipes.training.optim import build_optimizer, learning_rates
    from recipes.training.progress import TrainingProgress
    from recipes.training.ranks import largest_over_ranks, prepare_model, seed_step, start_accelerator
    from recipes.training.run import Run, objective_metric
    from recipes.training.step import train_step
    from recipes.training.trackers import require_tracker

    # What is trained, by which rewards, and by which rule.
    require_tracker(config.logger)
    accelerator = start_accelerator(config.train.precision, config.launch.num_processes)
    loss = build_policy_loss(config)
    environment = build_environment(config)
    rewards = build_rewards(config, environment)
    language_model = build_configured_model(config, accelerator.device)
    rollouts = build_rollouts(config, run_dir, environment, rewards, language_model, accelerator)
    evaluation = build_evaluation(config, environment, rollouts, language_model, accelerator)
    reference = rollouts.reference
    model = prepare_model(language_model.scoring, accelerator, unused_parameters=language_model.is_moe)
    optimizer = build_optimizer(language_model.scoring, config.optim)
    batches, num_steps = rollouts.batches, rollouts.batches.num_steps
    learning_rate = learning_rates(config.scheduler, config.optim.lr, num_steps)

    # Where it stands: at the beginning, at a checkpoint, or at its end.
    evaluated = evaluation.metrics() if evaluation is not None else []
    measured = metric_names(list(environment.rewards))
    metric = objective_metric(config.objective, evaluated, measured)
    run = Run(
        run_dir,
        config,
        language_model,
        optimizer,
        batches,
        accelerator,
        metric=metric,
        reference=None if reference is None else reference.fingerprint,
    )
    if run.is_finished():
        return run.objective_value()
    run.resume()
    if accelerator.is_main_process:
        cut_back_rollouts(run_dir, run.state.step, run.resumed_from)
    batches.start()
    announce(config, environment, language_model, rollouts, loss, accelerator)
    if evaluation is not None and run.state.step == 0:
        run.record({"step": 0} | evaluation.run(step=0))

    progress = TrainingProgress(num_steps, run.state.step, watch="reward/mean")
    updates = Updates(batches.batch, config)  # a resume may find a batch half done
    with Interrupt() as interrupt, progress, batches:
        for index in range(run.state.step, num_steps):
            step, started = index + 1, time.perf_counter()
            number = index % config.updates_per_batch
            batch_row = {}

            # A new rollout batch: sample, reward, score, and turn rewards into advantages.
            if number == 0:
                batch = batches.next()
                updates = Updates(batch, config)
                if config.recomputes_logprobs:
                    updates.score("old_logprobs", language_model.scoring, rollouts.exchange)
                if reference is not None:
                    updates.score("ref_logprobs", reference, rollouts.exchange)
                set_advantages(batch, config)
                batch_row = batch_metrics(batch, batches, list(environment.rewards))
                if accelerator.is_main_process:
                    write_rollouts(run_dir, step, batch, rollouts)
                show_rollouts(config, batch, step, rollouts)

            # One optimizer step.
            microbatches = updates.microbatches(number)
            if config.train.trace and index == 0:
                trace(microbatches[0], language_model)
            seed_step(config.train.seed, index)
            statistics = PolicyStatistics(loss, accelerator.device)
            result = train_step(
                model,
                microbatches,
                loss,
                optimizer,
                lr=learning_rate(index),
                grad_clip=config.train.grad_clip,
                accelerator=accelerator,
                check_gradients=index == 0 and updates.has_signal(number) and not language_model.is_moe,
                observe=statistics,
            )
            note_first_step()
            if not result.is_finite and config.train.non_finite == NonFinite.stop:
                raise StopRun(1, not_finite(step, result, updates.places(number), "prompts"))
            if number == config.updates_per_batch - 1:
                batches.hand_over()

            row = run.step_metrics(step, result, elapsed_s=time.perf_counter() - started)
            row |= statistics.metrics() | batch_row
            if evaluation is not None and evaluation.is_due(step, num_steps):
                row |= evaluation.run(step)
            run.record(row)
            progress.update(row)
            if index == 0:
                explain_first_step(row)

            signal = largest_over_ranks(interrupt.signal or 0, accelerator.device)
            run.save_if_due(interrupted=signal != 0)
            if signal:
                raise StopRun(
                    128 + signal, f"stopped by signal {signal} after step {step}; continue with checkpoint.resume=auto"
                )

    rollouts.close()
    objective = run.finish()
    conclude(run_dir, environment, accelerator)
    return objective


main = recipe("grpo", train)

if __name__ == "__main__":
    main()
