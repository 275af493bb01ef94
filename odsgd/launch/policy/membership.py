"""Who takes part: whether a failed job starts again, with which workers, and who may join while it runs. No I/O.

A job does not start again after a mistake in the options (exit code 64), after a signal to the launcher, if all workers
have succeeded, or if the same failure comes twice: the same process, in the same words, from the same checkpoint, and
no farther than before.

If workers are missing at a restart, or all wait for each other in vain, the launcher makes further attempts until the
rejoin timeout has passed; they do not count as restarts. Then a job of MIN:MAX workers goes on without the missing ones
(`Membership`). Each later restart begins with all workers, but one that was left out before has a single attempt to
come back. With `--grow` such a restart also takes place at a checkpoint, once a missing host answers. If the workers do
not come back then, the next one waits at least `REGROW_S`, and twice as long each time.

A job has as many places as `-n` says. One is empty from the start (`--spare`), or when its worker is lost. A worker
that joins takes one that nobody has had, else the one that was lost longest ago: the host of the last loss may still be
down. Worker 0's is not given again: it has told the servers what to train.
"""
import dataclasses
import math
from typing import List, NamedTuple, Optional, Sequence, Set, Tuple

from kvstore.errors import EXIT_USAGE
from odsgd.launch.hostfile import Host
from odsgd.launch.plan import LOCAL, Job, Plan, Process
from odsgd.launch.policy.failures import without_numbers
from odsgd.launch.policy.judge import Judge, Verdict
from odsgd.launch.policy.liveness import listed

REGROW_S = 60.0


class Attempt(NamedTuple):
    """One start of a job, when it has ended."""

    verdict: Verdict
    resumed: int  # the iteration of the checkpoint that it began from
    saved: int  # the iteration of the last checkpoint, of this attempt or an earlier one
    farthest: int  # the last iteration in a worker's beats, perhaps a second before the end
    since_checkpoint_s: float  # the time since the last checkpoint, or since the start
    began: bool = False  # worker 0, of this attempt or an earlier one, has looked for a checkpoint

    @property
    def failure_kind(self) -> str:
        """The failure in words, without pids, times and other numbers."""
        return without_numbers(self.verdict.message.partition("\n")[0])

    def fails_as(self, before: "Attempt") -> bool:
        """Whether the same process has failed in the same way; of several that do, each may be heard of first."""
        now, then = self.verdict, before.verdict
        if then.culprit in now.alike:
            return without_numbers(now.error) == without_numbers(then.error)
        return now.culprit == then.culprit and self.failure_kind == before.failure_kind


class Decision(NamedTuple):
    """What comes after an attempt."""

    again: bool
    text: str = ""


def decide(attempt: Attempt, before: Optional[Attempt], restarts_used: int, max_restarts: int) -> Decision:
    """Whether the job starts again after `attempt`; `before`: the attempt before it."""
    verdict = attempt.verdict
    if verdict.grows:
        return Decision(True, f"going on from checkpoint {attempt.saved} with all workers, if they come")
    if verdict.workers_succeeded or verdict.by_signal or not max_restarts:
        return Decision(False)
    if verdict.exit_code == EXIT_USAGE:
        return Decision(False, "not started again: the options would be wrong again")
    if before is not None and before.verdict.culprit is not None and attempt.farthest <= before.farthest \
            and (attempt.resumed, attempt.saved) == (before.resumed, before.saved) and attempt.fails_as(before):
        return Decision(False, f"not started again: {before.verdict.culprit} has failed in the same way as before, "
                        f"after the same checkpoint ({attempt.saved}) and no farther than then (iteration "
                        f"{before.farthest})")
    if restarts_used == max_restarts:
        used = "the 1 restart is" if max_restarts == 1 else f"all {max_restarts} restarts are"
        return Decision(False, f"not restarted: {used} used up (--max-restarts)")
    iterations = max(0, attempt.farthest - attempt.saved)
    where = f"checkpoint {attempt.saved}" if attempt.saved else "the beginning"
    return Decision(True, f"restart {restarts_used + 1} of {max_restarts}, from {where}; this loses "
                    f"{attempt.since_checkpoint_s:.1f} s, at least {iterations} iterations")


