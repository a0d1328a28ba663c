"""Runs are recorded where people look at them, and a broken tracker never costs a run.

trackers          what the core finds: the trackers of one Accelerator, from `init_trackers` to `end_training`
recorder          one of them; tracker_thread: its thread and queue
record            what the user logs, copied from devices in one go; values, histograms, tables, images: what it consists of
"""
