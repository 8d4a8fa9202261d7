"""What each torch function does to tensors that lie over ranks."""
