"""Configuration files of Hugging Face Accelerate: their places, and their content as options here.

`translation` makes one of ours of their content, key by key, by the rules of `table` (the top
level) and `blocks` (the rest).
"""
