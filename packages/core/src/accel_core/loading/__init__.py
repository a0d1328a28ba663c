"""Prepared loaders, whichever component prepares them."""
