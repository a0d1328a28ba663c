"""The Watch: ranks that will never come together end within seconds, and say why.

collective_scope     the collectives that a rank is in, by the names that users know failure_notices
a rank that fails tells the others with what, before it goes rank_status, stack_location    what a
rank is in the middle of, and at which line of the user's status_store, diagnosis    where ranks
report, and who waits in vain for whom connections          how what waits is made to raise checks
on request, every collective is compared across the ranks before it runs monitor, watch       the
thread that puts this together, and what other parts see of it
"""
