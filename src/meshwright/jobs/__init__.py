"""A run from its settings file to its summary: its plan, its folder, its ranks, and what follows a fault."""
