"""What processes have used so far, from /proc. Standard library only: ddp.py has nothing else of ours."""
import os
from typing import Dict, List

MARK = "ODSGD_BENCH_JOB"
"""In the environment of every process of a measured job, with a value of its own per job."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def of(pid: str) -> Dict[str, float]:
    """CPU seconds of all threads, and the largest resident memory in MB."""
    with open(f"/proc/{pid}/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    with open(f"/proc/{pid}/status", encoding="utf-8") as status:
        peak_kb = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    return {"cpu_s": (int(fields[11]) + int(fields[12])) / _TICKS_PER_S, "memory_mb": peak_kb / 1024}


def since(pid: str, before: Dict[str, float], iterations: int) -> Dict[str, float]:
    """CPU milliseconds per iteration since `before`, and the largest memory."""
    now = of(pid)
    return {"cpu_ms": 1000 * (now["cpu_s"] - before["cpu_s"]) / iterations, "memory_mb": now["memory_mb"]}


def servers() -> List[str]:
    """The process numbers of this job's servers, which are on this machine, whatever host they play."""
    wanted = f"{MARK}={os.environ.get(MARK)}".encode()
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as environ:
                variables = environ.read().split(b"\0")
        except OSError:  # it has gone, or is another user's
            continue
        if wanted in variables and b"DMLC_ROLE=server" in variables:
            found.append(pid)
    return found
