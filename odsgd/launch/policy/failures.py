"""What the judge knows of each process, and what a failure says about its cause."""
import collections
import re
import signal
from dataclasses import dataclass, field
from typing import Deque, Optional, Sequence, Tuple

from kvstore.errors import EXIT_DEADLINE, EXIT_FAILURE

TAIL_LINES = 20
IMPORT_FAILS = "has no attribute 'bool'"  # in a script that imports MXNet before odsgd
STRANGER = re.compile(r"ps-lite/src/.*Check failed: (pb\.ParseFromArray|zmq_msg_more|send_bytes|.*to wait App)")
"""ps-lite's last line when it has read bytes that no process of a job would send."""

_PHASES = ("waiting", "running", "connecting", "met", "joined", "done", "ended")


@dataclass
class Member:
    """The known facts of one process."""

    name: str
    role: str
    host: str
    phase: str = "waiting"
    pid: Optional[int] = None
    code: Optional[int] = None
    error: Optional[str] = None
    asked_to_join: bool = False
    joined: bool = False
    hung: bool = False  # it is to be ended
    part: str = "awaited"
    """awaited: the job waits for its start and its end; lost: the job goes on without it; joiner: it came later, into
    an empty place, and nobody waits for it."""
    began_at: float = 0.0  # when it was started, if it came later
    lost_at: float = 0.0  # when it was found to be lost, or the one in whose place it comes
    tail: Deque[str] = field(default_factory=lambda: collections.deque(maxlen=TAIL_LINES))

    def reached(self, phase: str) -> None:
        """Phases only go forward: a late report of an ended process changes nothing."""
        if _PHASES.index(phase) > _PHASES.index(self.phase):
            self.phase = phase
        self.asked_to_join = self.asked_to_join or phase == "connecting"
        self.joined = self.joined or phase in ("joined", "done")

    @property
    def rank(self) -> int:
        """The rank in its name; the scheduler has none, and is 0."""
        return int(self.name.partition(" ")[2] or 0)

    @property
    def done_or_ended(self) -> bool:
        """Whether it has said that it is done, or has ended."""
        return self.phase in ("done", "ended")

    @property
    def blocks_startup(self) -> bool:
        """Whether the others wait for it in vain: it has not asked to join, or it ended before it joined."""
        return self.phase in ("waiting", "running") or (self.phase == "ended" and not self.joined)

    @property
    def state_text(self) -> str:
        """Its state in words, for the table of a job that has not started."""
        return {"waiting": "never started",
                "running": "running, has not asked to join",
                "connecting": "asked to join, waits for the others",
                "met": "has met the others",
                "ended": f"exited with code {self.code}" + ("" if self.joined else " without joining"),
                }.get(self.phase, "joined")

    @property
    def how_it_ended(self) -> Tuple[str, int]:
        """How it ended in words, and the exit code a shell would give for it; never 0."""
        if self.code is None:
            return "has reported a failure", EXIT_FAILURE
        if self.code >= 0:
            return f"exit code {self.code}", self.code or EXIT_FAILURE
        number = -self.code
        name = signal_name(number)
        hint = " (kill -9, or the kernel ran out of memory)" if number == signal.SIGKILL else ""
        return f"killed by {name}{hint}", 128 + number

    @property
    def where(self) -> str:
        """Host and pid, for messages."""
        return f"host {self.host}" + (f", pid {self.pid}" if self.pid else "")


def without_numbers(text: str) -> str:
    """What two reports of one cause have in common: no pids, times and ranks."""
    return re.sub(r"\d+(\.\d+)?", "N", text)


def signal_name(number: int) -> str:
    """`SIGKILL`, or `signal 35`."""
    return signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"


