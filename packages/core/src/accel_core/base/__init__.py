"""Base of all subpackages: errors, nested structures, class overrides, seeds, names as words."""
