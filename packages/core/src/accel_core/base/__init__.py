"""What every room stands on: errors, nested structures, classes that change for one object, seeds, names as words."""
