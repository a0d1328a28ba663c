"""The Watch: ranks that will never come together end within seconds, and say why.

- `marks`: which collectives a rank is in, by the names that users know; errors in them are explained.
- `notices`: a rank that fails tells the others with what, before it goes.
- `presence`, `whereabouts`: what a rank is in the middle of, and at which line of the user's.
- `roll_call`: who waits in vain for whom, judged from what all ranks report; `board`: where they report it.
- `connections`: how what waits is made to raise.
- `checks`: on request, every collective is compared across the ranks before it runs.
- `patrol`: the thread that puts this together; `watch`: what the other parts see of it.

Nothing is imported here: a process that is alone needs `marks` only.
"""
