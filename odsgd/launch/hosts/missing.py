"""The hosts that a job has had to leave out, and whether they are back (`odsgd launch -n MIN:MAX --grow`)."""
import subprocess
from typing import Dict, Iterable, List, Set

from odsgd.launch.hostfile import Host
from odsgd.launch.hosts import ssh
from odsgd.launch.plan import Job

ASKED_EVERY_S = 10.0
ANSWERED_WITHIN_S = 30.0
"""A host that accepts a connection and then says nothing is not back."""


class MissingHosts:
    """Asks each host by ssh now and then, from `since` on; the launching machine is always there."""

    def __init__(self, job: Job, hosts: Iterable[Host], since: float) -> None:
        self._job, self.hosts, self._ask_at = job, list(hosts), since
        self._asked: Dict[Host, subprocess.Popen[bytes]] = {}
        self._back: Set[Host] = set()

    def ask(self, now: float) -> None:
        """Take the answers that have come; ask again, if it is time."""
        for host, question in list(self._asked.items()):
            if now > self._ask_at - ASKED_EVERY_S + ANSWERED_WITHIN_S:
                question.kill()
                question.wait()
            if question.poll() is not None:
                del self._asked[host]
                (self._back.discard, self._back.add)[question.returncode == 0](host)
        if self.hosts and now >= self._ask_at and not self._asked:
            self._ask_at = now + ASKED_EVERY_S
            self._back |= {host for host in self.hosts if host.here}
            self._asked = {host: ssh.ask(self._job, host) for host in self.hosts if not host.here}

    @property
    def back(self) -> List[Host]:
        """The hosts that have answered the last question."""
        return [host for host in self.hosts if host in self._back]

    def close(self) -> None:
        """Ask no more."""
        for question in self._asked.values():
            question.kill()
            question.wait()
        self._asked = {}
