"""The processes of a run: who they are, how they meet, talk and end.

launch_environment, rendezvous, world    from the launcher's variables to the end of the process group
channel, mismatch_report       messages between the ranks, and what is said where these do not match
watch/                         ranks that will never come together end, and say why
failure_output                 what a launcher and its user read of a failure
random_state, logs             the random streams of a process; what it says
"""
