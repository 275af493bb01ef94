"""CPU time and memory of this process so far, from /proc. Standard library only, since ddp.py imports it."""
import os
import time
from typing import Dict

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def now() -> Dict[str, float]:
    """When it is, CPU seconds of all threads, and the largest resident memory in MB."""
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    with open("/proc/self/status", encoding="utf-8") as status:
        peak_kb = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return {"at_s": time.monotonic(), "cpu_s": cpu_s, "memory_mb": peak_kb / 1024}
