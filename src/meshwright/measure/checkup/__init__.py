"""Is this machine fit to train? Each check is a function that returns what it found, and what to do about it."""
