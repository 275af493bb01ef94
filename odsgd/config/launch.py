"""The options of `odsgd launch`: a field each, from which follow its flag, its help, its check and its row of the docs.

A job keeps the `JobOptions` as they are given. From the others `odsgd/launch/command.py` works out its processes, its
hosts and its pods.
"""
import dataclasses
import os
import re
import sys
from functools import partial
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence

from kvstore.errors import ConfigError, shown
from kvstore.options import FLAG, PATH, Kind, as_text, name
from odsgd.config.flags import flag_of

LAUNCHERS = ("local", "ssh", "mpi", "slurm", "kubernetes")
AGENTS_CALL = ("mpi", "slurm", "kubernetes")
"""Launchers whose agents call the launcher, from hosts that know their own addresses best."""
NO_STORE = "none"
"""A value of --store: the command makes no store, and has not failed by that."""
MOST_PROCESSES = 4096
"""Workers, or servers: versions of more would not add up exactly in a float."""
LEAST_HANG_TIMEOUT_S = 3.0
"""Beats come every second, so that a shorter silence is no sign."""

#: The launcher sets these variables itself; taken over from an outer job they would point to the wrong scheduler.
SET_BY_LAUNCHER = frozenset((
    "DMLC_ROLE", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_NODE_HOST",
    "DMLC_WORKER_ID", "DMLC_SERVER_ID", "DMLC_RANK", "ODSGD_WORKER_RANK", "ODSGD_SERVER_RANK", "ODSGD_SECRET",
    "ODSGD_ATTEMPT", "ODSGD_REPORT_FD", "ODSGD_AGENT_JOBS", "ODSGD_LIVE", "ODSGD_LOST", "ODSGD_RESTARTS", "ODSGD_SAVED",
    "ODSGD_JOINED", "ODSGD_JOINED_AT", "ODSGD_MOST_WORKERS", "ODSGD_STORE", "ODSGD_VERSIONS", "ODSGD_COURIERS",
    "ODSGD_LAUNCH", "ODSGD_LAUNCHER", "ODSGD_POD_IP", "ODSGD_WIRE", "ODSGD_SECURE", "ODSGD_MODULES", "PMI_FD",
    "PMI_RANK", "PMI_SIZE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"))

LONGEST_NAME = 52
"""Kubernetes allows 63 characters; a pod's name is the job's with its number and a few letters."""
RESOURCE = re.compile(r"(?:[a-z0-9][-a-z0-9.]*/)?[A-Za-z0-9][-\w.]*", re.ASCII)
QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|[KMGTPE]i?)?", re.ASCII)


class Workers(NamedTuple):
    """The value of -n: a job begins with `most` workers, and goes on with `least` at least."""

    least: int
    most: int


def parse_env(values: Sequence[str]) -> Dict[str, str]:
    """`NAME:VALUE`, `NAME=VALUE` and plain `NAME` (its value here); lists with commas where they cannot be a value.

    >>> parse_env(["A:1,B:2", "CUDA_VISIBLE_DEVICES:0,1"])
    {'A': '1', 'B': '2', 'CUDA_VISIBLE_DEVICES': '0,1'}
    """
    env = {}
    for value in values:
        parts = value.split(",")
        several = all(re.fullmatch(r"[A-Za-z_]\w*(:[^:]*)?", part) for part in parts)
        for part in parts if several else [value]:
            match = re.fullmatch(r"([A-Za-z_]\w*)(?:([:=])(.*))?", part, re.DOTALL)
            if not match:
                raise ConfigError(f"`{shown(value)}`: expected NAME or NAME:VALUE")
            key = match[1]
            if key in SET_BY_LAUNCHER:
                raise ConfigError(f"`{shown(value)}`: {key} is set by the launcher, per process; it cannot be given")
            if not match[2] and key not in os.environ:
                raise ConfigError(f"{key} is not set here; set it, or give its value as {key}:VALUE")
            env[key] = match[3] if match[2] else os.environ[key]
    return env


