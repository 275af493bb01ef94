"""The agent, one per host: it starts the processes, forwards their output, and ends when they have ended.

When a process ends, the agent kills the rest of its group before it reports the exit. It adopts orphans, so it finds
even a grandchild with a session of its own. If the channel to the launcher closes, or is silent for too long, the agent
stops everything. It has one thread, because a fork in a threaded process is not safe.
"""
import functools
import json
import math
import os
import selectors
import shutil
import signal
import socket
import tempfile
import time
from typing import Any, Callable, Dict, List, Optional, Type

from kvstore.errors import shown
from odsgd.launch import linux, messages
from odsgd.launch.agent.child import Child, StartError, TunnelProcess, start, unless_gone
from odsgd.launch.lines import CHUNK, Pieces, Stream
from odsgd.launch.messages import Channel, Message, Orders
from odsgd.launch.policy.liveness import HELD_UP_S

MAX_BACKLOG = 1 << 20
"""While the launcher has more bytes than this to read, the processes' output stays in their pipes."""
ORPHANED_GRACE_S = 1.0
KILLED_WITHIN_S, SWEPT_WITHIN_S, SENT_WITHIN_S = 5.0, 0.2, 5.0
"""How long the end may take: the launcher must not wait for a process that survives SIGKILL, e.g. at a dead disk."""
BEATS_EVERY_S = 1.0


