"""Runs are recorded where people look at them, and a broken tracker never costs a run.

trackers    found by the core: one Accelerator's, from `init_trackers` to `end_training`
recorder    one of them; tracker_thread: its thread and queue
record      values that the user logs, copied from devices in one go; images, tables, values: others
"""
