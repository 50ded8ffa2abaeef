"""Facts of this host."""

import os
from pathlib import Path


def host_memory() -> int:
    """Bytes of memory that this host's programs can have: the machine's, or less in a container."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text()
    except OSError:
        return most
    return min(most, int(limit)) if limit.strip().isdecimal() else most
