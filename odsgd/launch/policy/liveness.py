"""Which processes are silent, and which stand still: beats in, warnings and failures out. No process or clock here.

Every second an agent passes on the last beat of each process (`kvstore/job/pulse.py`): its iteration, its activity, how
long it has waited for others, and how long it has been silent.

1. If an agent or a process is silent for `WARN_S`, or for half the `hang_timeout_s` if that is less, we warn, and name
   the processes that wait for it; after `hang_timeout_s` it has failed. A process that has not beaten yet is not silent
   unless the kernel calls it stopped: it may be a script without odsgd, or still importing. A process that is done and
   cleans up has `LENIENT_FACTOR` times as long: 64 workers that end together on two cores are silent for over 10 s.
2. A worker in training, or a server at a message, that waits for nobody and does not move gets a warning, then fails,
   after the times of rule 1. We wait at least `PAUSE_FACTOR` times its longest pause so far, since iterations may be
   long. Evaluations, checkpoints and the first iterations have `LENIENT_FACTOR` times as long.
3. All workers wait, and no worker moves, for `hang_timeout_s`: a failure without a culprit. A worker that evaluates or
   writes waits for nobody. In the first iterations, which have longer, we warn after half their time. If a server is
   silent, or stands still at a message, it fails by rule 1 or 2 instead.
4. Workers may have different numbers of batches. If one has ended and another waits in a later iteration, the job fails
   after `UNEVEN_DATA_S`; we only warn if the first has not said where it ended. If all wait for each other at different
   iterations, and not in training, we warn after the time of rule 1 that this or lost messages may be the cause; their
   own deadline or rule 3 ends them. This rule skips asynchronous jobs.
5. If the launcher itself was held up, no process was silent meanwhile; an agent that was held up excuses its processes
   in the same way. Rules 2 to 4 look only at beats that have just come.
"""
import math
from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from odsgd.launch.policy.failures import Member

WARN_S = 10.0
HELD_UP_S = 2.0  # if we look at the clock so late, we, or the whole host, stood still
UNEVEN_DATA_S = 2.0
FRESH_S = 4.0
"""A beat that is older says nothing about the present."""
PAUSE_FACTOR, LENIENT_FACTOR = 5.0, 10.0
FIRST_ITERATIONS = 2
KERNEL_STATES = {"T": "it is stopped (SIGSTOP, Ctrl-Z or a debugger)", "t": "a debugger holds it",
                 "D": "it waits for a disk or a device", "R": "it computes without letting its other threads run"}


class Hung(NamedTuple):
    """Processes that have failed because they do not move; with `host`, because the agent there is silent."""

    names: List[str]
    text: str
    host: Optional[str] = None
    print_stacks: bool = True  # before they are killed
    blamed: bool = True  # the one process; else it is nobody's fault, or everybody's


@dataclass
class _ProcessState:
    """What the beats of one process say."""

    name: str
    member: Member
    agent: str  # names its agent: the plan's name of the host, and of a worker that joined also the worker's
    agent_at: Optional[float] = None  # the time of its agent's last message
    answered_at: float = -math.inf  # the time of the last ping that its agent has answered
    silent_s: Optional[float] = None  # as the agent counts; None: it has no pulse
    kernel_state: str = ""
    progress: int = 0  # a beat's `at`: a worker's iteration, how many messages a server has carried out
    substep: int = 0
    activity: str = ""
    asynchronous: bool = False
    beat_at: float = 0.0  # when its last beat was passed on to us
    leaving: bool = False
    progress_is_final: bool = False  # `progress` is the iteration that it ended after
    waits_s: Optional[float] = None
    moves: int = 0
    moved_at: float = 0.0
    slowest_s: float = 0.0
    warned: str = ""  # what the last warning said that it does not do: "answer" or "move"

    def beat(self, beat: Mapping[str, Any], now: float) -> None:
        self.silent_s = number(beat.get("silent_s")) or 0.0
        self.kernel_state = str(beat.get("state") or "")[:1]
        self.asynchronous = beat.get("asynchronous") is True
        unheard_s, self.beat_at = max(0.0, now - self.beat_at - HELD_UP_S), now  # it may have moved unheard
        waited, self.waits_s = self.waits_s is not None, number(beat.get("waits_s"))
        at, substep, self.moves = (int(number(beat.get(name)) or 0) for name in ("at", "substep", "moves"))
        at = self.progress if self.progress_is_final else at  # the agent goes on passing its last beat on
        activity = str(beat.get("activity") or "")[:20]
        if waited and self.waits_s is None:
            self.moved_at = now
        if (at, substep, activity) != (self.progress, self.substep, self.activity):
            if activity and activity == self.activity and not waited and self.moves > FIRST_ITERATIONS:
                self.slowest_s = max(self.slowest_s, now - self.moved_at - unheard_s)
            self.progress, self.substep, self.activity, self.moved_at = at, substep, activity, now

    def limit_s(self, base_s: float, waits: bool = False) -> float:
        """How long it may stand still. While it waits for others its activity gives it no more time."""
        going = (self.moves > FIRST_ITERATIONS and (waits or self.activity == "training")) or self.activity == "serving"
        return max(base_s * (1 if going else LENIENT_FACTOR), PAUSE_FACTOR * self.slowest_s)


