"""The parts of `kiln train` and `kiln resume`: model, step, checkpoints, receipt."""
