"""Writes the field `Home-page` into the wheel, which hatchling no longer does: sentence-transformers looks for the owner there."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HOME_PAGE = "https://github.com/huggingface/accelerate"
"""The project whose interface is offered."""


class HomePage(BuildHookInterface[Any]):
    """Replaces the function by which the builder writes METADATA: hatchling has no public place for a further field."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Is called before the wheel is built."""
        written = self.build_config.core_metadata_constructor

        def with_home_page(*args: Any, **kwargs: Any) -> str:
            text: str = written(*args, **kwargs)
            return text.replace("\nSummary: ", f"\nHome-page: {HOME_PAGE}\nSummary: ", 1)

        self.build_config._WheelBuilderConfig__core_metadata_constructor = with_home_page
