"""Starting the launcher as a process of its own, with stand-ins for servers, ssh and mpirun, and watching it."""
import dataclasses
import importlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import IO, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from odsgd.lab.cluster import Cluster
from odsgd.launch.linux import descendants
from tests.integration import debian
from tests.jobs import until

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
MEMBER = os.path.join(HERE, "launch_member.py")
MARK = "LAUNCH_TEST_MARK"
PATIENCE_S = 200.0
"""How long anything may take before it counts as hanging; less than a test's own limit, so that it can say so."""

Word = Union[str, int, float, Path]
Way = Tuple[List[Word], Dict[str, str]]
"""Options and environment of a job that is started in some way."""


class Launch:
    """`odsgd launch` with these arguments. Every process of it carries a mark, by which it is found in /proc.

    `within`: a command that runs it, e.g. in another network namespace. `cluster`: an emulated one, on whose head it
    runs.
    """

    def __init__(self, *arguments: Word, env: Optional[Mapping[str, str]] = None, cwd: Union[str, Path, None] = None,
                 unread: bool = False, within: Sequence[str] = (), cluster: Optional[Cluster] = None) -> None:
        self.mark = uuid.uuid4().hex
        environ = {**os.environ, "PYTHONPATH": ROOT, MARK: self.mark, "PYTHONUNBUFFERED": "1", **(env or {})}
        self.output: List[str] = []
        self.errors: List[str] = []
        self._news = threading.Condition()
        command = [*within, sys.executable, __file__, *map(str, arguments)]
        popen = cluster.popen if cluster else subprocess.Popen
        self.process: subprocess.Popen[str] = popen(
            command, env=environ, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            universal_newlines=True)
        assert self.process.stdout and self.process.stderr
        pairs = [(self.process.stderr, self.errors)]
        if not unread:
            pairs.append((self.process.stdout, self.output))
        self._readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in pairs]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: IO[str], lines: List[str]) -> None:
        for line in stream:
            with self._news:
                lines.append(line.rstrip("\n"))
                self._news.notify_all()
        stream.close()

    def wait_for(self, *lines: str) -> None:
        """Until each of these lines has been printed."""
        with self._news:
            seen = self._news.wait_for(lambda: set(lines) <= set(self.output + self.errors), PATIENCE_S)
        assert seen, f"never saw {set(lines) - set(self.output + self.errors)}; {self.standing}:\n{self}"

    def wait_for_text(self, text: str) -> None:
        """Until a line of stderr contains `text`."""
        with self._news:
            seen = self._news.wait_for(lambda: any(text in line for line in self.errors), PATIENCE_S)
        assert seen, f"never saw {text!r}; {self.standing}:\n{self}"

    def wait_for_all_joined(self, workers: int = 2, servers: int = 1) -> None:
        """Until every process has printed that it has joined."""
        names = [f"worker {rank}" for rank in range(workers)] + [f"server {rank}" for rank in range(servers)]
        self.wait_for("scheduler | joined", *(name + " | joined" for name in names))

    def wait(self) -> int:
        """The exit code; by then nothing of the job is left."""
        code = self.process.wait(PATIENCE_S)
        for reader in self._readers:
            reader.join(PATIENCE_S)
        left = marked(self.mark)
        assert not left, f"still running: {left}; output:\n{self}"
        return code

    def pid(self, name: str) -> int:
        """The pid of `worker 1`, `server 0`, `scheduler`."""
        return pid_of(self.mark, name)

    def kill(self, name: str, number: int) -> None:
        """Send a signal to one process of the job."""
        os.kill(self.pid(name), number)

    @property
    def standing(self) -> str:
        """Whether it still runs, for a message before its output."""
        code = self.process.poll()
        return "output so far" if code is None else f"it has ended with exit code {code}, output"

    @property
    def said(self) -> str:
        """The launcher's own messages, its name taken off, from the first that is no warning on."""
        start = next((index for index, line in enumerate(self.errors) if line.startswith("odsgd launch: ")
                      and not line.startswith("odsgd launch: warning: ")), None)
        return "" if start is None else "\n".join(self.errors[start:]).replace("odsgd launch: ", "")

    def __repr__(self) -> str:
        return "\n".join([*self.output, "--", *self.errors])  # what pytest shows beside a failed `wait`

    def __enter__(self) -> "Launch":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for reader in self._readers:
            reader.join(PATIENCE_S)


def pid_of(mark: str, name: str) -> int:
    """The pid of `worker 1`, `server 0`, `scheduler` of the job that carries the mark."""
    role, _, rank = name.partition(" ")
    pids = [pid for pid, env in marked(mark).items() if env.get("DMLC_ROLE") == role
            and (not rank or env.get(f"ODSGD_{role.upper()}_RANK") == rank)]
    children = {child for pid in pids for child in descendants(pid)}  # they have its environment
    return next(pid for pid in pids if pid not in children)


def marked(mark: str) -> Dict[int, Dict[str, str]]:
    """Pid and environment of every living process that carries the mark."""
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/environ", "rb") as environ, open(f"/proc/{entry}/stat", "rb") as stat:
                pairs = environ.read().decode(errors="replace").split("\0")
                state = stat.read().rpartition(b")")[2].split()[0]
        except OSError:
            continue
        env = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        if env.get(MARK) == mark and state != b"Z":
            found[int(entry)] = env
    return found


