"""Jobs that are planned and not started."""
from typing import Any

from odsgd.launch.hostfile import Host
from odsgd.launch.plan import Job

A, B, C = Host("10.0.0.1"), Host("10.0.0.2"), Host("10.0.0.3")
ROOT = ("10.0.0.9", 4000)


def job(workers: int, servers: int, *slots: Host, **settings: Any) -> Job:
    """A job on these slots, or a local one; `settings` as those of `Job`."""
    launcher = settings.pop("launcher", "ssh" if slots else "local")
    return Job(command=settings.pop("command", ("train.py", "--lr", "0.1")), num_workers=workers, num_servers=servers,
               launcher=launcher, slots=slots, **settings)
