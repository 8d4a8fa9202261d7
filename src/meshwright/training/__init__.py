"""The loop around a Program: data, optimizer, learning rate, checkpoints, metrics, resume."""
