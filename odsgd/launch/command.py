"""The command line of MXNet's ``tools/launch.py``, so that old job scripts work, and a little more.

    odsgd launch -n 2 -s 1 train.py --lr 0.1
    odsgd launch -n 8 -s auto -H hosts --env MXNET_CPU_WORKER_NTHREADS:2 python train.py

Three things differ from the original. Without -H jobs are local. All words behind the first of the command belong to
the command, so that options of the launcher stand before it. Every mistake is told before a process starts.
"""
import argparse
import contextlib
import dataclasses
import os
import shutil
import sys
from typing import Callable, Dict, List, Optional, Sequence, Tuple, TypeVar, Union

from kvstore.errors import EXIT_FAILURE, ConfigError, shown, unknown
from kvstore.fronts import standin
from kvstore.fronts.standin import StandIn
from odsgd.config.command import check_command
from odsgd.config.flags import Parser, unknown_flag
from odsgd.config.train import TrainConfig
from odsgd.launch import plan, supervisor
from odsgd.launch.hostfile import read_hostfile
from odsgd.launch.hosts import kubernetes, slurm
from odsgd.launch.hosts.ssh import ReachError
from odsgd.launch.policy.liveness import LEAST_HANG_TIMEOUT_S

T = TypeVar("T")

MOST_PROCESSES = 4096
"""Workers, or servers: versions of more would not add up exactly in a float."""


def main(argv: List[str]) -> int:
    """Launch a job; return the exit code: 0 or the first failed process's. ConfigError for a mistake in `argv`."""
    try:
        options = _options(argv)
        job = _job(options)
        if job.launcher == "kubernetes":
            return kubernetes.submit(job, kubernetes.container(options.image, options.name, options.namespace,
                                                               options.resources, options.pod), options.dry_run)
        return supervisor.run(job)
    except ReachError as error:
        print(f"odsgd launch: {error}", file=sys.stderr)
        return EXIT_FAILURE


def parse(argv: Sequence[str]) -> plan.Job:
    """The job that a command line asks for, or a `ConfigError`."""
    return _job(_options(argv))


def _options(argv: Sequence[str]) -> argparse.Namespace:
    options, strangers = _parser().parse_known_args(list(argv))
    if strangers:
        raise unknown_flag(strangers[0].split("=")[0], "odsgd launch", flags())
    if options.num_workers is None:
        raise ConfigError("required: -n, the number of workers (see odsgd launch --help)")
    return options


def _job(options: argparse.Namespace) -> plan.Job:
    launcher = options.launcher or ("ssh" if options.hostfile else "local")
    _check(options, launcher)
    slots = read_hostfile(options.hostfile) if options.hostfile else []
    if launcher == "slurm":
        slots = slurm.allocated(os.environ)
    if launcher == "mpi" and any(host.user or host.port for host in slots):
        raise ConfigError(f"{options.hostfile}: mpirun takes neither user@host nor port=; "
                          "write them into ~/.ssh/config")
    command = _command(options.command, launcher)
    training = _training(command, launcher, options.store)
    if options.on_worker_loss == "continue" and training and not training.asynchronous:
        raise ConfigError("--on-worker-loss continue is for asynchronous stores, and the workers' command trains with "
                          f"kvstore `{training.kvstore}`; leave it out, or choose another store")
    least, most = options.num_workers
    num_servers = options.num_servers or ("0" if options.store == plan.NO_STORE else None)
    elastic = least < most
    job = plan.Job(
        command=command, num_workers=most, num_servers=_num_servers(num_servers, most, training),
        servers_beside_workers=options.num_servers == "auto", launcher=launcher, slots=tuple(slots),
        port=options.port, host_ip=options.host_ip, sync_dst_dir=options.sync_dst_dir,
        remote_python=options.remote_python or sys.executable,
        env=plan.parse_env(options.env, "--env", os.environ),
        env_server=plan.parse_env(options.env_server, "--env-server", os.environ),
        env_worker=plan.parse_env(options.env_worker, "--env-worker", os.environ),
        startup_timeout_s=options.startup_timeout, hang_timeout_s=options.hang_timeout,
        max_restarts=options.max_restarts, least_workers=least if elastic else None,
        most_workers=most if elastic else None, rejoin_timeout_s=options.rejoin_timeout, grow=options.grow,
        grace_s=options.grace, on_worker_loss=options.on_worker_loss,
        reads=_reads(command, training, launcher), store=options.store)
    return _secured(job) if options.secure else job