class LivenessMonitor:
    """Watches the processes of one job."""

    def __init__(self, members: Sequence[Member], hang_timeout_s: float, now: float) -> None:
        self._processes = {one.name: _ProcessState(one.name, one, one.host, moved_at=now) for one in members}
        self._limit_s, self._warn_s = hang_timeout_s or math.inf, warn_s(hang_timeout_s)
        self._fresh_s = min(FRESH_S, self._warn_s)  # so that a silent agent is blamed before its processes
        self._looked_at = self._counted_at = now
        self._going = sum(name.startswith("worker") for name in self._processes)
        self._warnings: List[str] = []
        self._silent_agents: Set[str] = set()  # by their first process
        self.farthest = 0  # the greatest iteration in a worker's beats
        self._ended_workers: Dict[str, _ProcessState] = {}
        self._doubted = False  # the user has been told that all wait for each other
        self._uneven = False  # the user has been told that the data differ in length

    # Events

    def heard(self, names: Iterable[str], now: float) -> None:
        """A message of these processes' agent has come."""
        for name in names:
            if name in self._processes:
                self._processes[name].agent_at = now

    def answered(self, names: Iterable[str], at: float) -> None:
        """The agent of these processes has answered the ping of that time, and told all that it knew when it came."""
        for name in names:
            if name in self._processes:
                self._processes[name].answered_at = at

    def joins(self, worker: Member, now: float) -> None:
        """A worker starts while the job runs, by an agent of its own."""
        agent = f"{worker.host}, {worker.name}"
        self._processes[worker.name] = _ProcessState(worker.name, worker, agent, moved_at=now)

    def beats(self, beats: Mapping[str, Any], now: float) -> None:
        """An agent has passed on the beats of its processes."""
        for name, beat in beats.items():
            if name in self._processes and isinstance(beat, dict):
                self._processes[name].beat(beat, now)
                if name.startswith("worker"):
                    self.farthest = max(self.farthest, self._processes[name].progress)

    def leaving(self, name: str, now: float, at: object = None) -> None:
        """The process is done, after iteration `at` if it says so, and will end by itself."""
        if name in self._processes:
            process, told = self._processes[name], number(at)
            process.leaving, process.progress_is_final, process.moved_at = True, told is not None, now
            process.progress = process.progress if told is None else int(told)

    def ended(self, name: str) -> None:
        """The process has ended, and is not watched any more."""
        process = self._processes.pop(name, None)
        self._silent_agents.discard(name)
        if process is not None and name.startswith("worker"):
            self._ended_workers[name] = process

    def take_warnings(self) -> List[str]:
        """The warnings since the last call."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def named_as_silent(self) -> List[str]:
        """The processes of which a warning has said that they do not answer, and which have not answered since."""
        return [process.name for process in self._processes.values() if process.warned == "answer"]

    def unanswered_since(self, at: float) -> List[str]:
        """The processes of which no end is known, and whose agents have answered no ping of that time or later."""
        return [process.name for process in self._processes.values() if process.answered_at < at]

    # Decisions

    def find_hung(self, now: float) -> Optional[Hung]:
        """The first failure, if there is one."""
        held_up_s, self._looked_at = now - self._looked_at, now
        if held_up_s > HELD_UP_S:
            for process in self._processes.values():
                process.moved_at = min(now, process.moved_at + held_up_s)
                process.agent_at = None if process.agent_at is None else min(now, process.agent_at + held_up_s)
        return (self._find_silent_agent(now) or self._find_silent(now) or self._find_still(now)
                or self._find_deadlock(now) or self._compare_lengths(now))

    def _find_silent_agent(self, now: float) -> Optional[Hung]:
        agents: Dict[Tuple[str, float], List[_ProcessState]] = {}  # two agents at one address are heard at two times
        for process in self._processes.values():
            if process.agent_at is not None:
                agents.setdefault((process.agent, process.agent_at), []).append(process)
        for (_, heard_at), processes in agents.items():
            names, host, first = [process.name for process in processes], processes[0].member.host, processes[0].name
            silent_s = now - heard_at
            if silent_s > self._limit_s:
                return Hung(names, f"its agent has not answered for {silent_s:.0f} s", host)
            if silent_s > self._warn_s and first not in self._silent_agents:
                self._silent_agents.add(first)
                runs = "runs" if len(names) == 1 else "run"
                self._warnings.append(f"the agent on host {host} has not answered for {silent_s:.0f} s; it, its host "
                                      f"or the network is held up ({', '.join(names)} {runs} there)")
            elif silent_s < self._fresh_s and first in self._silent_agents:
                self._silent_agents.remove(first)
                self._warnings.append(f"the agent on host {host} answers again")
        return None

    def _find_silent(self, now: float) -> Optional[Hung]:
        for process in self._fresh(now):
            times = LENIENT_FACTOR if process.leaving and process.kernel_state not in ("T", "t") else 1
            if process.silent_s is None or process.silent_s <= self._fresh_s:
                self._recovered(process, "answer")
            elif process.silent_s > times * self._warn_s:
                state = KERNEL_STATES.get(process.kernel_state, "")
                text = f"has not answered for {process.silent_s:.0f} s{state and ': '}{state}{self._waiters(process)}"
                if process.silent_s > times * self._limit_s:
                    return Hung([process.name], text)
                self._warn(process, "answer", text)
        return None

    def _find_still(self, now: float) -> Optional[Hung]:
        for process in self._answering(now):
            if not process.activity or process.waits_s is not None:
                self._recovered(process, "move")
                continue
            still_s = now - process.moved_at
            verb = "carried out message" if process.activity == "serving" else "been at iteration"
            text = f"has {verb} {process.progress} for {still_s:.0f} s ({process.activity}), and waits for nobody"
            if still_s > process.limit_s(self._limit_s):
                return Hung([process.name], text + self._waiters(process))
            busy = process.activity in ("training", "serving")  # else it may take long
            if still_s > (process.limit_s(self._warn_s) if busy else process.limit_s(self._limit_s) / 2):
                self._warn(process, "move", text + self._waiters(process))
            elif still_s < self._fresh_s:
                self._recovered(process, "move")
        return None

    def _find_deadlock(self, now: float) -> Optional[Hung]:
        """Rule 3: a deadlock, or messages that do not come through."""
        workers = [process for process in self._processes.values() if process.name.startswith("worker")]
        if len(workers) != self._going:  # the others may have waited for the one that has gone
            self._going, self._counted_at = len(workers), now
        answering = self._answering(now)
        stood = [min(process.waits_s, now - max(process.moved_at, self._counted_at))
                 / process.limit_s(self._limit_s, waits=True) for process in workers
                 if process.activity and process.waits_s is not None and process in answering]
        if not workers or len(stood) < len(workers) or min(stood) <= 0.5:
            self._doubted = False
            return None
        if any(self._holds_up(process, answering, now) for process in self._processes.values()):
            return None
        where = ", ".join(f"{process.name} at iteration {process.progress}" for process in workers)
        since = max(self._counted_at, *(process.moved_at for process in workers))
        text = (f"for {now - since:.0f} s every process has answered and every worker has waited ({where}): "
                "messages between them do not come through, or they wait for each other")
        if min(stood) > 1:
            return Hung([process.name for process in answering], text, blamed=False)
        if not self._doubted and any(process.moves <= FIRST_ITERATIONS for process in workers):
            self._doubted = True
            self._warnings.append(text)
        return None

    def _compare_lengths(self, now: float) -> Optional[Hung]:
        """Rule 4: a failure if a worker with fewer batches has said where it ended, else a warning."""
        workers = [process for process in self._answering(now) if process.name.startswith("worker")]
        waiting = [process for process in workers if (process.waits_s or 0) > UNEVEN_DATA_S and not process.leaving]
        if self._uneven or not waiting or any(process.asynchronous for process in workers):
            return None
        farthest = max(waiting, key=lambda process: process.progress)
        fewer = {name: ended.progress for name, ended in self._ended_workers.items()
                 if ended.progress < farthest.progress}
        certain = any(self._ended_workers[name].progress_is_final for name in fewer)
        have = "has ended" if len(fewer) == 1 else "have ended"
        if fewer and certain:
            have += f" after {_iterations(list(fewer.values()))}"
        either, which_calls = "", ""
        if not fewer and all(min(process.waits_s or 0, now - process.moved_at) > self._warn_s for process in workers):
            fewer = {process.name: process.progress for process in workers
                     if 0 < process.progress < farthest.progress and process.activity != "training"}
            have = f"wait{'s' * (len(fewer) == 1)} elsewhere after {_iterations(list(fewer.values()))}"
            either = "either messages between them do not come through, or not all do the same: "
            which_calls = ", and all of them in barrier, global_weights, set_optimizer and the like"
        if fewer:
            self._uneven = True
            text = (f"{listed(list(fewer))} {have}, and {farthest.name} waits in iteration {farthest.progress}: "
                    f"{either}a synchronous store needs as many batches on every worker{which_calls}. Give all the "
                    'same number, by shards of one size and last_batch="discard" (drop_last=True); or make the store '
                    'with uneven="join"; or take an asynchronous one, such as asgd')
            if certain:
                return Hung([process.name for process in waiting], text, print_stacks=False, blamed=False)
            self._warnings.append(text)
        return None

    # Helpers

    def _fresh(self, now: float) -> List[_ProcessState]:
        """The processes whose agent has just sent a message."""
        return [process for process in self._processes.values()
                if process.agent_at is not None and now - process.agent_at < self._fresh_s]

    def _answering(self, now: float) -> List[_ProcessState]:
        return [process for process in self._fresh(now) if process.silent_s is not None
                and process.silent_s < self._fresh_s and now - process.beat_at < self._fresh_s]

    def _holds_up(self, process: _ProcessState, answering: Sequence[_ProcessState], now: float) -> bool:
        """It is a server that is silent or stands still, though not for so long that it has failed."""
        return process.silent_s is not None and process.name.startswith("server") and (
            process not in answering or (process.activity == "serving" and now - process.moved_at > self._fresh_s))

    def _waiters(self, process: _ProcessState) -> str:
        waiting = [other for other in self._processes.values()
                   if other.name.startswith("worker") and other is not process
                   and (other.silent_s or 0) < self._fresh_s and (other.waits_s or 0) > 1]
        if not waiting:
            return ""
        since = min(other.progress for other in waiting)
        return (f"; {listed([other.name for other in waiting])} wait{'s' * (len(waiting) == 1)} for it"
                + (f" since iteration {since}" if since else ""))

    def _warn(self, process: _ProcessState, kind: str, text: str) -> None:
        if process.warned != kind:
            process.warned = kind
            self._warnings.append(f"{process.name} on host {process.member.host} {text}")

    def _recovered(self, process: _ProcessState, kind: str) -> None:
        if process.warned == kind:
            process.warned = ""
            self._warnings.append(f"{process.name} on host {process.member.host} {kind}s again")


def warn_s(hang_timeout_s: float) -> float:
    """How long a process may be silent before it is named.

    >>> warn_s(60.0), warn_s(4.0), warn_s(0)
    (10.0, 2.0, 10.0)
    """
    return min(WARN_S, (hang_timeout_s or math.inf) / 2)


def listed(names: Sequence[str]) -> str:
    """`worker 0`, `worker 0 and server 1`, `workers 0, 2 and 5`.

    >>> listed(["worker 0", "worker 2", "worker 5"])
    'workers 0, 2 and 5'
    """
    roles = {name.partition(" ")[0] for name in names}
    if len(names) > 1 and len(roles) == 1:
        ranks = [name.partition(" ")[2] for name in names]
        return f"{roles.pop()}s {', '.join(ranks[:-1])} and {ranks[-1]}"
    return " and ".join(names)


def _iterations(counts: Sequence[int]) -> str:
    """`iteration 7`, or `iterations 7 to 9`."""
    least, most = min(counts, default=0), max(counts, default=0)
    return f"iteration {least}" if least == most else f"iterations {least} to {most}"


def number(value: object) -> Optional[float]:
    """A finite number in a beat; None for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2 ** 63:
        return float(value)
    return None
