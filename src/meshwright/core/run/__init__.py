"""What a run says of itself: its trace, its metrics, its faults, the state of its ranks; and the forecast it is compared with."""
