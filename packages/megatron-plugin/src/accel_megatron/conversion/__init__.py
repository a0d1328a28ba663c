"""Weights of transformers in Megatron-core models, and back. Read in this order:

table          how a table of a family is written
families       the tables of this package
offers         the tables that installed distributions offer
settings       a configuration of transformers as settings of Megatron-core
pieces         the arithmetic of rows: which part of which tensor a parameter is
named_tensors  a model on this rank under the names of transformers
building       `from_transformers`
comparison     whether a model is what a configuration says
exporting      `to_transformers`
"""

from __future__ import annotations

from accel_megatron.conversion.building import from_transformers
from accel_megatron.conversion.exporting import to_transformers
from accel_megatron.conversion.offers import find_family
from accel_megatron.conversion.table import ROPE, Family, Row

__all__ = ["ROPE", "Family", "Row", "find_family", "from_transformers", "to_transformers"]
