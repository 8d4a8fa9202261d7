"""(Graph, Cluster, budget) → SearchResult. Pure, no torch.

search.py       the way in: a plan by the method that is asked for
joint/          the default method: best-first branch and bound
methods/        methods to compare it with, loaded when they are asked for
space.py, plan_builder.py                   which plans there are, and how one is made from a point of the space
units.py, unit_table.py                     the parts of a model that stages are made of, and what they cost
bounds/, cuts/, memory_saving/, sharding/   what the joint search is made of
infeasible/     what is suggested where nothing fits
"""
