"""The training loop's pieces: step, schedule, evaluation, checkpoints, the record of a run."""
