"""Collectives over a `World`: values, objects, decisions and random streams of all ranks."""
