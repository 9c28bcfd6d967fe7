"""Supervised fine-tuning.

    python -m recipes.sft                                                     # the offline demo
    python -m recipes.sft data=files data.path=rows.jsonl model=hf model.name=path-or-hub-id
    python -m recipes.sft checkpoint.resume=auto hydra.run.dir=outputs/sft/<run>

rows -> Datums -> microbatches -> forward -> loss sums -> one denominator -> backward -> clip -> optimizer. `train`
shows all of it. Which Datums form step k is a function of (seed, k); how they are laid out, split and spread over ranks
changes neither the loss nor the gradient.
"""

from pathlib import Path

from conf.schema import NonFinite, SFTConfig
from recipes.runtime.entry import recipe


def train(config: SFTConfig, run_dir: Path) -> float | None:
    """Train, fill the run folder, and return the objective."""
    # Imported here, so that `--cfg job` and TAB completion need no torch.
    import time

    from recipes.models.build import build_configured_model
    from recipes.runtime.build import instantiate
    from recipes.runtime.interrupt import Interrupt
    from recipes.runtime.outcome import StopRun, note_first_step
    from recipes.training.data import build_loader, encode_data, read_data, require_fit
    from recipes.training.evaluation import build_evaluation
    from recipes.training.notes import announce, conclude, not_finite
    from recipes.training.optim import build_optimizer, learning_rates
    from recipes.training.progress import TrainingProgress
    from recipes.training.ranks import largest_over_ranks, prepare_model, seed_step, start_accelerator
    from recipes.training.run import Run, objective_metric
    from recipes.training.step import train_step
    from recipes.training.trackers import require_tracker

    # What is trained, on what, and by which rule.
    require_tracker(config.logger)
    accelerator = start_accelerator(config.train.precision, config.launch.num_processes)
    loss = instantiate(config.loss, config.allow_targets, key="loss")
    rows = read_data(config)
    language_model = build_configured_model(config, accelerator.device)
    data = encode_data(rows, config, language_model)
    loader = build_loader(config, data)
    require_fit(data, language_model, loss)
    evaluation = build_evaluation(config, data, language_model, loss)
    model = prepare_model(language_model.scoring, accelerator, unused_parameters=language_model.is_moe)
    optimizer = build_optimizer(language_model.scoring, config.optim)
    learning_rate = learning_rates(config.scheduler, config.optim.lr, loader.num_steps)

    # Where it stands: at the beginning, at a checkpoint, or at its end.
    evaluated = evaluation.metrics() if evaluation is not None else []
    metric = objective_metric(config.objective, evaluated, ["train/loss", *loader.metrics(0)])
    run = Run(run_dir, config, language_model, optimizer, loader, accelerator, metric=metric)
    if run.is_finished():
        return run.objective_value()
    run.resume()
    announce(config, run_dir, language_model, data, loader, accelerator)
    if evaluation is not None and run.state.step == 0:
        run.record({"step": 0} | evaluation.run(step=0))

    with Interrupt() as interrupt, TrainingProgress(loader.num_steps, run.state.step) as progress:
        for index, microbatches in loader:
            step, started = index + 1, time.perf_counter()
            seed_step(config.train.seed, index)
            result = train_step(
                model,
                microbatches,
                loss,
                optimizer,
                lr=learning_rate(index),
                grad_clip=config.train.grad_clip,
                accelerator=accelerator,
                check_gradients=index == 0 and not language_model.is_moe,
            )
            note_first_step()
            if not result.is_finite and config.train.non_finite == NonFinite.stop:
                raise StopRun(1, not_finite(step, result, loader.sample_ids(index).tolist()))
            row = run.step_metrics(step, result, elapsed_s=time.perf_counter() - started) | loader.metrics(index)
            if evaluation is not None and evaluation.is_due(step, loader.num_steps):
                row |= evaluation.run(step)
            run.record(row)
            progress.update(row)

            signal = largest_over_ranks(interrupt.signal or 0, accelerator.device)
            run.save_if_due(interrupted=signal != 0)
            if signal:
                raise StopRun(
                    128 + signal, f"stopped by signal {signal} after step {step}; continue with checkpoint.resume=auto"
                )

    objective = run.finish()
    conclude(run_dir)
    return objective


main = recipe("sft", train)

if __name__ == "__main__":
    main()
