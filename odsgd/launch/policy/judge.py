"""When and how a job ends: events in, a verdict out. No process, pipe or clock here; time is an argument.

    phase of a process   waiting → running → connecting → met → joined → done → ended
                         running: it has a pid; connecting: it asks for the others; met: a worker has met them through
                         the servers; joined: its store is set up, or it has met them

The rules, in the order in which `tick` applies them:

1. A signal to the launcher ends the job.
2. A failure (exit code, signal, `failed` report, lost host) ends the job. The verdict waits `SETTLE_S` for further
   failures, and up to `LAST_WORDS_S` for the culprit's own exit and traceback. The cause is the first failure; a report
   counts when it is made. Two failures are secondary: an expired deadline (exit code 75), and a report that blames
   another process, because a process that misses another one did not kill it. They are the cause only without others.
   When a process dies, MPI ends or crashes the others, perhaps before we see the first end. So a crash, an abort or an
   exit without a report is blamed after a SIGKILL, a lost host and, on a ring, an error that a process has reported: of
   these the first that we hear of. Of ends without a report a crash comes before the rest; after a deadline on a ring
   the deadline comes before all of them, and before reports that blame another. A process that we end because it hangs
   is blamed for that, however it ends. On a ring nobody can tell which of several ends without a report was first, and
   the message says so. After each failure we ping all agents. If one does not answer, the first failure may be behind
   it; the message says that, too.
   With `on_worker_loss="continue"` the job goes on without the failed workers (`News.lost`) if all had joined, the
   failed ones have ended, and a worker is left. If it cannot go on after one of several failures, all of them count.
   A process or an agent that hangs (`liveness.py`) has failed, too: `News.hung` are the processes to end.
3. All remaining workers have ended with 0: the servers get `FAREWELL_S` to report `done`, then the job has succeeded.
   If a server has failed, its exit code is the job's. We do not wait for the scheduler: it only introduced the
   processes to each other, and no worker tells it that the job is over.
4. A server or the scheduler has ended with 0 while every worker runs: after `EARLY_EXIT_FAILS_AFTER_S`, a failure.
5. The job is not up within the startup timeout: a failure, with a table of the processes' states. It is up when every
   worker runs, and the scheduler and all servers have joined, because ps-lite lets everybody go on at once; so a plain
   MXNet script, which never reports, delays nothing. A worker that has asked for the others must have met them. On
   sockets servers join for worker 0 alone, so every worker must have asked. Without servers, once a worker asks for the
   others, every worker must join, and the timeout begins anew. A worker that joins later has the same time; after that
   its place is free again.
"""
import signal
import textwrap
from dataclasses import dataclass, field
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from kvstore.errors import EXIT_DEADLINE, EXIT_FAILURE, EXIT_USAGE
from odsgd.launch.plan import Job, on_sockets
from odsgd.launch.policy.failures import Failure, Member, signal_name
from odsgd.launch.policy.liveness import LivenessMonitor
from odsgd.tools import aligned

SETTLE_S = 0.4
LAST_WORDS_S = 2.0
FAREWELL_S = 5.0
EARLY_EXIT_FAILS_AFTER_S = 10.0


class LostWorkers(NamedTuple):
    """The workers that the job goes on without."""

    ranks: List[int]
    message: str


@dataclass
class News:
    """What the agents and the user are to be told."""

    lost: List[LostWorkers] = field(default_factory=list)
    joined: List[int] = field(default_factory=list)  # ranks of workers that have joined the running job
    hung: List[str] = field(default_factory=list)  # processes that hang, and are to be ended
    failed: bool = False  # there has been a failure: all agents are to be pinged


@dataclass(frozen=True)
class Verdict:
    """How the job ends: the launcher's exit code, and its last message."""

    exit_code: int
    message: str
    culprit: Optional[str] = None
    by_signal: bool = False  # the launcher was told to end; nothing has failed
    workers_succeeded: bool = False  # every worker has succeeded, whatever came after
    apart: bool = False  # all have asked for the others, and they do not reach each other
    grows: bool = False  # it ends at a checkpoint, and starts again with the workers that it left out
    error: str = ""  # what the culprit has reported
    alike: Tuple[str, ...] = ()  # who else has reported that


