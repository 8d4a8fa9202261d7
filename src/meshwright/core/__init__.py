"""The values that cross rooms: Cluster, Graph, Plan, Schedule, Estimate, SearchResult, Trace. No torch here."""
