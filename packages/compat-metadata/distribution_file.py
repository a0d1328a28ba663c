"""A file in the folder `accelerate`, by which `importlib.metadata.packages_distributions` finds this distribution for the module."""
