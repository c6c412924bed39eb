"""Wait for what another thread or program does."""

import time

WITHIN_S = 60.0
"""Long enough on a machine that is busy with other tests."""


def until(reached, what="it", within_s=WITHIN_S, pause_s=0.02):
    """Return what ``reached`` returns as soon as that is true.

    Args:
        reached: is called again and again.
        what: what is waited for, or a function that returns what to say if it does not come.
        within_s: the test fails after so many seconds.
        pause_s: how long to wait between two calls.
    """
    end_s = time.monotonic() + within_s
    while not (found := reached()):
        assert time.monotonic() < end_s, what() if callable(what) else f"waited in vain for {what}"
        time.sleep(pause_s)
    return found
