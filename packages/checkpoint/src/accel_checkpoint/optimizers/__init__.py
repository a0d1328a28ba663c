"""The state of optimizers, by the names of parameters."""
