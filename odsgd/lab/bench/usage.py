"""CPU time and memory of this process so far. Standard library only, since torch_worker.py imports it."""
import time
from typing import Dict


def now() -> Dict[str, float]:
    """When it is, CPU seconds of all threads, and the largest resident memory in MB of 2^20 bytes."""
    with open("/proc/self/status", encoding="utf-8") as status:  # `ru_maxrss` may be that of the parent
        peak_kb = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    return {"at_s": time.monotonic(), "cpu_s": time.process_time(), "memory_mb": peak_kb / 1024}
