"""Mutated inputs: how they are made, what reads them, and under which limits."""
