"""What stands between the command line and a recipe's `train`: configuration, run folder, signals, exit codes."""
