"""Files as people hand them in and as Meshwright keeps them: strict reading, caches, writes that are on the disk when they end."""