def _workers(text: str) -> Workers:
    if text == "p":
        raise ConfigError("`-np` is a flag of mpirun and horovodrun; here it is -n, the number of workers")
    least, colon, most = text.partition(":")
    return Workers(int(least), int(most if colon else least))


def _kind(metavar: str, expected: str, convert: Callable[[Any], Any], fits: Callable[[Any], bool]) -> Kind:
    """A kind of option whose values `fits` accepts."""
    def checked(value: Any) -> Any:
        converted = convert(value)
        if not fits(converted):
            raise ValueError
        return converted
    return Kind(metavar, expected, checked)


def parse_resources(text: str) -> Dict[str, str]:
    """`cpu=4,memory=8Gi,nvidia.com/gpu=1`.

    >>> parse_resources("cpu=500m,nvidia.com/gpu=1")
    {'cpu': '500m', 'nvidia.com/gpu': '1'}
    """
    found = {}
    for part in filter(None, text.split(",")):
        key, _, quantity = part.partition("=")
        if not RESOURCE.fullmatch(key) or not QUANTITY.fullmatch(quantity) or key in found:
            raise ConfigError(f"cannot read `{shown(part)}`; expected NAME=QUANTITY once each, as in "
                              "cpu=4,memory=8Gi,nvidia.com/gpu=1")
        found[key] = quantity
    return found


FILE = Kind("FILE", PATH.expected, PATH.convert)
WORKERS = _kind("N|MIN:MAX", f"a whole number from 1 to {MOST_PROCESSES}, or MIN:MAX", _workers,
                lambda workers: 1 <= workers.least <= workers.most <= MOST_PROCESSES)
SERVERS = _kind("N|auto", f"a whole number up to {MOST_PROCESSES}, or `auto`", as_text,
                lambda text: text == "auto" or int(text) in range(MOST_PROCESSES + 1))
PORT = _kind("PORT", "a whole number from 0 to 65535", int, lambda port: 0 <= port <= 65535)
COUNT = _kind("N", "a whole number up to 1000000", int, lambda count: 0 <= count <= 10 ** 6)
SECONDS = _kind("SECONDS", "a number of seconds, 0 or more", float, lambda seconds: 0 <= seconds < float("inf"))
HANG_TIMEOUT = _kind("SECONDS", f"0 or a number of seconds, at least {LEAST_HANG_TIMEOUT_S:g}", float,
                     lambda seconds: seconds == 0 or LEAST_HANG_TIMEOUT_S <= seconds < float("inf"))
