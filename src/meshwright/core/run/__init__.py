"""What a run says of itself: its trace, its faults, the state of its ranks; and the forecast it is compared with."""
