"""Which tensors are split over tp, by an integer program."""
