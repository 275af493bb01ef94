"""What a store is made of: the method of a name, its options, and this process's transport. And which store takes the
place of MXNet's.

    odsgd:warmup=200:lr_local=0.05            a name, then options as `kvstore.create` knows them
"""
import contextlib
import multiprocessing
import os
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, Optional, Tuple, Type, Union

from kvstore import methods
from kvstore.errors import ConfigError, LacksError, shown
from kvstore.job import ending, environment
from kvstore.messages.seam import Transport
from kvstore.methods import fit
from kvstore.methods.common import Options
from kvstore.methods.contract import Method
from kvstore.options import DEFAULT_TIMEOUT_S


def connect(name: str, transport: Optional[str] = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> Transport:
    """This process's place in its job: the transport of this kind, or the method's default."""
    method = methods.find(name)
    kind = fit.transport_of(method, transport)
    if kind == "process":
        _tell_alone(name)
        from kvstore.transports.in_process import Stage
        return Stage(1, timeout_s=timeout_s).worker(0)
    if kind in ("ring", "sharded"):
        from kvstore.transports.ring import MpiRing, MpiSharded
        return MpiRing(timeout_s) if kind == "ring" else MpiSharded(timeout_s)
    if os.environ.get("DMLC_NUM_SERVER") == "0":
        instead = [f", or transport=\"{one}\"" for one in method.transports if one != "server"]
        raise ConfigError(f"store {name} needs servers, and this job has none (-s 0): give -s 1{''.join(instead[:1])}")
    has_mxnet = environment.has_mxnet()
    if environment.on_sockets() or not (has_mxnet or environment.in_job()):  # outside a job both say what is missing
        from kvstore.transports.sockets import SocketServers
        return SocketServers(timeout_s, not method.asynchronous)
    if not has_mxnet:
        raise LacksError(f"{environment.who()}: {environment.NO_MXNET}")
    from kvstore.transports.pslite import ParameterServer
    return ParameterServer(timeout_s, not method.asynchronous)


def checked(name: str, transport: Union[str, Transport, None], options: Dict[str, Any],
            reach: Callable[[str, Optional[str], float], Transport] = connect,
            ) -> Tuple[Type[Method], Options, Transport]:
    """The arguments of every front end's store. `reach` makes the transport, and waits for the job the first time."""
    with errors_in_a_job_end_it():
        if not isinstance(name, str) or not isinstance(transport, (str, Transport, type(None))):
            raise ConfigError(f"create({shown(name)}, {shown(transport)}): expected the name of a store, then a "
                              'transport or none; options go by name, as in create("odsgd", warmup=200)')
        name, written = fit.split(name)
        method = methods.find(name)
        imported = getattr(multiprocessing.current_process(), "_inheriting", False)
        if imported and method.transports != ("process",):
            raise ConfigError("a process that the script has started by `spawn` or `forkserver`, as a DataLoader's, "
                              f'imports the script and would make its store, `{name}`, again: put what the script '
                              'does under `if __name__ == "__main__":`')
        transport = written.pop("transport", None) if transport is None else transport
        given = fit.options_of(method, {**written, **options})
        if not isinstance(transport, Transport):
            transport = reach(name, transport, given.timeout_s)
        fit.check_on(transport, method, given)
        return method, given, transport


def _tell_alone(name: str) -> None:
    workers = int(os.environ.get("DMLC_NUM_WORKER" if environment.in_job() else "WORLD_SIZE") or 1)
    if workers > 1 and (environment.in_job() or environment.by_torchrun()):
        from kvstore.fronts.base import warn
        warn(f"this job has {workers} workers, and a `{name}` store trains on this one alone; each of them "
             "trains a model of its own, as rank 0. To train one model on all of them take another store, as `ssgd`")


@contextlib.contextmanager
def errors_in_a_job_end_it() -> Iterator[None]:
    """Let a ConfigError end a process of a job with one line, as a transport does once there is one."""
    try:
        yield
    except ConfigError:
        if environment.in_job() or environment.by_torchrun():
            ending.die_of_errors()
        raise


@dataclass(frozen=True)
class StandIn:
    """The store of a job in place of MXNet's, for scripts that do not know this project (`odsgd launch --store`): a
    method, what it runs on, and the options that were given.

    The launcher reads it before anything starts, and the workers where they would make MXNet's store.
    """

    method: Type[Method]
    transport: Optional[str]
    options: Dict[str, Any]

    @property
    def kvstore(self) -> str:
        return self.method.name

    @property
    def asynchronous(self) -> bool:
        return self.method.asynchronous

    @property
    def needs_servers(self) -> bool:
        return (self.transport or self.method.transports[0]) == "server"

    @property
    def admits(self) -> bool:
        return self.method.admits(fit.options_of(self.method, self.options))

    def in_place_of(self, name: str) -> Dict[str, Any]:
        """The options where a script asks for MXNet's store `name`. MXNet's `dist` stores add gradients up, and so does
        this one, where it can."""
        sums = {"reduction": "sum", **self.options}
        if "dist" in name and self.method.reduces:
            with contextlib.suppress(ConfigError):  # `decoupled` has another way, `merge`
                fit.options_of(self.method, sums)
                return sums
        return self.options


def stand_in(text: str) -> StandIn:
    """The store that a user has written; ConfigError for what `kvstore.create` would refuse in a worker."""
    name, options = fit.split(text)
    method = methods.find(name)
    if method.transports == ("process",):
        raise ConfigError(f"store `{name}` trains in one process alone; the stores of a job are "
                          f"{', '.join(other for other in methods.METHODS if other != name)}")
    transport = options.pop("transport", None)
    fit.check(method, fit.options_of(method, options, also=["transport"]), fit.transport_of(method, transport))
    return StandIn(method, transport, options)
