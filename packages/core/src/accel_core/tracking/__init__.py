"""Tracking: runs are recorded where people look at them, and a broken tracker never costs a run."""
