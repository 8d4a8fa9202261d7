"""What a checkpoint must be before anything of it is taken over.

whole.py      by itself: only files that its manifest lists are read, and what they say of each other is true
tensors.py    its tensors: each is where, and of the shape and dtype, that `contents.json` says; numbers are in their range
parts.py      the parts of a tensor fill it, once
schema.py     for a run: everything that the model, its optimizer and this rank need is there, and nothing that they do not know
"""
