"""Configuration files of Hugging Face Accelerate, as options of ours.

`translation` is the importer that accel-launch finds: it goes through a file key by key, by the
rules of `top_level` and, for the keys inside of blocks, of `blocks`.
"""
