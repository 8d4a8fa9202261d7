"""Lower bounds: seconds and bytes that no plan of a kind can be below."""
