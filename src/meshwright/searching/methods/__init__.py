"""Methods of search that the joint search is compared with. Each is a function from a Problem to an Outcome."""
