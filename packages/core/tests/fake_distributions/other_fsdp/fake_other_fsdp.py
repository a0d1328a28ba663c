"""A second provider of a name, a component that cannot be made from its name alone, and an offer of nothing."""


class OtherFSDP:
    pass


class Needy:
    def __init__(self, mesh, **options):
        self.mesh = mesh
        self.options = options


NOTHING = None
