"""The schedule as a value: its kinds, its actions, and the placement of its stages."""
