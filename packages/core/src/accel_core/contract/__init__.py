"""Interfaces between components and the core. Nothing in this package runs a training."""
