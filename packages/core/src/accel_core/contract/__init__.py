"""Interfaces between components and the core. Nothing in this package runs a training.

hook_specs         what a plugin can take over, in the order of the training loop
strategy, precision_policy     bases of components
layout             which part of the data a process reads
tensor_layouts, boxes          how the state of a model lies on the ranks
loader_progress, sample_ids    what loaders tell of where they are
"""