def flags() -> List[str]:
    """All that are known."""
    return [flag for action in _parser()._actions for flag in action.option_strings]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(" (see odsgd launch --help)", prog="odsgd launch",
                    usage="%(prog)s -n WORKERS [options] COMMAND ...",
                    description="Start a job's scheduler, servers and workers, and watch over them.")

    def add(*flags: str, **settings: object) -> None:
        spellings = list(flags) + ["--" + flag[2:].replace("-", "_") for flag in flags if "-" in flag[2:]]
        parser.add_argument(*spellings, **settings)  # type: ignore[arg-type]

    add("-n", "--num-workers", type=_workers, metavar="N|MIN:MAX",
        help="number of workers; MIN:MAX: begin with MAX, and at a restart leave out those that do not come back, down "
             "to MIN")
    add("-s", "--num-servers", type=_servers, metavar="N|auto",
        help="number of servers; default: as many as workers, or none for a store that needs none; auto: one beside "
             "each worker; 0: no server, no scheduler")
    add("-H", "--hostfile", "--host-file", metavar="FILE", help="one host per line: [user@]host [slots=4] [port=22]")
    add("--launcher", "--cluster", metavar="NAME",
        help="local, ssh, mpi, slurm or kubernetes; default: ssh with a hostfile, else local")
    add("--sync-dst-dir", metavar="DIR", help="ssh: copy the working directory there on every host, and run there")
    add("-p", "--port", type=_port, default=0, help="the scheduler's TCP port; default: a free one; local: none")
    add("--secure", action="store_true",
        help="lead each connection between hosts through a tunnel, encrypted and for processes of this job alone; "
             "--port is then that of the tunnels")
    add("--host-ip", metavar="ADDRESS", help="this machine's address as the hosts see it; default: found out")
    add("--env", action="append", default=[], metavar="NAME[:VALUE]", help="set (or pass on) a variable everywhere")
    add("--env-server", action="append", default=[], metavar="NAME[:VALUE]", help="the same, for servers only")
    add("--env-worker", action="append", default=[], metavar="NAME[:VALUE]", help="the same, for workers only")
    add("--remote-python", metavar="PATH", help="the interpreter on the hosts; default: the same path as here")
    add("--startup-timeout", type=_seconds, default=300.0, metavar="SECONDS",
        help="until everyone has joined; default 300; 0: wait for ever")
    add("--hang-timeout", type=_hang_timeout, default=60.0, metavar="SECONDS",
        help="until a process that does not answer, or stands still in training, has failed; default 60; 0: for ever")
    add("--max-restarts", type=_restarts, default=0, metavar="N",
        help="after a failure start the job again, from its newest checkpoint, so often; default 0")
    add("--rejoin-timeout", type=_seconds, default=60.0, metavar="SECONDS",
        help="how long a restart tries to come up while a host or worker is missing; with MIN:MAX that one is then "
             "left out; default 60")
    add("--grow", action="store_true",
        help="with MIN:MAX, start again at a checkpoint with a host that has come back; default: at the next restart")
    add("--grace", type=_seconds, default=5.0, metavar="SECONDS", help="between SIGTERM and SIGKILL; default 5")
    add("--store", metavar="NAME[,OPTION=VALUE...]",
        help="for a script as it is: the store it gets wherever it asks for one of MXNet's, e.g. odsgd,warmup=200; "
             "none: the command needs no store, so that workers who make none have not failed")
    add("--on-worker-loss", default="fail", metavar="fail|continue",
        help="when a worker dies: end the job (default), or let an asynchronous one go on")
    pods = parser.add_argument_group("with --launcher kubernetes")
    pods.add_argument("--image", metavar="IMAGE", help="of the pods; it has odsgd in it")
    pods.add_argument("--name", metavar="NAME", help="of the job; default: odsgd- and six letters")
    pods.add_argument("--namespace", metavar="NAME", help="default: kubectl's own")
    pods.add_argument("--resources", metavar="NAME=QUANTITY,...",
                      help="of each pod, e.g. cpu=4,memory=8Gi,nvidia.com/gpu=1")
    pods.add_argument("--pod", metavar="FILE", help="YAML with the rest of a pod's spec: volumes, nodeSelector, ...")
    pods.add_argument("--dry-run", "--dry_run", action="store_true", help="show the manifests, and do nothing")
    parser.add_argument("command", nargs=argparse.REMAINDER,
                        help="what a worker runs; a .py file is run with this Python")
    return parser


