"""Values of a run: its trace, its faults, the state of its ranks; and the forecast that it is compared with."""
