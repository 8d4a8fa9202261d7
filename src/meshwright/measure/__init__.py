"""Hardware → Cluster (probe), run → Trace (record), plan against one process (parity)."""