class Judge:
    """Hears of everything that happens to a job; the rules stand at the head of the module."""

    def __init__(self, job: Job, members: Sequence[Member], now: float, scheduler_address: str = "") -> None:
        self.members: Dict[str, Member] = {member.name: member for member in members}
        self.workers = [member for member in members if member.role == "worker"]
        self.non_workers = [member for member in members if member.role != "worker"]
        self.startup_timeout_s, self.started_at, self.scheduler_address = job.startup_timeout_s, now, scheduler_address
        self.continues_on_loss, self.on_sockets = job.on_worker_loss == "continue", on_sockets(job)
        self.liveness = LivenessMonitor(members, job.hang_timeout_s, now)
        self.failures: List[Failure] = []
        self.kept: Dict[str, int] = {}  # by folder: the iteration of its last checkpoint; 0: it begins without one
        self.resumed = 0  # the iteration of the checkpoint that it began from
        self.saved_at = now
        self.news = News()
        self.signal: Optional[int] = None
        self.workers_ended_at: Optional[float] = None
        self.server_exited_at: Optional[float] = None
        self.joining_since: Optional[float] = None
        self.is_up = False

    # Events

    def joins(self, worker: Member, now: float) -> None:
        """A worker starts in an empty place. The job neither ends with it nor waits for it."""
        before = self.members.get(worker.name)
        worker.part, worker.began_at, worker.lost_at = "joiner", now, before.lost_at if before else 0.0
        self.members[worker.name] = worker
        self.workers = [*(one for one in self.workers if one.name != worker.name), worker]
        self.liveness.joins(worker, now)

    def started(self, name: str, pid: int) -> None:
        """The process exists."""
        self.members[name].pid = pid
        self.members[name].reached("running")

    def output(self, name: str, line: str) -> None:
        """The process has printed a line."""
        if line.strip():
            self.members[name].tail.append(line)

    def reported(self, name: str, report: Dict[str, Any], now: float) -> None:
        """A line has come on the process's report pipe; events that are unknown here change nothing."""
        member, event = self.members[name], report.get("event")
        if event in ("connecting", "met", "joined", "done"):
            member.reached(event)
            if self.joining_since is None:
                self.joining_since = now
            if event == "joined" and member.part == "joiner":
                self.news.joined.append(member.rank)
            if event == "done":
                self.liveness.leaving(name, now, report.get("at"))
        elif event in ("saved", "resumed"):
            iteration = report.get("iteration")
            if type(iteration) is int:
                self.kept[str(report.get("folder"))] = iteration
                self.saved_at = now if iteration else self.saved_at
                self.resumed = self.saved if event == "resumed" else self.resumed
        elif event == "failed" and member.error is None:
            member.error = str(report.get("error") or "no reason given")
            self._fail(Failure(member, admits_other_cause=bool(report.get("consequence"))), now)

    @property
    def saved(self) -> int:
        """The iteration of the last checkpoint that every folder has, or a later one in its place; 0: none."""
        return min(self.kept.values(), default=0)

    def exited(self, name: str, code: int, now: float) -> None:
        """The process has ended; a negative code is the signal that ended it."""
        member = self.members[name]
        member.code = code
        member.reached("ended")
        self.liveness.ended(name)
        if code:
            self._fail(Failure(member), now)
        elif member.role == "worker" and self._workers_ended():
            self.workers_ended_at = now
        elif member.role != "worker" and self.server_exited_at is None:
            self.server_exited_at = now

    def mpi_aborted(self, name: str, code: int, now: float) -> None:
        """The process's MPI wants the job to end with this exit code, whatever the process itself ends with."""
        code = code & 255 or EXIT_FAILURE
        self._fail(Failure(self.members[name], f"its MPI has aborted, exit code {code}", exit_code=code), now)

    def unstartable(self, name: str, error: str, now: float) -> None:
        """The process could not even be started."""
        self.liveness.ended(name)
        self._fail(Failure(self.members[name], f"could not be started: {error}"), now)

    def agent_signalled(self, host: str, names: Sequence[str], number: int, now: float) -> None:
        """A signal ends the agent of a host, and with it these processes."""
        self.host_lost(host, names, f"its agent was told to end by {signal_name(number)}", (), now, 128 + number)

    def host_lost(self, host: str, names: Sequence[str], why: str, tail: Sequence[str], now: float,
                  exit_code: Optional[int] = None) -> None:
        """The agent of a host, or the connection to it, has gone, and with it these processes."""
        gone = [member for name in names for member in [self.members[name]]
                if member.code is None and self._counts(member)]
        for name in names:
            self.liveness.ended(name)
        if gone:
            text = f"lost host {host} ({', '.join(member.name for member in gone)}): {why}"
            if len(tail) == 1:  # ssh gives its reason in one line
                text, tail = f"{text}: {tail[0]}", ()
            self._fail(Failure(None, text, exit_code=exit_code, failed_together=gone, tail=tail), now)

    def interrupted(self, number: int) -> None:
        """The launcher has been told to end."""
        self.signal = self.signal or number

    # Decisions

    def tick(self, now: float) -> Optional[Verdict]:
        """The verdict, once there is one."""
        self.is_up = (self.is_up and bool(self.non_workers)) or self._has_come_up()
        if self.signal:
            return self.stopped()
        self._watch(now)
        if self.failures:
            return self._failure_verdict(now)
        if self.workers_ended_at is not None:
            return self._success(now)
        return self._servers_exited_early(now) or self._startup_timeout(now)

    def stopped(self) -> Optional[Verdict]:
        """The end by a signal to the launcher, if there has been one."""
        return Verdict(128 + self.signal, f"stopped by {signal.Signals(self.signal).name}",
                       by_signal=True) if self.signal else None

    @property
    def any_worker_joined(self) -> bool:
        """Whether a worker has reported that it met the others."""
        return any(worker.joined for worker in self.workers)

    @property
    def all_joined(self) -> bool:
        """Whether every process that the job began with has joined."""
        return self.is_up and all(worker.joined or worker.part != "awaited" for worker in self.workers)

    def blocking_startup(self) -> List[str]:
        """The processes that kept the job from starting.

        Empty if all joined. If all workers ended with the same exit code, no single one is to blame; but if MPI ended
        them while they joined, the first one is named.
        """
        if self.all_joined:
            return []
        failed = [member for failure in self.failures for member in failure.members]
        alike = {member.code for member in failed} if set(map(id, self.workers)) <= set(map(id, failed)) else set()
        ended_while_joining = not self.non_workers and all(
            failure.member and failure.member.asked_to_join and (failure.unreported or failure.member.hung)
            for failure in self.failures)
        if len(self.workers) > 1 and len(alike) == 1 and None not in alike and not ended_while_joining:
            return []
        awaited = [member for member in self.members.values() if member.blocks_startup and member not in failed]
        cause = self._cause() if self.failures else None
        blocking = awaited if cause is None or (cause.is_secondary and awaited) else cause.members
        return [member.name for member in blocking if member.code != EXIT_USAGE]

    def startup_text(self, seconds: float) -> str:
        """What the job still waits for, in words; empty when it is up."""
        waited_for = [member for member in self.members.values()
                      if not member.joined and member.phase not in ("met", "ended")]
        late = [member for member in waited_for if member.blocks_startup] or waited_for
        if self.is_up or not late or not any(worker in waited_for for worker in self.workers):
            return ""
        first = late[0]
        rest = f" and {len(late) - 1} more" if len(late) > 1 else ""
        return f"starting for {seconds:.0f} s: waiting for {first.name} on {first.host}{rest} ({first.state_text})"

    def take_news(self) -> News:
        """What has happened since the last call."""
        news, self.news = self.news, News()
        return news

    def _watch(self, now: float) -> None:
        """Look for processes that hang, unless there is a failure already."""
        self._give_up_joiners(now)
        hung = None if self.failures or self.workers_ended_at is not None else self.liveness.find_hung(now)
        if hung is None:
            return
        if hung.host is not None:
            self.host_lost(hung.host, hung.names, hung.text, (), now)
            return
        members = [self.members[name] for name in hung.names]
        if hung.print_stacks:
            for member in members:
                member.hung = True
                self.liveness.ended(member.name)
            self.news.hung += hung.names
        if hung.blamed:
            self._fail(Failure(members[0], f"it {hung.text}", exit_code=EXIT_DEADLINE), now)
        else:
            self._fail(Failure(None, hung.text, exit_code=EXIT_DEADLINE, failed_together=members), now)

    def _give_up_joiners(self, now: float) -> None:
        """Free the places of workers that have not joined within the startup timeout: nobody waits for them."""
        late = [worker for worker in self.workers if worker.part == "joiner" and not worker.joined
                and worker.code is None and 0 < self.startup_timeout_s <= now - worker.began_at
                and not any(worker in failure.members for failure in self.failures)]
        for worker in late:
            worker.part, worker.lost_at = "lost", now
            self.liveness.ended(worker.name)
            self.news.hung.append(worker.name)
            self.news.lost.append(LostWorkers([worker.rank], f"{worker.name} has not joined ({worker.where}) within "
                                              f"{self.startup_timeout_s:g} s, and is given up"))

    def _counts(self, member: Member) -> bool:
        """Whether it matters that this process fails."""
        return member.part != "lost" and (member.role == "worker" or self.workers_ended_at is None)

    def _fail(self, failure: Failure, now: float) -> None:
        if not any(map(self._counts, failure.members)):
            return
        if not (failure.member and any(failure.member in other.members for other in self.failures)):
            failure.at, self.news.failed = now, True
            self.failures.append(failure)

    def _failure_verdict(self, now: float) -> Optional[Verdict]:
        cause = self._cause()
        waited = now - self.failures[0].at
        exit_pending = any(failure.exit_pending for failure in (self.failures if self.continues_on_loss else [cause]))
        doubtful = cause.is_secondary or (cause.unreported and not self.non_workers)
        unanswered = self.liveness.unanswered_since(cause.at) if doubtful else []
        if waited < SETTLE_S or ((exit_pending or unanswered) and waited < LAST_WORDS_S):
            return None
        reasons = [reason for failure in self.failures for reason in [self._why_not_continue(failure)] if reason]
        failed = [member.name for failure in self.failures for member in failure.members]
        if all(worker.part != "awaited" or worker.name in failed for worker in self.workers):
            reasons.append("no worker is left")
        if self.continues_on_loss and not reasons:
            self._continue_without_failed(now)
            return None
        remarks = [f"  --on-worker-loss continue does not help: {reasons[0]}"] if self.continues_on_loss else []
        if self._lost_ranks():
            remarks.append(f"  the job had lost workers {self._lost_ranks()} before")
        if unanswered:
            remarks.append(f"  no agent has answered since for {', '.join(unanswered)}: whether another failed first "
                           "is not known")
        return self._verdict_on(cause, remarks)

    def _cause(self) -> Failure:
        any_clearer = not self.non_workers or any(failure.killed for failure in self.failures)
        ring_timed_out = not self.non_workers and any(worker.code == EXIT_DEADLINE for worker in self.workers)
        any_crashed = not ring_timed_out and any(failure.crashed for failure in self.failures)

        def doubt(failure: Failure) -> Tuple[int, bool, bool]:
            unreported = failure.unreported
            follows = failure.is_secondary or (ring_timed_out and unreported)
            return (0 if not follows else 2 if ring_timed_out and not failure.timed_out else 1,
                    any_clearer and unreported, any_crashed and unreported and not failure.crashed)

        return min(self.failures, key=doubt)  # stable

    def _why_not_continue(self, failure: Failure) -> Optional[str]:
        """Why the job cannot go on after this failure; None: it can."""
        for member in failure.members:
            if member.role != "worker":
                return f"a job cannot go on without {member.name if member.role == 'server' else 'the scheduler'}"
            # Until a worker's store has opened and reports `joined`, ps-lite keeps the others waiting for it.
            if not self.all_joined:
                missing = next((one for one in [member, *self.members.values()] if not one.joined), member)
                return f"the job was still starting, which takes all of them: {missing.name} has not joined"
            if failure.exit_pending:
                return f"{member.name} has not ended, and may still take part"
        return None

    def _continue_without_failed(self, now: float) -> None:
        """Go on without the workers that have failed."""
        for failure in self.failures:
            for member in failure.members:
                member.part, member.lost_at = "lost", now
            going = sum(worker.part != "lost" for worker in self.workers)
            how = ("every other worker has finished" if self._workers_ended() else
                   f"the job goes on with {going} of {len(self.workers)} workers")
            text = failure.text
            if failure.member:
                reason = failure.text or failure.member.how_it_ended[0]
                text = f"{failure.member.name} was lost ({failure.member.where}): {reason}"
            ranks = [member.rank for member in failure.members]
            self.news.lost.append(LostWorkers(ranks, failure.message(f"{text}; {how}")))
        self.failures = []
        if self._workers_ended():
            self.workers_ended_at = now

    def _verdict_on(self, cause: Failure, remarks: Sequence[str]) -> Verdict:
        member = cause.member
        if member is None:
            return Verdict(cause.exit_code or EXIT_FAILURE, cause.message(cause.text, *remarks))
        how, exit_code = (cause.text, cause.exit_code or EXIT_FAILURE) if cause.text else member.how_it_ended
        alike = [other.member.name for other in self.failures if other.member and other is not cause
                 and other.is_like(cause)]
        others = [f"{other.member.name}: {other.text or other.member.how_it_ended[0]}" for other in self.failures
                  if other.member and other is not cause and other.member.name not in alike]
        unclear = not self.non_workers and cause.unreported and sum(one.unreported for one in self.failures) > 1
        when = "after it, or before it (which failed first is not known)" if unclear else "after it, not the cause"
        after = [f"  in the same way: {', '.join(alike)}"] if alike else []
        after += [f"  {when}: {'; '.join(others)}"] if others else []
        text = f"{member.name} failed ({member.where}): {how}"
        return Verdict(exit_code, cause.message(text, *after, *remarks), member.name,
                       error=member.error or "", alike=tuple(alike))

    def _success(self, now: float) -> Optional[Verdict]:
        assert self.workers_ended_at is not None
        # A server that no worker has called never reports `done`.
        staying = [member.name for member in self.non_workers
                   if member.code is None and member.role == "server" and member.phase != "done"
                   and (self.any_worker_joined or member.joined)]
        if staying and now - self.workers_ended_at < FAREWELL_S:
            return None
        bad = [member for member in self.non_workers if member.code]
        remarks = [f"{member.name} ended badly after the last worker had succeeded ({member.where}): "
                   f"{member.how_it_ended[0]}" for member in bad]
        if staying:
            remarks.append(f"{', '.join(staying)} had not ended {FAREWELL_S:g} s after the last worker; stopped")
        if self._lost_ranks():
            remarks.append(f"the job has finished without workers {self._lost_ranks()}")
        return Verdict(bad[0].how_it_ended[1] if bad else 0, "\n".join(remarks), workers_succeeded=True)

    def _servers_exited_early(self, now: float) -> Optional[Verdict]:
        if self.server_exited_at is None or now - self.server_exited_at < EARLY_EXIT_FAILS_AFTER_S:
            return None
        left = [worker for worker in self.workers if worker.part == "awaited"]
        if not any(worker.joined for worker in left) or any(worker.done_or_ended for worker in left):
            return None
        member = next(member for member in self.non_workers if member.code is not None)
        text = f"{member.name} ended with exit code 0 ({member.where}) while every worker was still running"
        return Verdict(EXIT_FAILURE, Failure(member).message(text), member.name)

    def _workers_ended(self) -> bool:
        return all(worker.code == 0 for worker in self.workers if worker.part == "awaited")

    def _lost_ranks(self) -> List[int]:
        """The ranks of lost workers, unless another has joined in their place."""
        return sorted(worker.rank for worker in self.workers
                      if worker.part == "lost" or (worker.lost_at and not worker.joined))

    def _has_come_up(self) -> bool:  # rule 5
        if self.non_workers:
            return all(member.joined for member in self.non_workers) and not any(
                worker.phase == "connecting"
                or (worker.blocks_startup if self.on_sockets else worker.phase == "waiting")
                for worker in self.workers if worker.part == "awaited")
        return all(worker.joined or worker.phase in ("running", "ended") for worker in self.workers)

    def _startup_timeout(self, now: float) -> Optional[Verdict]:
        since = self.joining_since if not self.non_workers and self.joining_since is not None else self.started_at
        if self.is_up or not 0 < self.startup_timeout_s <= now - since:
            return None
        members = list(self.members.values())
        silent = self.liveness.named_as_silent()
        missing = [member.name for member in members if member.blocks_startup or member.name in silent]
        if missing:
            head = f"missing: {', '.join(missing)} ({len(missing)} of {len(members)})"
        else:
            servers = dict.fromkeys(member.host for member in self.non_workers if member.role == "server")
            head = ("everyone asked to join, but they do not reach each other. Check that every host can connect to "
                    f"{' and '.join([self.scheduler_address, *servers])} (firewall, wrong network interface?)")
        rows = [("process", "host", "pid", "state")]
        rows += [(member.name, member.host, str(member.pid or "-"), member.state_text
                  + ", does not answer" * (member.name in silent)) for member in members]
        return Verdict(EXIT_DEADLINE, "\n".join([
            f"the job has not come up within {self.startup_timeout_s:g} s; {head}",
            textwrap.indent(aligned(rows, to_left=rows[0]), "  "),
            "  If a worker needs more time before its first step, raise --startup-timeout."]), apart=not missing)
