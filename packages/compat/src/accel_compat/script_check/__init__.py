"""`accel doctor script.py`: what a script that was written for Accelerate will do differently here.

The script is read, and never run.

    script.py   a script as a tree: which names are the Accelerator, loaders, what was prepared
    finding.py  one difference, with its line
    loop.py     rules about the training loop, schedules and accumulation
    naming.py   rules about names, arguments and attributes
    running.py  rules about processes, checkpoints, trackers and precision
    command.py  the command
"""
