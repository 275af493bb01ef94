"""The command line of MXNet's ``tools/launch.py``, so that old job scripts work, and a little more.

    odsgd launch -n 2 -s 1 train.py --lr 0.1
    odsgd launch -n 8 -s auto -H hosts --env MXNET_CPU_WORKER_NTHREADS:2 python train.py

Three things differ from the original. Without -H jobs are local. The launcher's options stand before the command: all
words after the command's first belong to it. Every mistake is reported before a process starts.
"""
import argparse
import dataclasses
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Dict, List, Optional, Sequence, Tuple, Union

from kvstore.errors import EXIT_FAILURE, ConfigError, shown
from odsgd.config.flags import Parser, given
from odsgd.config.launch import AGENTS_CALL, NO_STORE, LaunchOptions
from odsgd.launch import plan, supervisor
from odsgd.launch.hostfile import read_hostfile
from odsgd.launch.hosts import kubernetes, slurm
from odsgd.launch.hosts.ssh import ReachError

if TYPE_CHECKING:
    from kvstore.fronts.choice import StandIn
    from odsgd.config.train import TrainConfig

DESCRIPTION = """\
Start the scheduler, the servers and the workers of a job, and watch over them.
Each worker runs COMMAND; if that is a .py file, this Python runs it.
Flags take - or _ between words.

  odsgd launch -n 2 -s 1 script.py
  odsgd launch -n 8 -s auto -H hosts python script.py --lr 0.1"""
TRAIN_SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train.py"
FIRST = ("num_workers", "num_servers", "hostfile", "launcher", "max_restarts")


def main(argv: List[str]) -> int:
    """Launch a job; return the exit code: 0 or the first failed process's. ConfigError for a mistake in `argv`."""
    try:
        options, words = _read(argv)
        job = _job(options, words)
        if job.launcher == "kubernetes":
            return kubernetes.submit(job, options)
        return supervisor.run(job)
    except ReachError as error:
        print(f"odsgd launch: {error}", file=sys.stderr)
        return EXIT_FAILURE


def parse(argv: Sequence[str]) -> plan.Job:
    """The job that a command line asks for, or a `ConfigError`."""
    return _job(*_read(argv))


