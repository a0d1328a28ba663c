"""Configuration files of Hugging Face Accelerate: where they lie, and what becomes of them.

They are recognised here, and translated by an importer of the entry-point group
`accel.configurations`, which another package offers.
"""
