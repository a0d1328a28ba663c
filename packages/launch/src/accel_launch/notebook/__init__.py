"""Functions of a notebook, run by several processes."""
