"""A module cut into stages: what crosses between them, and the schedule that drives them."""
