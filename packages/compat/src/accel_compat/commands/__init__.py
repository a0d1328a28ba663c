"""The command `accelerate`: its options and its files, and what they mean to our launcher.

options.py      the options of `accelerate launch`, and a parser that takes them
config_file.py  its configuration files, read and written
merging.py      what holds of both
variables.py    what each process of a run finds in its environment
launch.py       `accelerate launch`, by `accel launch`
config.py       `accelerate config`, by the questions of `accel config`
fsdp2.py        `accelerate to-fsdp2`
others.py       `accelerate env`, `test`, `estimate-memory` and `merge-weights`
main.py         the console scripts
"""
