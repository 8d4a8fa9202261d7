"""Keeping training state on the host: the link to it, its memory, and the updates that run there."""
