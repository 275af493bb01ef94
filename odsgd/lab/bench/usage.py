"""CPU time and memory of this process so far. Standard library only, since ddp.py imports it."""
import resource
import time
from typing import Dict


def now() -> Dict[str, float]:
    """When it is, CPU seconds of all threads, and the largest resident memory in MB."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"at_s": time.monotonic(), "cpu_s": used.ru_utime + used.ru_stime, "memory_mb": used.ru_maxrss / 1024}
