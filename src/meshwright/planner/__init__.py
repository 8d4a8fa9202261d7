"""From a model and a cluster to a plan: the one way, for the command line and for Python alike."""