class Agent:
    """Invariants: a child is in `children` from its start until its exit is queued; after `stopping` is set no child is
    started; `run` returns only when `children` is empty or SIGKILL has not helped."""

    def __init__(self, orders: Orders, channel: Channel) -> None:
        self.orders, self.channel = orders, channel
        self.children: Dict[int, Child] = {}
        self.stopping = self.told_to_stop = False
        self.signalled: Optional[int] = None  # a signal that has not been obeyed yet
        self.ended_by: Optional[int] = None
        self.kill_at: Optional[float] = None
        self.give_up_at: Optional[float] = None
        self.heard_at = self.looked_at = time.monotonic()
        self.beats_at = 0.0
        self.pinged_at: Optional[float] = None  # by the launcher's clock; None: answered
        self.selector = selectors.DefaultSelector()
        self.paused = self.excused = self.late = False
        self._listen_to_signals()  # before there is anything to remove
        self.lost_file = _new_lost_file() if orders.tells_losses else None
        self.files = {*orders.sockets, *filter(None, [self.lost_file])}  # to be removed at the end
        self.unnoted: List[str] = []  # lines that could not be written to `lost_file` yet
        self.folder = tempfile.mkdtemp(prefix="odsgd-servers-")
        """The working directory of servers and the scheduler: empty, and closed to other users."""
        self.tunnel: Optional[TunnelProcess] = None
        self._handlers: Dict[Type[Message], Callable[[Any], object]] = {
            messages.Stop: self._stop_as_told,
            messages.Ping: self._pinged,
            messages.EndHung: self._end_hung,
            messages.MpiAnswer: self._answer_mpi,
            messages.WorkersChanged: lambda changed: self._note_of_workers(changed.lines),
            messages.AllMet: self._all_have_met,
            messages.OpenRemoteSockets: self._open_remote_sockets}

    def run(self) -> int:
        """Start everything; return when the launcher has said to stop and every process is gone."""
        try:
            self._run()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
            for path in self.files:
                with unless_gone:
                    os.unlink(path)
        self.channel.send(messages.Ended())
        self._drain_channel()
        self._close_signals()
        return 0

    def _run(self) -> None:
        linux.adopt_orphans()
        self.selector.register(self.channel.read_fd, selectors.EVENT_READ, self._read_channel)
        self.channel.send(messages.Hello(socket.gethostname()))
        if self.orders.tunnel:
            self.tunnel = TunnelProcess(self.orders.tunnel, self.channel)
            self.selector.register(self.tunnel.channel.read_fd, selectors.EVENT_READ, self._read_tunnel)
        for process in self.orders.processes:
            self._read_channel()  # a stop may have come together with the orders
            self._obey_signal()
            if not self.stopping:
                self._start(process)
        self.looked_at = time.monotonic()
        while not self.stopping or (self.children and time.monotonic() < (self.give_up_at or math.inf)):
            wait_s, pinged_at = self._wait_s(), self.pinged_at
            for key, _ in self.selector.select(wait_s):
                key.data()
            self._excuse(wait_s)
            self._obey_signal()
            self._note_mpi_files(lambda child: child.connecting)
            self._reap()
            self._answer_ping(pinged_at)
            if self.unnoted:
                self._note_of_workers([])
            self._check_channel()
            self._enforce()
            if self.tunnel:
                self.tunnel.watch()
            self._pass_beats()
        if self.tunnel:
            self.tunnel.close()
        self._sweep()

    def _excuse(self, wait_s: float) -> None:
        """If this call comes late, perhaps the whole host stood still: then nobody was silent meanwhile."""
        now, excused = time.monotonic(), self.excused
        held_up_s, self.looked_at = now - self.looked_at - wait_s, now
        self.excused = held_up_s > HELD_UP_S
        if self.excused:
            self.beats_at = self.beats_at if excused else now  # what has come meanwhile is read before beats are sent
            self.heard_at = min(now, self.heard_at + held_up_s)
            for child in self.children.values():
                child.beat_at = None if child.beat_at is None else min(now, child.beat_at + held_up_s)

    def _wait_s(self) -> float:
        """How long the loop may wait for news."""
        ending = self.stopping or any(child.kill_at for child in self.children.values())
        if ending or self.channel.backlog or self.pinged_at is not None:
            return 0.05
        return BEATS_EVERY_S / 4

    def _start(self, process: messages.ProcessOrders) -> None:
        try:
            child = start(process, self.orders, self.folder, self.lost_file)
        except StartError as error:
            self.channel.send(messages.Unstartable(process.name, str(error)))
            return
        self.children[child.pid] = child
        for stream in child.streams:
            self._listen(child, stream)
        self.channel.send(messages.Started(child.name, child.pid))

    # Reading

    def _listen(self, child: Child, stream: Stream) -> None:
        self.selector.register(stream.fd, selectors.EVENT_READ, functools.partial(self._read, child, stream))

    def _stop_listening(self, fd: int) -> None:
        if fd in self.selector.get_map():  # else reading is paused
            self.selector.unregister(fd)

    def _read(self, child: Child, stream: Stream) -> None:
        self._forward(child, stream.kind, stream.read())
        if not stream.open:
            self._stop_listening(stream.fd)

    def _forward(self, child: Child, kind: str, pieces: Pieces) -> None:
        for text, progress in pieces:
            if kind == "report":
                self._forward_report(child, text)
            elif kind == "mpi":
                self.channel.send(messages.MpiRequest(child.name, text))
            elif not progress or child.shows_progress():
                self.channel.send(messages.Output(child.name, kind, text, progress))

    def _forward_report(self, child: Child, text: str) -> None:
        try:
            report = json.loads(text or "{}")
        except (ValueError, RecursionError):
            report = None
        if not isinstance(report, dict):  # two writers have mixed a line, or a kill has cut it off; the next is whole
            if not child.garbled:
                self.channel.send(messages.HostWarning(
                    f"a report of {child.name} cannot be read and is lost: {shown(text)}"))
            child.garbled = True
        elif report.get("event") == "beat":
            child.beat, child.beat_at = report, time.monotonic()
        elif report:
            child.connecting = report.get("event") == "connecting"
            self.channel.send(messages.Report(child.name, report))

    def _read_tunnel(self) -> None:
        assert self.tunnel
        self.tunnel.read()
        if not self.tunnel.channel.open:
            self._stop_listening(self.tunnel.channel.read_fd)

    def _pass_beats(self) -> None:
        """Send the last beats, or none at all: this also says that the agent runs. Not while paused."""
        now = time.monotonic()
        self.late = now - self.looked_at > HELD_UP_S and not self.late  # `_excuse` sees to it in the next turn
        if now - self.beats_at >= BEATS_EVERY_S and not (self.paused or self.late):
            self.beats_at = now
            beats = {child.name: child.last_beat(now) for child in self.children.values()}
            self.channel.send(messages.Beats({name: beat for name, beat in beats.items() if beat}))

    def _named(self, name: str) -> List[Child]:
        return [child for child in self.children.values() if child.name == name]

    # Ending

    def _reap(self) -> None:
        """Collect every process that has ended: our own, and adopted orphans."""
        try:
            while True:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if info is None:
                    return
                if info.si_pid in self.children:
                    self._ended(self.children[info.si_pid])
                else:
                    os.waitpid(info.si_pid, 0)
        except ChildProcessError:
            return

    def _ended(self, child: Child) -> None:
        child.signal(signal.SIGKILL)  # before the pid is free to become another process's
        code = child.popen.wait()
        self._obey_signal()  # the process may have ended by the same signal
        for stream in child.streams:
            if stream.open:
                self._forward(child, stream.kind, stream.drain())
                self._stop_listening(stream.fd)
            os.close(stream.fd)
        del self.children[child.pid]
        self.channel.send(messages.Exit(child.name, code))

    def _stop(self, grace_s: float) -> None:
        """SIGTERM now, SIGKILL after `grace_s`; a second, shorter stop brings the SIGKILL forward."""
        now = time.monotonic()
        if not self.stopping:
            self._note_mpi_files(lambda child: True)
            for child in self.children.values():
                child.signal(signal.SIGTERM)
                child.signal(signal.SIGCONT)  # a stopped process does not see SIGTERM
        self.stopping = True
        self.kill_at = min(self.kill_at or now + grace_s, now + grace_s)

    def _enforce(self) -> None:
        now = time.monotonic()
        all_end = self.kill_at is not None and now >= self.kill_at
        for child in self.children.values():
            if all_end or (child.kill_at is not None and now >= child.kill_at):
                child.signal(signal.SIGKILL)
        if all_end:
            self.give_up_at = self.give_up_at or now + KILLED_WITHIN_S

    def _note_mpi_files(self, of: Callable[[Child], bool]) -> None:
        for child in filter(of, self.children.values()):
            self.files |= linux.mpi_files(child.pid)

    def _sweep(self) -> None:
        """Kill the processes that have left their group: on Linux they are our descendants by now."""
        now = time.monotonic()
        give_up_at = max(self.give_up_at or now + KILLED_WITHIN_S, now + SWEPT_WITHIN_S)
        while time.monotonic() < give_up_at:
            left = linux.descendants(os.getpid())
            if not left:
                return
            for pid in left:
                with unless_gone:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
            self._reap()

    # The launcher

    def _read_channel(self) -> None:
        self.heard_at = time.monotonic()
        for message in self.channel.receive():
            if type(message) in self._handlers:
                self._handlers[type(message)](message)

    def _stop_as_told(self, stop: messages.Stop) -> None:
        self.told_to_stop = True
        self._stop(stop.grace_s)

    def _end_hung(self, hung: messages.EndHung) -> None:
        for child in self._named(hung.process):
            child.end_hung()

    def _answer_mpi(self, answer: messages.MpiAnswer) -> None:
        for child in self._named(answer.process):
            child.answer_mpi(answer.line)

    def _pinged(self, ping: messages.Ping) -> None:
        self.pinged_at = ping.at

    def _answer_ping(self, at: Optional[float]) -> None:
        """Answer a ping that had come before this turn, in which the processes' reports and ends have been sent."""
        if at is not None and not self.paused:
            self.channel.send(messages.Pong(at))
            if self.pinged_at == at:  # else another ping has come
                self.pinged_at = None

    def _note_of_workers(self, lines: List[str]) -> None:
        """Tell this host's workers, by a file, who was lost and who joined. Lines for a full disk are tried again."""
        waits, self.unnoted = bool(self.unnoted), self.unnoted + lines
        try:
            if self.lost_file:
                _append_lines(self.lost_file, self.unnoted)
            self.unnoted = []
        except OSError as error:
            if not waits:
                self.channel.send(messages.HostWarning(f"its workers do not hear that others are lost: {error}; the "
                                                       "agent tries again until the file can be written"))

    def _all_have_met(self, message: messages.AllMet) -> None:
        """Remove the files of sockets, so that no one else can connect."""
        for path, lasting in self.orders.sockets.items():
            with unless_gone:
                if not lasting:
                    os.unlink(path)
        if self.tunnel:
            self.tunnel.channel.send(message)

    def _open_remote_sockets(self, message: messages.OpenRemoteSockets) -> None:
        """Pass the message on to the tunnel, and note the files, which a killed tunnel leaves behind."""
        assert self.tunnel
        self.files |= {remote.name for remote in message.sockets if os.path.isabs(remote.name)}
        self.tunnel.channel.send(message)

    def _check_channel(self) -> None:
        """Stop if the launcher has gone; leave output in the pipes while it reads too slowly."""
        silence_s = self.orders.silence_s
        if silence_s and time.monotonic() - self.heard_at > silence_s:
            self.channel.close()
        if not self.channel.open:
            self._stop_listening(self.channel.read_fd)
            self._stop(ORPHANED_GRACE_S)
        self.channel.flush()
        if self.tunnel:
            self.tunnel.channel.flush()
        full = len(self.channel.backlog) > MAX_BACKLOG
        if full != self.paused:
            self.paused, self.beats_at = full, time.monotonic()  # as in `_excuse`
            for child in self.children.values():
                for stream in child.streams:
                    if full:
                        self._stop_listening(stream.fd)
                    elif stream.open:
                        self._listen(child, stream)

    def _signalled(self, number: int, frame: object) -> None:
        self.signalled = self.ended_by = number  # the loop does the rest: a process may be half started now

    def _obey_signal(self) -> None:
        """If somebody else's signal ends us, end our processes, and tell the launcher."""
        if self.signalled is not None:
            self._stop(self.orders.grace_s)
            self.channel.send(messages.AgentSignalled(self.signalled))
            self.signalled = None

    def _drain_channel(self) -> None:
        deadline = time.monotonic() + SENT_WITHIN_S
        while self.channel.backlog and time.monotonic() < deadline:
            self.channel.flush()
            time.sleep(0.01)

    def _listen_to_signals(self) -> None:
        """Let signals wake the selector. SIGCHLD needs nothing else, because `_reap` looks for ended processes."""
        read_fd, write_fd = self.wakeup = os.pipe()
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._signalled)
        self.selector.register(read_fd, selectors.EVENT_READ, lambda: os.read(read_fd, CHUNK))

    def _close_signals(self) -> None:
        """Close the files of the loop: a pod runs many agents, one after the other."""
        signal.set_wakeup_fd(-1)
        self.selector.close()
        for fd in self.wakeup:
            os.close(fd)


def _new_lost_file() -> str:
    """An empty file that only this user can read; the processes of this host look into it for lost workers."""
    descriptor, path = tempfile.mkstemp(prefix="odsgd-lost-")
    os.close(descriptor)
    return path


def _append_lines(path: str, lines: List[str]) -> None:
    """Append in one write, so that nobody reads half a line; to a new file, if a clean-up has removed the old one."""
    def safely(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW, 0o600)
    with open(path, "a", opener=safely) as file:
        file.write("".join(f"{line}\n" for line in lines))
