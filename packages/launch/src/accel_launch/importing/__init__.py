"""Configuration files of Hugging Face Accelerate: where they lie, what they say in our own words, and what has no counterpart here.

`translation` makes one of ours of their content, key by key, by the rules of `table` (the top
level) and `blocks` (the rest).
"""
