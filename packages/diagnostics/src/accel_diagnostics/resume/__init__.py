"""`accel verify-resume script.py`: whether a run that was killed goes on as if it had not been.

command       the command line; the exit status
trial         the order of the runs: uninterrupted, killed, resumed, and what each must have done
launching     starts a run of the user's script, with an observer in every rank
observed      what a rank runs: the user's script, unchanged, under a recorder
recorder      around the hooks of the script's Accelerator: losses, samples, states; the kill
digests       the state of a run as short texts by name
journal       what a rank wrote down, and reading it
alignment     at which step of the uninterrupted run the resumed one begins
comparison    two runs of the same world, bit by bit; the first difference
other_world   two runs of different worlds, within a tolerance
report        what is printed
"""
