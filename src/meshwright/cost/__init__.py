"""(Graph, Plan, Cluster) → Estimate. Pure arithmetic, no torch."""
