"""The collective calls of a step, with their bytes and their seconds."""
