"""(Graph, Cluster, budget) → SearchResult. Pure, no torch."""

from meshwright._callable import make_callable

make_callable(__name__)
