"""(Graph, Cluster, budget) → SearchResult. Pure, no torch."""
