"""Runs are recorded where people look at them, and a broken tracker never costs a run.

trackers            what the core finds: the trackers of one Accelerator, from `init_trackers` to `end_training`
recorder            one of them; tracker_thread: its thread and queue
snapshot            what the user logs, copied; device_copy: from devices, all at once
scalars, flat_values, histograms, tables, images, config_json    what becomes of values
"""
