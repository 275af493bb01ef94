"""CPU time and memory of this process so far. Standard library only, since ddp.py imports it."""
import resource
import time
from typing import Dict


def processor_s() -> float:
    """CPU seconds of all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def now() -> Dict[str, float]:
    """When it is, CPU seconds of all threads, and the largest resident memory in MB."""
    with open("/proc/self/status", encoding="utf-8") as status:  # `ru_maxrss` may be that of the parent
        peak_kb = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    return {"at_s": time.monotonic(), "cpu_s": processor_s(), "memory_mb": peak_kb / 1024}
