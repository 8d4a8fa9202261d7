"""The check: before a user's model first runs under a plan that divides it, a small copy is compared with one process."""
