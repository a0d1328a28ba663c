"""Collectives over a `World`: values, objects, decisions and random streams that the ranks share."""
