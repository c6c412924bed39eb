"""The limit on open files of this process."""

from __future__ import annotations

import resource


def raise_open_files() -> int:
    """Raise the soft limit on open files of this process to the hard limit, and return that (RLIM_INFINITY if unlimited)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def raise_open_files_limit(needed: int) -> str:
    """Raise the soft limit on open files to the hard limit.

    Args:
        needed: largest number of files that the program may have open at a time.

    Returns:
        A warning if the hard limit is below ``needed``, else an empty string.
    """
    hard = raise_open_files()
    if hard != resource.RLIM_INFINITY and hard < needed:
        return f"at most {hard} files may be open, and {needed} are needed"
    return ""
