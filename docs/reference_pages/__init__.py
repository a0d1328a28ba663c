"""The text of each page of docs/reference, from the source. docs/generate.py writes them."""