@dataclass
class Failure:
    """A process has failed, or several together."""

    member: Optional[Member]
    text: str = ""
    admits_other_cause: bool = False  # its report blames another process
    exit_code: Optional[int] = None  # the job's, if it does not follow from how the process ended: MPI may ask for one
    failed_together: Sequence[Member] = ()  # several processes, as those of a lost host; `member` is None then
    tail: Sequence[str] = ()  # the last lines from a lost host
    at: float = 0.0  # when we heard of it

    @property
    def is_secondary(self) -> bool:
        """Whether another failure, if there is one, is the likelier cause."""
        if self.member is None or self.member.hung:
            return False
        return self.admits_other_cause or self.timed_out

    def is_like(self, other: "Failure") -> bool:
        """Whether another process has reported the same error, so that both have the same cause."""
        errors = [one.member.error for one in (self, other) if one.member and one.member.error and not one.is_secondary]
        return len(errors) == 2 and without_numbers(errors[0]) == without_numbers(errors[1])

    @property
    def timed_out(self) -> bool:
        """Whether a deadline of its own ended it."""
        return self.member is not None and self.member.code == EXIT_DEADLINE

    @property
    def killed(self) -> bool:
        """Whether its host was lost, or a signal that MPI does not send ended it: no process of the job did that."""
        return self.member is None or (self.member.code is not None and self.member.code < 0 and not self.unreported)

    @property
    def crashed(self) -> bool:
        """Whether it crashed without a report: by a fault of its own, or in MPI that has lost a process."""
        return self._unreported_code in (-signal.SIGSEGV, -signal.SIGBUS)

    @property
    def unreported(self) -> bool:
        """Whether it crashed, aborted or exited without a report, as MPI does when it has lost a process."""
        return self.crashed or self._unreported_code > 0 or self._unreported_code == -signal.SIGABRT

    @property
    def _unreported_code(self) -> int:
        """The exit code of the process, or of its MPI, if it has not reported a reason, and was not ended; else 0."""
        if self.member is None or self.member.hung or self.member.error is not None:
            return 0
        return self.member.code or self.exit_code or 0

    @property
    def members(self) -> Sequence[Member]:
        """The processes that have failed."""
        return [self.member] if self.member else self.failed_together

    @property
    def exit_pending(self) -> bool:
        """Whether a process has reported a failure, or prints its stacks, and has not ended yet."""
        return any(member.code is None and (member.hung or member.error is not None) for member in self.members)

    def message(self, text: str, *remarks: str) -> str:
        """`text` and remarks; below them the cause: what the process reported, or the last lines of it or its host."""
        lines, title, tail = [text, *remarks], "the last lines", self.tail
        if self.member:
            title, tail = f"the last lines of {self.member.name}", self.member.tail
            lines += [f"  it reported: {self.member.error}"] if self.member.error else []
        if any(IMPORT_FAILS in line for line in tail):  # then no other line helps
            lines.append("  MXNet 1.9.1 does not know this NumPy: put `import odsgd` before `import mxnet`")
            return "\n".join(lines)
        if any(STRANGER.search(line) for line in tail):
            lines.append("  that is how ps-lite ends when something that is not part of this job speaks to one of its "
                         "ports, e.g. a port scanner (docs/explanation/security.md)")
        if self.member and self.member.error and any(self.member.error in line for line in tail):
            tail = ()  # the launcher has shown them; the cause stands above
        tail = _without_frames(tail)
        return "\n".join([*lines, f"  {title}:", *(f"    | {line}" for line in tail)] if tail else lines)


def _without_frames(tail: Sequence[str]) -> Sequence[str]:
    """Last lines, with a traceback cut down to its last line, the cause; the process's output has the whole.

    >>> _without_frames(["epoch 1", "Traceback (most recent call last):", '  File "a.py", line 1', "KeyError: 3"])
    ['epoch 1', 'KeyError: 3']
    """
    lines = [line for line in tail if line.strip()]
    begins = [at for at, line in enumerate(lines) if "Traceback (most recent" in line or line.startswith('  File "')]
    return [*lines[:begins[0]], *lines[-1:]] if begins and begins[0] < len(lines) - 1 else tail