def _check(options: argparse.Namespace, launcher: str) -> None:
    if launcher not in plan.LAUNCHERS:
        raise unknown("launcher", launcher, plan.LAUNCHERS)
    if options.on_worker_loss not in plan.ON_WORKER_LOSS:
        raise unknown("value of --on-worker-loss", options.on_worker_loss, plan.ON_WORKER_LOSS)
    least, most = options.num_workers
    if least < most and not options.max_restarts:
        raise ConfigError(f"-n {least}:{most} needs --max-restarts: workers are left out when a job starts again")
    if options.grow and least == most:
        raise ConfigError("--grow takes in workers that were left out; it needs -n MIN:MAX")
    if least < most and launcher in plan.COMING:
        raise ConfigError(f"-n {least}:{most} is for --launcher local and ssh; with {launcher} all workers are "
                          "started, or none")
    if least < most and options.on_worker_loss == "continue":
        raise ConfigError(f"-n {least}:{most} and --on-worker-loss continue are two ways to go on without a worker; "
                          "leave one of them out")
    _check_hosts(options, launcher)


def _check_hosts(options: argparse.Namespace, launcher: str) -> None:
    """What a launcher takes of the flags that say where the processes run."""
    if launcher == "ssh" and not options.hostfile:
        raise ConfigError("--launcher ssh needs a hostfile: -H FILE, with one host per line")
    if launcher == "local" and options.hostfile:
        raise ConfigError("--launcher local starts everything here; leave out -H, or use --launcher ssh or mpi")
    if launcher in ("slurm", "kubernetes") and options.hostfile:
        raise ConfigError(f"--launcher {launcher} has hosts of its own; leave out -H, or use --launcher ssh or mpi")
    of_pods = {"--image": options.image, "--name": options.name, "--namespace": options.namespace,
               "--resources": options.resources, "--pod": options.pod, "--dry-run": options.dry_run}
    of_hosts = {"--host-ip": options.host_ip, "--remote-python": options.remote_python}
    for flag in (flag for flag, given in (of_hosts if launcher == "kubernetes" else of_pods).items() if given):
        raise ConfigError(f"{flag} does not work with --launcher kubernetes; a pod has its own" if flag in of_hosts else
                          f"{flag} works with --launcher kubernetes only")
    if launcher != "ssh" and options.sync_dst_dir:
        raise ConfigError("--sync-dst-dir works with --launcher ssh only")


def _command(words: List[str], launcher: str) -> Tuple[str, ...]:
    words = words[1:] if words[:1] == ["--"] else words
    if not words:
        raise ConfigError("no command: say what the workers run, e.g. `odsgd launch -n 2 train.py`")
    if launcher == "local":  # elsewhere only the host itself can tell
        if words[0].endswith(".py") and not os.path.isfile(words[0]):
            raise ConfigError(f"no such file: {words[0]}")
        if not words[0].endswith(".py") and not shutil.which(words[0]):
            raise ConfigError(f"no such program: {words[0]}")
    return tuple(words)


def _training(command: Sequence[str], launcher: str, store: Optional[str]) -> Union[TrainConfig, StandIn, None]:
    """What the workers will train with, if the command is ours and it can be known here, or it has been said."""
    try:
        training = check_command(command, elsewhere=launcher != "local")
    except ConfigError as error:
        raise ConfigError(f"the workers' command: {error}") from None
    if store is None:
        return training
    if training is not None:
        raise ConfigError("--store is for scripts that ask for a store of MXNet's; `odsgd train` has a flag of its "
                          "own, --kvstore")
    if store == plan.NO_STORE:
        return None
    try:
        return standin.parse(store)
    except ConfigError as error:
        raise ConfigError(f"--store {shown(store)}: {error}") from None


