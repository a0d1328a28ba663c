"""A plugin whose engine is missing."""

import an_engine_that_is_missing  # noqa: F401
