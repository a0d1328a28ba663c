"""The neutral checkpoint: state that knows no strategy, saved by any number of ranks and loaded by any other.

Read in this order:

    run_state, model_state, optimizers/    what of a run is saved
    plan, writing       who writes what
    codec/              Python objects as JSON and tensors
    files/              what lies on the disk, and how it is published: all of it, or nothing
    saving, background  the order of a save; one that is written behind
    reading, loading    what is compared before a load, and the order in which it restores
    checkpoints         what the Accelerator holds: hooks, names, how many are kept
    inspection/         `python -m accel_core checkpoint`
    weights/            apart from all this: a model's weights as plain files
"""
