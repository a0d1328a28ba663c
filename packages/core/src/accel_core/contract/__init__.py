"""Interfaces between components and the core. Nothing in this package runs a training.

hook_specs         what a plugin can take over, in the order of the training loop
strategy, precision_policy     bases of components
default_components      components that are found under default names
layout             which part of the data a process reads
tensor_layouts, boxes          how the state of a model lies on the ranks
loader_progress    what loaders tell of where they are
"""
