"""Whether a job that has failed is started again, and with whom: facts in, a decision and its words out. No I/O.

Not started again: a mistake in the options (exit code 64), a signal to the launcher, a job whose workers have all
succeeded, whatever became of a server then, and a failure that has already happened in the same way: the same process,
in the same words, from the same checkpoint, and no farther than before.

A job (`Membership`) that does not come up again, for want of some workers, is tried again until the rejoin timeout has
passed; that counts as no restart. Then one of MIN:MAX workers goes on without them. At the next restart all are called
again, and those that had been left out have one try. With `--grow` a checkpoint is such an occasion, too, if their
hosts answer; after one that was in vain the next comes `REGROW_S` later at the earliest, then after twice as long.
"""
import dataclasses
import re
from typing import List, NamedTuple, Optional, Sequence, Set, Tuple

from kvstore.errors import EXIT_USAGE
from odsgd.launch.hostfile import Host
from odsgd.launch.plan import LOCAL, Job, Process
from odsgd.launch.policy.judge import Verdict
from odsgd.launch.policy.liveness import listed

REGROW_S = 60.0


class Attempt(NamedTuple):
    """One start of a job, when it has ended."""

    verdict: Verdict
    resumed: int  # the iteration it began after
    saved: int  # the last iteration that it, or one before it, has kept
    at: int  # the farthest iteration that a worker has told of, perhaps a second before the end
    lost_s: float  # the time since then, or since the start

    @property
    def manner(self) -> str:
        """The failure in words, without pids, times and other numbers."""
        return re.sub(r"\d+(\.\d+)?", "N", self.verdict.message.partition("\n")[0])


class Decision(NamedTuple):
    """What comes after an attempt."""

    again: bool
    text: str = ""


def decide(attempt: Attempt, before: Optional[Attempt], done: int, most: int) -> Decision:
    """After `done` restarts of `most`; `before`: the last attempt but this one."""
    verdict = attempt.verdict
    if verdict.grows:
        return Decision(True, f"going on from checkpoint {attempt.saved} with all workers, if they come")
    if verdict.finished or verdict.by_signal or not most:
        return Decision(False)
    if verdict.exit_code == EXIT_USAGE:
        return Decision(False, "not started again: a mistake in the options stays one")
    if before is not None and before.verdict.culprit is not None and attempt.at <= before.at \
            and attempt.saved == before.saved \
            and (attempt.manner, attempt.resumed, verdict.culprit) == (before.manner, before.resumed,
                                                                       before.verdict.culprit):
        return Decision(False, f"not started again: {verdict.culprit} has failed in the same way as before, after the "
                        f"same checkpoint ({attempt.resumed}) and no farther than then (iteration {before.at})")
    if done == most:
        used = "the 1 restart is" if most == 1 else f"all {most} restarts are"
        return Decision(False, f"not restarted: {used} used up (--max-restarts)")
    iterations = max(0, attempt.at - attempt.saved)
    where = f"checkpoint {attempt.saved}" if attempt.saved else "the beginning"
    return Decision(True, f"restart {done + 1} of {most}, from {where}; lost are {attempt.lost_s:.1f} s, at least "
                    f"{iterations} iterations")


class Membership:
    """Which workers of a job take part in the next attempt. They are numbered anew; here they keep their first ranks.

    Invariant: `present` rises, and has at least `job.least_workers` ranks.
    """

    def __init__(self, job: Job) -> None:
        self.full, self.present = job, list(range(job.num_workers))
        self._came_up = False
        self._gone: Set[Host] = set()
        self._left_out: List[str] = []
        self._since: Optional[float] = None
        self._grown = 0  # in vain, so far

    @property
    def job(self) -> Job:
        """With the workers that are called, and on the hosts that are there."""
        full = self.full
        if len(self.present) == full.num_workers and not self._gone:
            return full
        slots = [full.slots[rank % len(full.slots)] for rank in self.present] if full.slots else []
        spare = [host for host in full.slots[full.num_workers:] if host not in self._gone]
        servers = len(self.present) if full.servers_beside_workers else full.num_servers
        return dataclasses.replace(full, num_workers=len(self.present), num_servers=servers, slots=(*slots, *spare))

    def met(self) -> None:
        """The last attempt came up, so that the next one calls everybody."""
        if self.job is self.full:
            self._left_out, self._grown = [], 0
        self._came_up, self._since = True, None
        self.present, self._gone = list(range(self.full.num_workers)), set()

    def missing(self, now: float) -> Tuple[List[Host], float]:
        """Whom the next attempt goes without, and would take in at a checkpoint from this time on."""
        full = self.full
        slots = full.slots or (LOCAL,)
        hosts = [slots[rank % len(slots)] for rank in range(full.num_workers) if rank not in self.present]
        wait_s = REGROW_S * 2 ** (self._grown - 1) if self._grown else 0.0
        return list(dict.fromkeys([*hosts, *self._gone])) if full.grow else [], now + wait_s

    def grows(self) -> None:
        """The last attempt was ended to take them in."""
        self._grown += 1

    def missed(self, absent: Sequence[Process], planned: Sequence[Process], now: float) -> Optional[Decision]:
        """`absent` of the `planned` processes kept the last attempt from coming up. None: that is a failure, as it is
        at the first start.
        """
        workers = [process for process in absent if process.role == "worker"]
        names = {process.name for process in absent}
        gone = {process.host for process in absent if not process.host.here
                and all(other.name in names for other in planned if other.host == process.host)}
        if not self._came_up or not self.full.max_restarts or not (workers or gone):
            return None
        self._since = now if self._since is None else self._since
        missing = [f"worker {self.present[process.rank]}" for process in workers] or [
            f"host {host.address}" for host in gone]
        wait_s = self.full.rejoin_timeout_s - (now - self._since)
        if wait_s > 0 and not set(missing) <= set(self._left_out):
            then = ", then without" if self.full.least_workers else ""
            return Decision(True, f"{listed(missing)} did not come back; trying again for {wait_s:.0f} s{then}")
        if not self.full.least_workers:
            return None
        ranks = {self.present[process.rank] for process in workers}
        left = [rank for rank in self.present if rank not in ranks]
        if len(left) < self.full.least_workers:
            return None
        self.present, self._since = left, None
        self._gone |= gone
        self._left_out += missing
        return Decision(True, f"going on with {len(left)} of {self.full.num_workers} workers, without "
                        f"{listed(missing)}; batches are dealt anew")
