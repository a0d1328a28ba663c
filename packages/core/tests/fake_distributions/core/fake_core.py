"""Stands in for the core's own strategies."""


class Single:
    pass


class DDP:
    pass
