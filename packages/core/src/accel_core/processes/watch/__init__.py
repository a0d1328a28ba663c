"""The Watch: ranks that will never come together end within seconds, and say why.

- `collective_scope`: which collectives a rank is in, by the names that users know; errors in them
  are explained.
- `failure_notices`: a rank that fails tells the others with what, before it goes.
- `rank_status`, `stack_location`: what a rank is in the middle of, and at which line of the user's.
- `diagnosis`: who waits in vain for whom, judged from what all ranks report; `status_store`: where
  they report it.
- `connections`: how what waits is made to raise.
- `checks`: on request, every collective is compared across the ranks before it runs.
- `monitor`: the thread that puts this together; `watch`: what the other parts see of it.

Nothing is imported here: a process that is alone needs `collective_scope` only.
"""
