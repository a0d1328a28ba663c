"""Checks of a machine and an installation, for `accel test`, `accel env` and `accel doctor`.

setup_job, steps        `accel test` on one rank: the checks in order, and what is said of each
communication, reading, training, saving    the checks themselves
environment             what a bug report needs
doctor…                 each pair of ranks, and what differs between machines
"""
