"""How much memory there is, for checks before something large is allocated."""

import os
import resource


def memory_bytes() -> int:
    """The memory of this machine, or what a limit of this process (ulimit -v) leaves of it."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return machine if limit == resource.RLIM_INFINITY else min(machine, limit)
