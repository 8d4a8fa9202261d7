"""The schedule as a value: its kinds, its actions, and where its stages lie."""