def parser() -> Parser:
    """The parser of the command line."""
    made = Parser(" (see odsgd launch --help)", FIRST, prog="odsgd launch", description=DESCRIPTION,
                  usage="%(prog)s -n WORKERS [options] COMMAND ...",
                  formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_fields(LaunchOptions.__dataclass_fields__)
    made.add_argument("command", nargs=argparse.REMAINDER,
                      help="what a worker runs; a .py file is run with this Python")
    return made


def _read(argv: Sequence[str]) -> Tuple[LaunchOptions, List[str]]:
    """The options, and the words of the workers' command."""
    values = parser().read(argv)
    words = values.pop("command")
    return LaunchOptions(**values), words


def _job(options: LaunchOptions, words: List[str]) -> plan.Job:
    slots = read_hostfile(options.hostfile) if options.hostfile else []
    if options.launcher == "slurm":
        slots = slurm.allocated(os.environ)
    if options.launcher == "mpi" and any(host.user or host.port for host in slots):
        raise ConfigError(f"{options.hostfile}: mpirun takes neither user@host nor port=; "
                          "write them into ~/.ssh/config")
    command = _command(words, options.launcher)
    config = _config(command, options.launcher)
    training = config if options.store is None else _stand_in(options.store, config)
    if options.on_worker_loss == "continue" and training and not training.asynchronous:
        raise ConfigError("--on-worker-loss continue is for asynchronous stores, and the workers' command trains with "
                          f"kvstore `{training.kvstore}`; leave it out, or choose another store")
    least, most = options.num_workers
    elastic = least < most
    asked = options.num_servers or ("0" if options.store == NO_STORE else None)
    job = plan.Job(
        command=command, num_workers=most, num_servers=_num_servers(asked, most, training),
        servers_beside_workers=asked == "auto", launcher=options.launcher, slots=tuple(slots),
        least_workers=least if elastic else None, most_workers=most if elastic else None,
        reads=_reads(command, config, options.launcher), **options.kept())
    job = _secured(job) if options.secure else job
    job = dataclasses.replace(job, closed=why_closed(job, training))
    if job.spare and job.closed:
        raise ConfigError(f"--spare {job.spare}: nobody could join this job: {job.closed}")
    return job


def why_closed(job: plan.Job, training: "Union[TrainConfig, StandIn, None]" = None) -> str:
    """Why no worker can join this job while it runs, in words; empty if one can, or if only its script can tell."""
    if job.launcher in AGENTS_CALL:
        return f"its launcher is {job.launcher}, which starts all workers together; join takes --launcher local or ssh"
    if job.secure:
        return "--secure opens tunnels only for the processes that begin with the job"
    if not plan.on_sockets(job):
        servers = "" if job.num_servers else "servers and "
        return f"its workers meet by ps-lite or MPI, which take nobody in later; launch it with {servers}--wire sockets"
    if job.on_worker_loss != "continue":
        return "it ends with the first worker lost; launch it with --on-worker-loss continue"
    if training is not None and not training.admits:
        return (f"kvstore `{training.kvstore}` with its options needs the same workers all the time; `decoupled` "
                "and `async_diloco` do not")
    return ""


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


def _config(command: Sequence[str], launcher: str) -> "Optional[TrainConfig]":
    """The workers' configuration; None if it cannot be known here."""
    try:
        config = check_command(command, elsewhere=launcher != "local")
        if config is not None and config.cluster is not None:
            raise ConfigError("cluster: a cluster in virtual time is one process; start it without `odsgd launch`")
        return config
    except ConfigError as error:
        raise ConfigError(f"the workers' command: {error}") from None


def _stand_in(store: str, config: "Optional[TrainConfig]") -> "Optional[StandIn]":
    """The store of --store; None if the command needs none."""
    if config is not None:
        raise ConfigError("--store is for scripts that ask for a store of MXNet's; `odsgd train` has a flag of its "
                          "own, --kvstore")
    if store == NO_STORE:
        return None
    from kvstore.fronts import choice
    try:
        return choice.stand_in(store)
    except ConfigError as error:
        raise ConfigError(f"--store {shown(store)}: {error}") from None


def check_command(command: Sequence[str], elsewhere: bool = False) -> "Optional[TrainConfig]":
    """The configuration of a worker's command, if it is ``odsgd train`` and can be known here; ConfigError.

    So the launcher reports a misspelt option once, before a process starts, and not every worker. `elsewhere`: the
    workers run on other hosts, so the file of ``--config`` may be there and not here; then each flag is checked, but
    not how they go together.
    """
    flags = _flags_of_train(list(command))
    if flags is None:
        return None
    from odsgd.config.train import TrainConfig  # with NumPy and all methods, which a script's job does without
    method_file, config_file = given(flags, "--method-file", "--config") if elsewhere else (None, None)
    if method_file and method_file.endswith(".py") and not os.path.exists(method_file):
        return None
    if config_file and not os.path.exists(config_file):
        TrainConfig.parse(flags)
        return None
    return TrainConfig.from_flags(flags)


def _flags_of_train(words: List[str]) -> Optional[List[str]]:
    if words and Path(words[0]).name.startswith("python"):
        words = ["odsgd", *words[3:]] if words[1:3] == ["-m", "odsgd"] else words[1:]
    if words and Path(words[0]).resolve() == TRAIN_SCRIPT:
        return words[1:]
    return words[2:] if [Path(word).name for word in words[:2]] == ["odsgd", "train"] else None


def _reads(command: Sequence[str], config: "Optional[TrainConfig]", launcher: str) -> Tuple[str, ...]:
    """Files and folders that the command reads; ConfigError if this machine lacks one, or cannot make the run's."""
    named: Dict[str, Optional[str]] = {}
    if config is not None:
        named = {"data_dir": config.data_dir, "weights": config.weights}
    if launcher == "local":
        for option, path in named.items():
            if path and not os.path.exists(os.path.expanduser(path)):
                raise ConfigError(f"the workers' command: {option} `{path}`: there is no such file or folder")
        if config is not None:
            config.make_folder()
    script = next((word for word in command[:2] if word.endswith(".py")), None)
    return tuple(filter(None, [script, *named.values()]))


def _num_servers(asked: Optional[str], num_workers: int, training: "Union[TrainConfig, StandIn, None]") -> int:
    """The number of servers as asked; by default as many as workers, or 0 for a training that needs no server."""
    needed = training is None or training.needs_servers
    count = (num_workers if needed else 0) if asked is None else num_workers if asked == "auto" else int(asked)
    if training and needed != (count > 0):
        kinds = training.method.transports
        on = f" on transport `{training.transport or kinds[0]}`" if len(kinds) > 1 else ""
        other = next((f", or choose transport `{kind}`" for kind in kinds if (kind == "server") != needed), "")
        why = "cannot do without servers" if needed else "has no use for servers"
        raise ConfigError(f"-s {asked}: the workers' command trains with kvstore `{training.kvstore}`{on}, which "
                          f"{why}; leave -s out{other}")
    return count


def _secured(job: plan.Job) -> plan.Job:
    """The job with `--secure`, or a `ConfigError`. A job on one machine needs no tunnel: no network reaches it."""
    if job.launcher in AGENTS_CALL:
        by = "mpirun" if job.launcher == "mpi" else job.launcher
        raise ConfigError(f"--secure is for --launcher ssh: {by} would carry the job's secret, and the messages of its "
                          "agents, over connections of its own, which nothing protects")
    for name in (*plan.THROUGH_TUNNEL, *plan.LIBFABRIC_PORT) if not job.num_servers else ():
        if name in {**job.env, **job.env_worker}:
            raise ConfigError(f"--secure and --env {name}: with --secure the launcher says how MPI sends; leave one of "
                              "them out")
    job = dataclasses.replace(job, known_hosts=True, secure=False)
    if job.launcher == "local" and not job.num_servers:
        return dataclasses.replace(job, env_worker={**job.env_worker, **plan.KEPT_ON_LOOPBACK})
    if job.env.get("DMLC_LOCAL", "1") != "1":
        raise ConfigError("--secure and --env DMLC_LOCAL:0: with --secure processes listen at no TCP port; leave one "
                          "of them out")
    if job.launcher == "local" and not plan.meets_by_file(job):
        raise ConfigError("--secure: this job would listen on TCP, by --port, DMLC_LOCAL=0, or since /tmp cannot be "
                          "written; without these nobody reaches a job on one machine")
    return dataclasses.replace(job, secure=job.launcher == "ssh")
