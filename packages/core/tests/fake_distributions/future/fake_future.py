"""Must never be imported: it needs a newer core."""

raise AssertionError("imported, although its metadata says that it does not fit")
