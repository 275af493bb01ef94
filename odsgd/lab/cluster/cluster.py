"""Bringing an emulated cluster up, running commands on it, taking it down."""
from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from kvstore.errors import ConfigError, KVStoreError, unknown
from odsgd.lab import processes
from odsgd.lab.cluster import boot, links
from odsgd.launch import linux

FOLDER = Path("/run/odsgd/cluster")
PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux",
            "setpriv": "util-linux", "mount": "mount", "sleep": "coreutils"}
UP_WITHIN_S, DOWN_WITHIN_S, LOCKED_WITHIN_S = 30.0, 20.0, 60.0
CLONE_NEWPID = 0x20000000
_numbers = itertools.count()


class Goodput(NamedTuple):
    """Bytes of TCP per second that the links between two hosts carry, with traffic both ways."""

    there: float
    back: float


class Cluster:
    """Hosts `host0`, `host1`, … and the launching machine, `head`, in namespaces of their own.

    A context manager: `with Cluster.up(hosts=4, rate="1gbit") as cluster: cluster.run(["odsgd", "launch", …])`. The
    hosts share this machine's files, cores and clock. They reach each other and the head, and nothing else.
    """

    def __init__(self, name: str) -> None:
        self.name, self.folder = name, FOLDER / name
        self._line: Optional[int] = None
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._commands: List[subprocess.Popen[Any]] = []

    @classmethod
    def up(cls, hosts: int, rate: Optional[str] = None, rates: Optional[Mapping[int, str]] = None,
           name: Optional[str] = None, own_tmp: bool = False) -> Cluster:
        """Bring a cluster up; it lasts until `down()`, or the end of this process, however it ends (but see `stay`).

        `rate` of every host's link each way (`1gbit`), by default as fast as the machine can; `rates` of single hosts,
        by their number. The head's link is not shaped. `own_tmp`: no host sees what another has in /tmp, as on real
        machines; sockets in there are then not a way round the links.
        """
        speeds = links.link_rates(hosts, rate, rates or {})
        name = _checked(name or f"run-{os.getpid()}-{next(_numbers)}")
        check_machine()
        with _alone():
            for left in (other for other, is_up in clusters().items() if not is_up):
                shutil.rmtree(FOLDER / left, ignore_errors=True)
            cluster = cls(name)
            if cluster.folder.exists():
                raise ConfigError(f"cluster `{name}` is up already; take it down with `odsgd cluster down --name "
                                  f"{name}`, or choose another --name")
            try:
                cluster._boot(speeds, own_tmp)
            except BaseException:
                cluster._end()
                raise
        return cluster

    @classmethod
    def find(cls, name: str) -> Cluster:
        """A cluster that is up."""
        check_machine()
        cluster = cls(_checked(name))
        if not cluster._init_pid():
            known = [other for other, is_up in clusters().items() if is_up]
            raise unknown("cluster", name, known) if known else ConfigError(
                f"cluster `{name}` is not up, nor is any other; bring it up with `odsgd cluster up --name {name}`")
        return cluster

    def stay(self) -> None:
        """Let the cluster outlive this process, until it is taken down."""
        assert self._line is not None and self._process is not None
        os.write(self._line, b"stay\n")
        self._hang_up()
        self._process.returncode = 0  # no child to wait for any more

    def down(self) -> None:
        """End every process on it; the kernel takes the namespaces and links away."""
        with _alone():
            self._end()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.down()

    # Running commands

    @property
    def hostfile(self) -> str:
        """The path of the hosts file, one name per line."""
        return str(self.folder / "hosts")

    @property
    def hosts(self) -> List[str]:
        return Path(self.hostfile).read_text(encoding="ascii").split()

    @property
    def variables(self) -> Dict[str, str]:
        """The environment of commands on the head: the way to the hosts, for our launcher and for MPI."""
        ssh = str(self.folder / "ssh")
        return {"ODSGD_SSH": ssh, "ODSGD_HOSTFILE": self.hostfile, "HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": ssh,
                "OMPI_MCA_plm_rsh_agent": ssh, "PRTE_MCA_plm_ssh_agent": ssh, "OMPI_ALLOW_RUN_AS_ROOT": "1",
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "UCX_TLS": "tcp,self"}

    def popen(self, command: Sequence[str], env: Optional[Mapping[str, str]] = None, host: Optional[int] = None,
              **options: Any) -> subprocess.Popen[Any]:
        """Start a command on the head, or on one host as ssh would; `@hosts` in it becomes the hosts file's path.

        `env` comes on top of this process's environment; on a host, on top of a login's. `options` go to
        `subprocess.Popen`.
        """
        words = [re.sub(r"(^|=)@hosts$", lambda match: match[1] + self.hostfile, word) for word in command]
        directory = str(options.pop("cwd", None) or os.getcwd())
        if host is not None:
            words = [self.variables["ODSGD_SSH"], self.hosts[host], boot.on_host(directory, env or {}, words)]
        init = self._init_pid()
        if not init:
            raise ConfigError(f"cluster `{self.name}` is not up any more")
        with _children_in(init):
            process = subprocess.Popen(boot.entering(init, directory, words),
                                       env={**os.environ, **self.variables, **(env or {})}, **options)
        self._commands = [earlier for earlier in self._commands if earlier.poll() is None] + [process]
        return process

    def run(self, command: Sequence[str], env: Optional[Mapping[str, str]] = None, timeout: Optional[float] = None,
            host: Optional[int] = None) -> subprocess.CompletedProcess[str]:
        """Run a command to its end and take its output (stdout and stderr apart, as text).

        After `timeout` seconds it gets a SIGTERM, later a SIGKILL, and `subprocess.TimeoutExpired` carries its output.
        """
        return processes.completed(self.popen(command, env, host, **processes.READ_TO_THE_END), timeout)

    def goodput(self, seconds: float = 1.0, between: Tuple[int, int] = (0, 1)) -> Goodput:
        """Measure the links between two hosts, with TCP traffic both ways at once; takes a second longer."""
        program = [sys.executable, "-I", str(Path(__file__).with_name("goodput.py")), str(seconds)]
        first, second = between
        address = boot.addresses(len(self.hosts))[self.hosts[first]]
        timeout_s = seconds + UP_WITHIN_S
        with contextlib.ExitStack() as stack:
            def start(host: int, *words: str) -> subprocess.Popen[Any]:
                process = stack.enter_context(
                    self.popen([*program, *words], host=host, cwd="/", **processes.READ_BY_LINE))
                stack.callback(process.kill)
                return process
            back = start(first)
            there = start(second, address, _answer(back, timeout_s))
            return Goodput(*(float(_answer(process, timeout_s)) for process in (there, back)))

    # Coming up and going down

    def _boot(self, rates: Sequence[Optional[int]], own_tmp: bool) -> None:
        self.folder.mkdir(parents=True, mode=0o700)
        for file, text in boot.files(rates, own_tmp).items():
            (self.folder / file).write_text(text, encoding="ascii")
        their_line, self._line = os.pipe()
        try:
            self._process = subprocess.Popen(
                ["unshare", "--pid", "--fork", "--mount", "--uts", "--ipc", "--net", "sh", f"{self.folder}/head.sh",
                 str(self.folder)], stdin=their_line, stderr=subprocess.STDOUT, start_new_session=True, cwd="/",
                **processes.READ_BY_LINE)
        finally:
            os.close(their_line)
        assert self._process.stdout
        with self._process.stdout as said:
            answers = _answers(said, ["init", *["host"] * len(rates)])
            pid = next(answers)
            (self.folder / "init").write_text(f"{pid} {linux.start_time(int(pid))}", encoding="ascii")
            pids = dict(answer.split() for answer in answers)
        network = os.readlink(f"/proc/{pid}/ns/net")
        ssh = self.folder / "ssh"
        ssh.write_text(boot.ssh_script(self.name, network, {host: int(pids[host]) for host in sorted(pids)}))
        ssh.chmod(0o755)

    def _init_pid(self) -> Optional[int]:
        """The pid of the cluster's first process, if it lives; the start time tells it from a later one of that pid."""
        try:
            pid, started = (self.folder / "init").read_text(encoding="ascii").split()
        except (OSError, ValueError):
            return None
        return int(pid) if linux.start_time(int(pid)) == started else None

    def _end(self) -> None:
        self._hang_up()
        init = self._init_pid()
        with contextlib.suppress(ProcessLookupError):  # once hung up it may end by itself
            if init:
                os.kill(init, signal.SIGKILL)
        deadline = time.monotonic() + DOWN_WITHIN_S
        while self._init_pid():
            for command in self._commands:
                command.poll()  # the namespace does not end before its last zombie, and these are ours to bury
            if time.monotonic() > deadline:
                raise ConfigError(f"cluster `{self.name}`: process {init} has not ended {DOWN_WITHIN_S:g} s after "
                                  "SIGKILL; is an `odsgd cluster run` of it stopped (Ctrl-Z)?")
            time.sleep(0.005)
        if self._process:
            self._process.wait(DOWN_WITHIN_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _hang_up(self) -> None:
        if self._line is not None:
            os.close(self._line)
            self._line = None


def clusters() -> Dict[str, bool]:
    """The clusters of this machine by name, and whether each is up; of one that is not a crash has left the folder."""
    folders = sorted(entry.name for entry in FOLDER.iterdir() if entry.is_dir()) if FOLDER.is_dir() else []
    return {name: Cluster(name)._init_pid() is not None for name in folders}


def _answers(said: IO[bytes], words: Sequence[str]) -> Iterator[str]:
    """While the cluster comes up: what the head's script prints after each of these words, one after the other."""
    deadline, complaint = time.monotonic() + UP_WITHIN_S, ""
    for word in words:
        first = rest = ""
        while first != word:
            complaint = f"{first} {rest}".strip() or complaint
            line = processes.next_line(said, deadline)
            if line is None:
                raise ConfigError(f"the cluster did not come up within {UP_WITHIN_S:g} s: {complaint}")
            if not line:
                raise ConfigError(f"cannot make namespaces: {complaint or 'no reason given'} (in a container it has to "
                                  "be a privileged one)")
            first, _, rest = line.rstrip("\n").partition(" ")
            if first == "failed":
                raise ConfigError(f"cannot {rest}" + (f": {complaint}" if complaint else ""))
        yield rest


# The machine

def check_machine() -> None:
    """ConfigError where this machine has no such cluster, or this user may not make one."""
    if not sys.platform.startswith("linux"):
        raise ConfigError("an emulated cluster needs Linux")
    if os.geteuid() != 0:
        raise ConfigError("an emulated cluster needs root, for its network namespaces; run it with sudo")
    for program, package in PROGRAMS.items():
        if not shutil.which(program):
            raise ConfigError(f"an emulated cluster needs the program `{program}`; install {package}")


def _checked(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name) or name == "lock":
        raise ConfigError(f"--name {name}: expected letters, digits, `-`, `_` and `.`")
    return name


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One at a time: in here, a cluster's folder without a living init is one that a crash has left."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as lock:
        deadline = time.monotonic() + LOCKED_WITHIN_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(f"another `odsgd cluster` has held {FOLDER}/lock for {LOCKED_WITHIN_S:g} s; "
                                      "is it stopped?") from None
                time.sleep(0.02)
        yield


@contextlib.contextmanager
def _children_in(init: int) -> Iterator[None]:
    """Children that this thread starts in here are born in the PID namespace of `init`, and end with it.

    Meanwhile it cannot start a thread. So where MXNet is loaded, `preexec_fn` may not be given: it makes `Popen` fork,
    after a fork MXNet starts the threads of its engine again, and the process aborts.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(namespace: IO[str]) -> None:
        if libc.setns(namespace.fileno(), CLONE_NEWPID):
            raise OSError(ctypes.get_errno(), "setns: " + os.strerror(ctypes.get_errno()))

    with open(f"/proc/{init}/ns/pid") as theirs, open("/proc/self/ns/pid") as ours:
        enter(theirs)
        try:
            yield
        finally:
            enter(ours)


def _answer(process: subprocess.Popen[Any], timeout_s: float) -> str:
    """The next line of a measurement of goodput."""
    line = processes.next_line(process.stdout, time.monotonic() + timeout_s)
    if not line:
        raise KVStoreError(f"the measurement of a link's goodput did not answer within {timeout_s:g} s")
    return line.strip()
