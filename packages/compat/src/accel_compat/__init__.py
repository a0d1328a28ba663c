"""What stands behind the module `accelerate`: older names, defaults and files over accel-core.

The package `accelerate`, beside this one, has the module paths that scripts import, and no code: each module there lists names
from here and from the packages of ours that have them.
"""

__version__ = "0.1.0"
