"""The Watch: ranks that will never come together end within seconds, and say why.

collective_scope               the collectives that a rank is in, and the explanation of one that broke
rank_status, stack_location    what a rank is in the middle of, and at which line of the user's
status_store, diagnosis        where ranks report, and who waits in vain for whom
connections, checks            how what waits is made to raise; comparison before a call, on request
monitor                        the thread that puts this together
"""
