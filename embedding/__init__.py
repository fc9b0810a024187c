"""Sparse rows: hash tables, their optimizers, the world that trains them, and the readers that only look."""
