"""Configuration files of Hugging Face Accelerate: what they say, in our own words, and what of it has no counterpart here.

`translate` is for whoever has read such a file, `command` is `accel config import`.
"""

from accel_launch.importing.command import command
from accel_launch.importing.translation import Carried, Imported, Left, translate

__all__ = ["Carried", "Imported", "Left", "command", "translate"]
