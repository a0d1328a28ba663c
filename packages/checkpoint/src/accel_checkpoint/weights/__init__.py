"""A model's weights alone, as plain files that any library reads and writes."""
