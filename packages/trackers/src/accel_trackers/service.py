"""Common parts of the trackers of services: the check for the client, and the run's object."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

from accel_core import Tracker
from accel_core.api.component import how_to_install


class Service(Tracker):
    """A tracker over the client of a service, which it imports when the run begins.

    Attributes:
        client: the top-level module of the client.
        extra: that of accel-trackers which installs it.
    """

    client: ClassVar[str]
    extra: ClassVar[str]
    _run: Any = None

    @classmethod
    def unusable(cls) -> str | None:
        """That the client is not installed, if so."""
        if find_spec(cls.client) is not None:
            return None
        return f"{cls.client} is not installed. {how_to_install(f'accel-trackers[{cls.extra}]')}"

    @property
    def _module(self) -> Any:
        """The client, which is imported at its first use."""
        return import_module(self.client)

    @property
    def tracker(self) -> Any:
        """The service's own object for the run."""
        return self._run