def _reads(command: Sequence[str], training: Union[TrainConfig, StandIn, None], launcher: str) -> Tuple[str, ...]:
    """Files and folders that every worker needs, as far as its command tells; ConfigError if they should be here."""
    named: Dict[str, Optional[str]] = {}
    if isinstance(training, TrainConfig):
        named = {"data_dir": training.data_dir, "weights": training.weights}
    if launcher == "local":
        for option, path in named.items():
            if path and not os.path.exists(os.path.expanduser(path)):
                raise ConfigError(f"the workers' command: {option} `{path}`: there is no such file or folder")
    script = next((word for word in command[:2] if word.endswith(".py")), None)
    return tuple(filter(None, [script, *named.values()]))


def _num_servers(asked: Optional[str], num_workers: int, training: Union[TrainConfig, StandIn, None]) -> int:
    """As asked, or by default as many as workers, or none for a training that needs none."""
    needed = training is None or training.needs_servers
    count = (num_workers if needed else 0) if asked is None else num_workers if asked == "auto" else int(asked)
    if training and needed != (count > 0):
        why = "cannot do without servers" if needed else "has no use for servers"
        raise ConfigError(f"-s {asked}: the workers' command trains with kvstore `{training.kvstore}`, which {why}; "
                          "leave -s out")
    return count


def _secured(job: plan.Job) -> plan.Job:
    """The job with `--secure`, or a `ConfigError`. On one machine no network reaches its processes anyway."""
    if job.launcher in plan.COMING:
        by = "mpirun" if job.launcher == "mpi" else job.launcher
        raise ConfigError(f"--secure is for --launcher ssh: {by} would carry the job's secret, and the messages of its "
                          "agents, over connections of its own, which nothing protects")
    for name in (*plan.LED_BY_TUNNEL, *plan.AT_PORT) if not job.num_servers else ():
        if name in {**job.env, **job.env_worker}:
            raise ConfigError(f"--secure and --env {name}: with --secure the launcher says how MPI sends; leave one of "
                              "them out")
    job = dataclasses.replace(job, known_hosts=True)
    if job.launcher == "local" and not job.num_servers:
        return dataclasses.replace(job, env_worker={**job.env_worker, **plan.KEPT_ON_LOOPBACK})
    if job.env.get("DMLC_LOCAL", "1") != "1":
        raise ConfigError("--secure and --env DMLC_LOCAL:0: with --secure processes listen at no TCP port; leave one "
                          "of them out")
    if job.launcher == "local" and not plan.meets_by_file(job):
        raise ConfigError("--secure: this job would listen on TCP, by --port, DMLC_LOCAL=0, or since /tmp cannot be "
                          "written; without these nobody reaches a job on one machine")
    return dataclasses.replace(job, secure=job.launcher == "ssh")


def _value(convert: Callable[[str], T], fits: Callable[[T], bool], expected: str) -> Callable[[str], T]:
    """For argparse: the value of a text, if it fits."""
    def value_of(text: str) -> T:
        with contextlib.suppress(ValueError):
            value = convert(text)
            if fits(value):
                return value
        raise argparse.ArgumentTypeError(f"got `{shown(text)}`, expected {expected}")
    return value_of


def _least_and_most(text: str) -> Tuple[int, int]:
    least, colon, most = text.partition(":")
    return int(least), int(most if colon else least)


_workers = _value(_least_and_most, lambda both: 1 <= both[0] <= both[1] <= MOST_PROCESSES,
                  f"a whole number from 1 to {MOST_PROCESSES}, or MIN:MAX")
_servers = _value(str, lambda text: text == "auto" or int(text) in range(MOST_PROCESSES + 1),
                  f"a whole number up to {MOST_PROCESSES}, or `auto`")
_restarts = _value(int, lambda count: 0 <= count <= 10 ** 6, "a whole number up to 1000000")
_port = _value(int, lambda port: 0 <= port <= 65535, "a whole number from 0 to 65535")
_seconds = _value(float, lambda seconds: 0 <= seconds < float("inf"), "a number of seconds, 0 or more")
_hang_timeout = _value(float, lambda seconds: seconds == 0 or LEAST_HANG_TIMEOUT_S <= seconds < float("inf"),
                       f"0 or a number of seconds, at least {LEAST_HANG_TIMEOUT_S:g}")