class Membership:
    """Which workers take part in the next attempt. Each attempt numbers its workers from 0; here they keep their ranks.

    Invariant: `present_ranks` is sorted, and has at least `job.least_workers` ranks.
    """

    def __init__(self, job: Job) -> None:
        self.full_job, self.present_ranks = job, list(range(job.num_workers))
        self._has_ever_started = False
        self._hosts_left_out: Set[Host] = set()
        self._names_left_out: List[str] = []
        self._missing_since: Optional[float] = None
        self._growth_attempts = 0  # since all workers took part

    @property
    def job(self) -> Job:
        """The next attempt's job: with the workers that take part, on the hosts that are there."""
        full = self.full_job
        if len(self.present_ranks) == full.num_workers and not self._hosts_left_out:
            return full
        slots = [full.slots[rank % len(full.slots)] for rank in self.present_ranks] if full.slots else []
        spare = [host for host in full.slots[full.num_workers:] if host not in self._hosts_left_out]
        workers = len(self.present_ranks)
        servers = workers if full.servers_beside_workers else full.num_servers
        return dataclasses.replace(full, num_workers=workers, num_servers=servers, slots=(*slots, *spare))

    def note_started(self) -> None:
        """In the last attempt all processes joined: the next one calls all workers."""
        if self.job is self.full_job:
            self._names_left_out, self._growth_attempts = [], 0
        self._has_ever_started, self._missing_since = True, None
        self.present_ranks, self._hosts_left_out = list(range(self.full_job.num_workers)), set()

    def left_out_hosts(self, now: float) -> Tuple[List[Host], float]:
        """With `--grow`: the hosts that the next attempt runs without, and the earliest time to take them back."""
        full, slots = self.full_job, self.full_job.slots or (LOCAL,)
        hosts = [slots[rank % len(slots)] for rank in range(full.num_workers) if rank not in self.present_ranks]
        wait_s = REGROW_S * 2 ** (self._growth_attempts - 1) if self._growth_attempts else 0.0
        return list(dict.fromkeys([*hosts, *self._hosts_left_out])) if full.grow else [], now + wait_s

    def note_growth(self) -> None:
        """The last attempt was ended to take workers back."""
        self._growth_attempts += 1

    def after_failed_start(self, blocking: Sequence[Process], planned: Sequence[Process], now: float,
                           apart: bool = False) -> Optional[Decision]:
        """What follows if `blocking` processes kept the last attempt from starting, or all were `apart`, as by a link
        that is down; None: ask `decide`."""
        workers = [process for process in blocking if process.role == "worker"]
        names = {process.name for process in blocking}
        gone = {process.host for process in blocking if not process.host.here
                and all(other.name in names for other in planned if other.host == process.host)}
        if not self._has_ever_started or not self.full_job.max_restarts or not (workers or gone or apart):
            return None
        self._missing_since = now if self._missing_since is None else self._missing_since
        missing = [f"worker {self.present_ranks[process.rank]}" for process in workers] or [
            f"host {host.address}" for host in gone]
        wait_s = self.full_job.rejoin_timeout_s - (now - self._missing_since)
        if apart:
            return Decision(True, f"trying again for {wait_s:.0f} s, should a link be down") if wait_s > 0 else None
        if wait_s > 0 and not set(missing) <= set(self._names_left_out):
            then = ", then without" if self.full_job.least_workers else ""
            return Decision(True, f"{listed(missing)} did not come back; trying again for {wait_s:.0f} s{then}")
        ranks = {self.present_ranks[process.rank] for process in workers}
        left = [rank for rank in self.present_ranks if rank not in ranks]
        if not self.full_job.least_workers or len(left) < self.full_job.least_workers:
            return None
        self.present_ranks, self._missing_since = left, None
        self._hosts_left_out |= gone
        self._names_left_out += missing
        return Decision(True, f"going on with {len(left)} of {self.full_job.num_workers} workers, without "
                        f"{listed(missing)}; batches are dealt anew")


def why_closed(plan: Plan, judge: Judge) -> str:
    """Why nobody may join now, in words; empty if somebody may."""
    if not judge.all_joined:
        return "it is still starting; join it once it trains"
    if judge.workers_ended_at is not None:
        return "its workers have finished"
    if next_place(plan, judge) is None:
        return "no place is empty: each of its workers is there, or worker 0 is lost; launch it with --spare to grow"
    return ""


def empty_places(plan: Plan, judge: Judge) -> List[Process]:
    """The processes of the empty places."""
    members = judge.members
    return [one for one in (*plan.workers[1:], *plan.spare)
            if one.name not in members or members[one.name].part == "lost"]


def next_place(plan: Plan, judge: Judge) -> Optional[Process]:
    """The process of the empty place that the next worker takes."""
    members, empty = judge.members, empty_places(plan, judge)
    return min(empty, key=lambda one: members[one.name].lost_at if one.name in members else -math.inf, default=None)
