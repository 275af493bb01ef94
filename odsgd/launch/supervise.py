"""The loop between the agents, the watch that decides, and the console. One thread; everything is an event."""
import collections
import contextlib
import functools
import os
import selectors
import signal
import subprocess
import threading
import time
from typing import Any, Callable, Deque, Dict, Iterator, List, Optional, Sequence

from kvstore.errors import ConfigError
from odsgd.launch import pmi, reach
from odsgd.launch.addresses import LOOPBACK, launching_address, numeric, reserve_port
from odsgd.launch.agent import CHUNK, Lines
from odsgd.launch.console import Console
from odsgd.launch.plan import Job, Plan, make_plan
from odsgd.launch.reach import Link
from odsgd.launch.watch import TAIL_LINES, Member, Verdict, Watch

TICK_S = 0.1
PING_EVERY_S = 10.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ENDED_WITHIN_S = 6.0
"""How long after the last SIGKILL an agent may take to say that nothing is left."""

HUNG_UP_WITHIN_S = 4.0
"""How long an agent may take to end after the connection has been closed on it."""


def run(job: Job, console: Optional[Console] = None) -> int:
    """Run a job to its end; return the launcher's exit code. Blocks; main thread only, since it takes the signals."""
    with contextlib.closing(reserve_port(job.port)) as holder:
        reach.check_programs(job)
        plan = make_plan(job, (root_uri(job), holder.getsockname()[1]))
        if job.sync_dst_dir:
            reach.synchronise(job, list(dict.fromkeys(job.slots)))
        return Supervisor(job, plan, console or Console()).run()


def root_uri(job: Job) -> str:
    """The scheduler's address: loopback for a local job, else this machine's as the hosts see it."""
    if job.launcher == "local":
        return LOOPBACK
    if job.host_ip:
        address = numeric(job.host_ip)
        if address is None:
            raise ConfigError(f"--host-ip {job.host_ip}: not an address of this machine that is known here")
        return address
    return launching_address([host.address for host in job.slots])