LAUNCHER = Kind("NAME", "the name of a launcher", name("launcher", LAUNCHERS).convert)
WIRE = Kind("ps-lite|sockets", "ps-lite or sockets", name("value", ("ps-lite", "sockets")).convert)
ON_WORKER_LOSS = Kind("fail|continue", "fail or continue", name("value", ("fail", "continue")).convert)
LABEL = _kind("NAME", f"small letters, digits and `-`, a letter first, at most {LONGEST_NAME} of them", as_text,
              lambda text: len(text) <= LONGEST_NAME and bool(re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", text)))
RESOURCES = Kind("NAME=QUANTITY,...", "names of resources with quantities", parse_resources)
ENV = Kind("NAME[:VALUE]", "NAME or NAME:VALUE", parse_env)


def _option(default: Any, kind: Kind, help: str, *spellings: str, otherwise: str = "", launcher: str = "",
            group: str = "") -> Any:
    """A field and its flag.

    `spellings`: of the flag, where its name alone does not give it; `otherwise`: the default in words; `launcher`: the
    only one that the option works with.
    """
    metadata = {"kind": kind, "help": help, "spellings": spellings, "otherwise": otherwise, "launcher": launcher,
                "group": f"With --launcher {launcher}" if launcher == "kubernetes" else group,
                "repeated": isinstance(default, dict)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


_failure = partial(_option, group="When something fails")


@dataclasses.dataclass(frozen=True)
class HostOptions:
    """How many processes, and where."""

    num_workers: Workers = _option(Workers(0, 0), WORKERS, "number of workers; MIN:MAX: start with MAX; a restart may "
                                   "leave out missing workers, down to MIN", "-n", "--num-workers")
    num_servers: Optional[str] = _option(
        None, SERVERS, "number of servers; auto: one beside each worker; 0: neither servers nor a scheduler", "-s",
        "--num-servers", otherwise="as many as workers; 0 if the store has no servers")
    hostfile: Optional[str] = _option(None, FILE, "file with one host per line: [user@]host [slots=4] [port=22]", "-H",
                                      "--hostfile")
    launcher: str = _option("", LAUNCHER, "local, ssh, mpi, slurm or kubernetes", "--launcher",
                            otherwise="ssh with a hostfile, else local")


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """The options that a job keeps as they are given."""

    sync_dst_dir: Optional[str] = _option(None, Kind("DIR", "a path", as_text), "ssh: copy the working directory to "
                                          "this folder of every host, and run there", launcher="ssh")
    port: int = _option(0, PORT, "TCP port of the scheduler", "-p", "--port", otherwise="a free one; local: none")
    secure: bool = _option(False, FLAG, "encrypt every connection between hosts, and let only processes of this job "
                           "connect; --port is then the tunnels' port")
    wire: str = _option("", WIRE, "how workers and servers communicate: by ps-lite, or by odsgd's own sockets, without "
                        "MXNet", otherwise="ps-lite where MXNet is installed")
    host_ip: Optional[str] = _option(None, _kind("ADDRESS", "an address", as_text, bool), "address of this machine for "
                                     "the hosts", otherwise="found automatically")
    env: Mapping[str, str] = _option({}, ENV, "set an environment variable for all processes; NAME alone: its value "
                                     "here")
    env_server: Mapping[str, str] = _option({}, ENV, "set (or pass on) a variable for servers only")
    env_worker: Mapping[str, str] = _option({}, ENV, "set (or pass on) a variable for workers only")
    remote_python: str = _option(sys.executable, PATH, "path of Python on the hosts", otherwise="the same path as here")
    startup_timeout_s: float = _failure(300.0, SECONDS, "longest time for the start of the job; 0: no limit",
                                        "--startup-timeout")
    hang_timeout_s: float = _failure(60.0, HANG_TIMEOUT, "a process fails if it is silent, or makes no progress in "
                                     "training, for this long; 0: no limit", "--hang-timeout")
    max_restarts: int = _failure(0, COUNT, "how often to restart after failures, from the newest checkpoint",
                                 otherwise="0")
    rejoin_timeout_s: float = _failure(60.0, SECONDS, "how long a restart waits for a missing host or worker; with "
                                       "MIN:MAX the job then leaves it out", "--rejoin-timeout")
    grow: bool = _failure(False, FLAG, "with MIN:MAX, when a missing host is back, restart with it at the next "
                          "checkpoint; without --grow: at the next failure")
    grace_s: float = _failure(5.0, SECONDS, "time from SIGTERM to SIGKILL when a process is ended", "--grace")
    store: Optional[str] = _option(None, Kind("NAME[:OPTION=VALUE...]", "a store, perhaps with options", as_text),
                                   "for an unchanged script: the store that it gets instead of MXNet's, e.g. "
                                   "odsgd:warmup=200; none: the command needs no store, so a worker that makes none "
                                   "has not failed")
    on_worker_loss: str = _failure("fail", ON_WORKER_LOSS, "when a worker dies: end the job, or continue an "
                                   "asynchronous one")
    spare: int = _failure(0, COUNT, "how many of the -n workers to start later, by `odsgd join`", otherwise="0")


@dataclasses.dataclass(frozen=True)
class LaunchOptions(JobOptions, HostOptions):
    """One launch, checked: options that do not go together are refused with ConfigError."""

    image: Optional[str] = _option(None, Kind("IMAGE", "text", as_text), "container image of the pods, with odsgd in "
                                   "it", launcher="kubernetes")
    name: Optional[str] = _option(None, LABEL, "name of the job", launcher="kubernetes",
                                  otherwise="odsgd- and six hexadecimal digits")
    namespace: Optional[str] = _option(None, LABEL, "Kubernetes namespace", launcher="kubernetes",
                                       otherwise="kubectl's own")
    resources: Optional[Dict[str, str]] = _option(None, RESOURCES, "resources of each pod, e.g. "
                                       "cpu=4,memory=8Gi,nvidia.com/gpu=1", launcher="kubernetes")
    pod: Optional[str] = _option(None, FILE, "YAML file with the rest of a pod's spec: volumes, nodeSelector, ...",
                                 launcher="kubernetes")
    dry_run: bool = _option(False, FLAG, "print the manifests, and start nothing", launcher="kubernetes")

    def __post_init__(self) -> None:
        if not self.num_workers.most:
            raise ConfigError("required: -n, the number of workers (see odsgd launch --help)")
        if not self.launcher:
            object.__setattr__(self, "launcher", "ssh" if self.hostfile else "local")
        self._check_range(*self.num_workers)
        self._check_launcher()
        if self.spare and self.spare >= self.num_workers.most:
            raise ConfigError(f"--spare {self.spare} of -n {self.num_workers.most} workers leaves none to begin with")

    def _check_range(self, least: int, most: int) -> None:
        if self.grow and least == most:
            raise ConfigError("--grow brings back workers that a restart has left out; it needs -n MIN:MAX")
        if self.rejoin_timeout_s != LaunchOptions.rejoin_timeout_s and not self.max_restarts:
            raise ConfigError("--rejoin-timeout is how long a restart waits; it needs --max-restarts")
        if least == most:
            return
        if not self.max_restarts:
            raise ConfigError(f"-n {least}:{most} needs --max-restarts: workers are left out when a job starts again")
        if self.launcher in AGENTS_CALL:
            raise ConfigError(f"-n {least}:{most} is for --launcher local and ssh; with {self.launcher} all workers "
                              "are started, or none")
        if self.on_worker_loss == "continue":
            raise ConfigError(f"-n {least}:{most} and --on-worker-loss continue are two ways to go on without a "
                              "worker; leave one of them out")

    def _check_launcher(self) -> None:
        """Refuse what the launcher has no use for, and a launcher that lacks something."""
        if self.launcher == "ssh" and not self.hostfile:
            raise ConfigError("--launcher ssh needs a hostfile: -H FILE, with one host per line")
        if self.launcher == "local" and self.hostfile:
            raise ConfigError("--launcher local starts everything here; leave out -H, or use --launcher ssh or mpi")
        if self.launcher in ("slurm", "kubernetes") and self.hostfile:
            raise ConfigError(f"--launcher {self.launcher} has hosts of its own; leave out -H, or use --launcher ssh "
                              "or mpi")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not value or value == field.default:
                continue
            if field.metadata["launcher"] not in ("", self.launcher):
                raise ConfigError(f"{flag_of(field)} works with --launcher {field.metadata['launcher']} only")
            if self.launcher == "kubernetes" and field.name in ("host_ip", "remote_python"):
                raise ConfigError(f"{flag_of(field)} does not work with --launcher kubernetes; a pod has its own")

    def kept(self) -> Dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(JobOptions)}


def words(options: JobOptions) -> List[str]:
    """The words of a command line that give these options; an option at its default has none."""
    said: List[str] = []
    for field in dataclasses.fields(JobOptions):
        flag, value = flag_of(field), getattr(options, field.name)
        if isinstance(value, Mapping):
            said += [word for key, text in value.items() for word in (flag, f"{key}={text}")]
        elif value != field.default:
            said += [flag] if value is True else [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return said
