"""Tensors split over ranks inside a model that does not know: layouts, what ops do to them, and the exchanges between."""
