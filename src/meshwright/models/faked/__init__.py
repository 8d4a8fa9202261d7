"""A model on tensors without memory or values: built, copied, and left as it was."""