def command_line(pid: Union[int, str]) -> str:
    """The words of a process that every user of this machine can read; empty if it has gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as cmdline:
            return cmdline.read().decode(errors="replace")
    except OSError:
        return ""


def startup_table(asked: int, *arguments: Word, env: Mapping[str, str]) -> str:
    """The launcher's message about a job that does not come up, when `asked` processes have asked to join.

    How soon they do is the machine's affair: where the deadline came first, the job is started again with a longer one.
    """
    for timeout_s in (5, 20, 80):
        with Launch("--startup-timeout", timeout_s, *arguments, env=env) as launch:
            assert launch.wait() == 75
        if launch.said.count("asked to join, waits for the others") == asked:
            break
    return launch.said


def leaves_nothing_when_killed(*options: Word, env: Optional[Mapping[str, str]] = None,
                               cluster: Optional[Cluster] = None, within: Sequence[str] = ()) -> None:
    """A job whose workers have children and whose launcher is killed with -9 ends on every host."""
    with Launch("-n", 2, "-s", 1, *options, MEMBER, "children", env=env, cluster=cluster, within=within) as launch:
        launch.wait_for("worker 0 | has children", "worker 1 | has children")
        if within:
            below = descendants(launch.process.pid)
            os.kill(min(pid for pid in below if __file__ in command_line(pid)), signal.SIGKILL)
        else:
            launch.process.kill()
        until(lambda: not marked(launch.mark), PATIENCE_S)


def words(*command: Word) -> str:
    """A command as one string for variables that are split like a shell's words, such as LAUNCH_TEST_SERVER."""
    return " ".join(shlex.quote(str(word)) for word in command)


def python_program(path: Path, text: str) -> str:
    """An executable that runs `text` with this Python, whose path a `#!` line could not name if it had a space."""
    source = path.with_name(path.name + ".py")
    source.write_text(text)
    return executable(path, f'#!/bin/sh\nexec {words(sys.executable, source)} "$@"\n')


def executable(path: Path, text: str) -> str:
    """A script of any language."""
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def stand_in_ssh(folder: Path, note: str = "") -> str:
    """A program called like ssh that runs the command here, with nothing of our environment but the mark."""
    return executable(folder / "ssh", f"""#!/bin/sh
while [ "$1" = -o ] || [ "$1" = -p ]; do shift 2; done
host=$1; shift
{note}
cd /
exec env -i PATH="$PATH" HOME="$HOME" {MARK}="${MARK}" sh -c "$*"
""")


OPEN_MPI = """# Like Open MPI: ranks in OMPI_*, and only the variables named by -x reach them.
import os, subprocess, sys
words = sys.argv[1:]
if words == ["--version"]:
    sys.exit(print("mpirun (Open MPI) 4.1.4"))
keep = {{name: os.environ[name] for name in ("PATH", "HOME", "LAUNCH_TEST_MARK")}}
while words[0].startswith("-"):
    option = words.pop(0)
    value = None if option == "--oversubscribe" else words.pop(0)
    if option == "-n":
        count = int(value)
    elif option == "-x":
        keep[value] = os.environ[value]
{note}
ranks = [subprocess.Popen(words, env=dict(keep, OMPI_COMM_WORLD_RANK=str(rank), OMPI_COMM_WORLD_LOCAL_RANK=str(rank),
                                    OMPI_COMM_WORLD_LOCAL_SIZE=str(count)))
         for rank in range(count)]
sys.exit(max(rank.wait() for rank in ranks))
"""


def stand_in_mpirun(folder: Path, note: str = "") -> str:
    """A program called like mpirun, in the manner of Open MPI."""
    return python_program(folder / "mpirun", OPEN_MPI.format(note=note))


def real_mpirun() -> Optional[str]:
    """The one of the wheel beside this Python, or of this machine."""
    return shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or shutil.which("mpiexec")


DEBIANS = {"Open MPI": ("mpirun.openmpi", "openmpi-bin"), "MPICH": ("mpirun.mpich", "mpich")}


def debians_mpirun(name: str) -> str:
    """The one of the distribution, with all that starts processes elsewhere; the wheel's is MPICH, too, but newer."""
    program, package = DEBIANS[name]
    return debian.provide({program: package})[program]


def by_mpirun(program: str) -> Way:
    """A job on this machine through this mpirun."""
    return ["--launcher", "mpi", "--host-ip", "127.0.0.1"], {"ODSGD_MPIRUN": program, "HYDRA_LAUNCHER": "fork",
                                                             "OMPI_ALLOW_RUN_AS_ROOT": "1",
                                                             "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def by_ssh(folder: Path, hostfile: str) -> Way:
    """A job through the stand-in ssh on the hosts of this hostfile."""
    (folder / "hosts").write_text(hostfile)
    return ["-H", folder / "hosts"], {"ODSGD_SSH": stand_in_ssh(folder)}


def _raises(*_: object, **__: object) -> None:
    raise LookupError("on purpose")


def main() -> int:
    """The command line with a stand-in for the servers' command, and as much patience as a test wants."""
    from odsgd import cli
    from odsgd.launch import supervisor
    from odsgd.launch.policy import judge
    for number in (signal.SIGINT, signal.SIGHUP):  # the shell of the tests may ignore them, as `nohup` and `&` do
        signal.signal(number, signal.SIG_DFL)
    run = supervisor.run
    server = tuple(shlex.split(os.environ.get("LAUNCH_TEST_SERVER", "")) or [sys.executable, MEMBER])
    supervisor.run = lambda job: run(dataclasses.replace(job, server_command=server))
    for name in os.environ.get("LAUNCH_TEST_RAISES", "").split():
        module, owner, method = name.split(":")
        setattr(getattr(importlib.import_module(module), owner), method, _raises)
    judge.FAREWELL_S = float(os.environ.get("LAUNCH_TEST_FAREWELL_S", PATIENCE_S))
    return cli.main(["launch", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
