"""The parts of `benchmarks/faults.py`."""
