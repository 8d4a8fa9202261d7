"""The joint search, which is the default: best-first branch and bound over all choices of a plan at once."""