class Supervisor:
    """Opens a link to every host, feeds the watch with what comes, and ends the job with its verdict."""

    def __init__(self, job: Job, plan: Plan, console: Console) -> None:
        self.job, self.plan, self.console = job, plan, console
        self.selector = selectors.DefaultSelector()
        self.links: List[Link] = []
        self.pmi: Optional[pmi.Server] = None
        self.mpirun: Optional[reach.Mpirun] = None
        self.carriers: "List[subprocess.Popen[bytes]]" = []
        self.complaints: Dict[str, Deque[str]] = collections.defaultdict(lambda: collections.deque(maxlen=TAIL_LINES))
        members = [Member(process.name, process.role, process.host.address) for process in plan.processes]
        self.watch = Watch(members, job.startup_timeout_s, time.monotonic(), "{}:{}".format(*plan.root),
                           job.on_worker_loss)
        self.signals: List[int] = []
        self.pinged_at = time.monotonic()
        self.ending = False

    def run(self) -> int:
        """From the first agent to the last."""
        with self._signals():
            try:
                self._open()
                verdict = self._wait()
                if verdict.by_signal and self.console.on_terminal["stderr"]:
                    self.console.say("stopping; once more to end everything at once")
                self._end()
            except BrokenPipeError:  # nobody reads our output any more (`| head`): as if by SIGPIPE
                return 128 + signal.SIGPIPE
            finally:
                self._close()
        self._announce(verdict)
        return verdict.exit_code

    def _wait(self) -> Verdict:
        while True:
            self._turn()
            verdict = self.watch.tick(time.monotonic())
            for loss in self.watch.take_losses():
                self._tell({"do": "lost", "workers": loss.ranks})
                self.console.say(loss.message)
            if verdict:
                return verdict

    # Opening

    def _open(self) -> None:
        if not self.job.num_servers:
            workers = self.plan.workers
            table = pmi.Table([worker.env["PMI_ID"] for worker in workers],
                              pmi.process_mapping([worker.host for worker in workers]))
            self.pmi = pmi.Server(self.plan.root, table, self.selector, self._cut_off)
        hosts = list(dict.fromkeys(process.host for process in self.plan.processes))
        if self.job.launcher == "mpi":
            self.mpirun = reach.Mpirun(self.job, self.plan)
            self.carriers.append(self.mpirun.process)
            self._listen(self.mpirun.listener.fileno(), self._visitor)
            self._listen_to_lines(self.mpirun.process, "mpirun", ("stdout", "stderr"))
            hosts = [host for host in hosts if host.here]
        for host in hosts:
            reach_it = reach.open_local if host.here else reach.open_ssh
            self._add(reach_it(self.job, self.plan, host))

    def _add(self, link: Link) -> None:
        self.links.append(link)
        self._listen(link.channel.read_fd, lambda: self._heard(link))
        if link.carrier:
            self.carriers.append(link.carrier)
            self._listen_to_lines(link.carrier, link.host, ("stderr",))

    def _visitor(self) -> None:
        assert self.mpirun
        link = self.mpirun.accept()
        if link:
            self._add(link)
            if self.ending:
                link.channel.send({"do": "kill"})

    def _cut_off(self, worker_rank: int, what: str) -> None:
        self.console.say(f"worker {worker_rank}: its MPI asked for {what}; it was cut off")

    # One turn of the loop

    def _turn(self) -> None:
        for key, _ in self.selector.select(TICK_S):
            key.data()
        now = time.monotonic()
        if now - self.pinged_at >= PING_EVERY_S:
            self.pinged_at = now
            self._tell({"do": "ping"})
        for link in self.links:
            link.channel.flush()
        if self.mpirun and self.mpirun.waiting and self.mpirun.process.poll() is not None:
            self._lost_before_arrival(self.mpirun)

    def _heard(self, link: Link) -> None:
        for message in link.channel.receive():
            handler: Optional[Callable[..., None]] = getattr(self, "_on_" + str(message.get("event")), None)
            if handler:
                handler(link, message)
        if not link.channel.open:
            self.selector.unregister(link.channel.read_fd)
            if not link.ended:
                self._lost(link)

    def _on_hello(self, link: Link, message: Dict[str, Any]) -> None:
        link.greeted = True
        if link.carrier is None:  # mpirun has chosen the host; now we know which
            link.host = message["host"]
            for name in link.names:
                self.watch.members[name].host = link.host

    def _on_started(self, link: Link, message: Dict[str, Any]) -> None:
        self.watch.started(message["process"], message["pid"])

    def _on_unstartable(self, link: Link, message: Dict[str, Any]) -> None:
        self.watch.unstartable(message["process"], message["error"], time.monotonic())

    def _on_output(self, link: Link, message: Dict[str, Any]) -> None:
        if message["progress"]:
            self.console.progress(message["process"], message["text"])
            return
        self.watch.output(message["process"], message["text"])
        self.console.line(message["process"], message["text"], message["stream"])

    def _on_report(self, link: Link, message: Dict[str, Any]) -> None:
        self.watch.reported(message["process"], message["report"], time.monotonic())

    def _on_exit(self, link: Link, message: Dict[str, Any]) -> None:
        self.watch.exited(message["process"], message["code"], time.monotonic())

    def _on_ended(self, link: Link, message: Dict[str, Any]) -> None:
        link.ended = True
        if not self.ending:
            self._lost(link)

    def _on_noise(self, link: Link, message: Dict[str, Any]) -> None:
        self._complaint(link.host, message["text"], "stdout")

    def _lost(self, link: Link) -> None:
        why = "its agent has gone"
        if link.carrier:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = link.carrier.wait(timeout=1.0)
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                why = f"{link.carrier_name} {how}"
        self._read_last_words(link.carrier, link.host)
        self.watch.host_lost(link.host, link.names, why, list(self.complaints[link.host]), time.monotonic())

    def _lost_before_arrival(self, mpirun: reach.Mpirun) -> None:
        names = [process.name for rank in sorted(mpirun.waiting) for process in mpirun.ranks[rank]]
        mpirun.waiting.clear()
        self._read_last_words(mpirun.process, "mpirun")
        why = f"mpirun ended with exit code {mpirun.process.returncode} before they started"
        self.watch.host_lost("of MPI", names, why, list(self.complaints["mpirun"]), time.monotonic())

    # Ending

    def _end(self) -> None:
        """Stop what is left and wait until every agent has said that nothing is."""
        self.ending = True
        self._tell({"do": "stop", "grace_s": self.job.grace_s})
        deadline = time.monotonic() + self.job.grace_s + ENDED_WITHIN_S
        signals_seen = len(self.signals)
        while time.monotonic() < deadline and any(map(_occupied, self.links)):
            self._turn()
            if len(self.signals) > signals_seen:  # told again: at once
                signals_seen = len(self.signals)
                self._tell({"do": "kill"})
                deadline = min(deadline, time.monotonic() + ENDED_WITHIN_S)

    def _close(self) -> None:
        """Close every channel (an agent that has not heard us ends at that), and let no carrier stay behind."""
        for link in self.links:
            link.close()
        if self.mpirun:
            self.mpirun.listener.close()
        if self.pmi:
            self.pmi.close()
        unanswered = [link.carrier for link in self.links if not link.greeted]
        if self.mpirun and not any(link.carrier is None and link.greeted for link in self.links):
            unanswered.append(self.mpirun.process)
        closed_at = time.monotonic()
        for carrier in self.carriers:
            deadline = closed_at + (0.5 if carrier in unanswered else HUNG_UP_WITHIN_S)
            try:
                carrier.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                carrier.kill()
                carrier.wait()
            for pipe in (carrier.stdout, carrier.stderr):
                assert pipe
                pipe.close()
        self.selector.close()

    def _announce(self, verdict: Verdict) -> None:
        with contextlib.suppress(BrokenPipeError):
            unsure = sorted({link.host for link in self.links if link.greeted and not link.ended})
            if verdict.by_signal and not unsure:
                self.console.say(f"{verdict.message}; nothing of the job is left")
            elif verdict.message:
                self.console.say(verdict.message)
            if unsure and verdict.exit_code:
                self.console.say(f"the agent on {', '.join(unsure)} has not confirmed that everything there has ended; "
                                 "it ends its processes by itself when it finds the connection closed")

    # Small things

    def _tell(self, message: Dict[str, Any]) -> None:
        for link in self.links:
            link.channel.send(message)

    def _listen(self, fd: int, call: Callable[[], object]) -> None:
        self.selector.register(fd, selectors.EVENT_READ, call)

    def _listen_to_lines(self, process: "subprocess.Popen[bytes]", label: str, streams: Sequence[str]) -> None:
        for stream in streams:
            fd = getattr(process, stream).fileno()
            os.set_blocking(fd, False)
            self._listen(fd, functools.partial(self._carrier_said, fd, Lines(), label, stream))

    def _carrier_said(self, fd: int, lines: Lines, label: str, stream: str) -> None:
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return
        if not data:
            self.selector.unregister(fd)
        for text, progress in lines.feed(data) if data else lines.flush():
            if not progress:
                self._complaint(label, text, stream)

    def _read_last_words(self, carrier: "Optional[subprocess.Popen[bytes]]", label: str) -> None:
        if carrier and carrier.stderr:
            key = self.selector.get_map().get(carrier.stderr.fileno())
            if key:
                key.data()

    def _complaint(self, label: str, text: str, stream: str) -> None:
        self.complaints[label].append(text)
        self.console.line(label, text, stream)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Take the signals for the time of the job. One that was ignored (nohup, a shell's background job) stays so."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        read_fd, write_fd = os.pipe()
        for fd in (read_fd, write_fd):
            os.set_blocking(fd, False)
        taken = {number: signal.getsignal(number) for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN}
        for number in taken:
            signal.signal(number, self._signalled)
        old_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        self._listen(read_fd, lambda: os.read(read_fd, CHUNK))
        try:
            yield
        finally:
            signal.set_wakeup_fd(old_fd)
            for number, handler in taken.items():
                signal.signal(number, handler)
            os.close(read_fd)
            os.close(write_fd)

    def _signalled(self, number: int, frame: Any) -> None:
        self.signals.append(number)
        self.watch.interrupted(number)
        if len(self.signals) > 3:  # our own output may be blocked; the agents end everything when we are gone
            os._exit(128 + number)


def _occupied(link: Link) -> bool:
    """Whether there is still something of the job behind this link, and somebody to say so."""
    return link.channel.open and link.greeted and not link.ended
