"""This process's place in an MPI job.

MPI is started when a store first needs it, with a deadline. `odsgd launch` serves what MPI asks for at its start
(PMI); a script under a plain `mpiexec` works as well.

The end. A worker of our launcher just leaves: its rounds are over, so its messages have arrived, and what it ends with
is seen at once. Under a foreign `mpiexec` all workers leave together, as MPI has it (MPI_Finalize). A worker that fails
ends with `ending.die`, never with MPI_Abort, which may wait.
"""
import contextlib
import ctypes
import os
import re
from typing import Any

from kvstore.engine import engine
from kvstore.errors import ConfigError, KVStoreError, LacksError
from kvstore.job import environment
from kvstore.job.deadlines import deadlines
from kvstore.job.pulse import connecting, pulse
from kvstore.job.report import report

INSTALL = "pip install 'mpi4py>=4.1' 'mpich>=5.0'"


class World:
    """MPI, started, and a communicator of our own."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        check_job()
        self.mpi = _library()
        self._collective_end = not environment.launched() or self.mpi.Is_initialized()
        connecting()
        if not self.mpi.Is_initialized():
            self._start()
        if self.mpi.Query_thread() < self.mpi.THREAD_SERIALIZED:
            raise ConfigError("MPI was started without threads, and the ring has one of its own; set "
                              "mpi4py.rc.thread_level = 'multiple' before `from mpi4py import MPI`")
        world = self.mpi.COMM_WORLD
        self.worker_rank, self.num_workers = world.Get_rank(), world.Get_size()
        with deadlines.within(timeout_s, f"not all {self.num_workers} workers made a store within {timeout_s:g} s; "
                              "check that all are alive and run the same script"):
            self.comm = world.Dup()
        self.comm.Set_errhandler(self.mpi.ERRORS_RETURN)  # as exceptions
        _unlink_shared_memory()
        _check_world(self.worker_rank, self.num_workers, self.mpi)
        report("joined")

    def _start(self) -> None:
        _check_way()
        _check_netmod(self.mpi)
        for name in ("UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE"):
            os.environ.setdefault(name, "256k")  # instead of 8k: a tenth less time on 1 Gbit/s, a third with `quantize`
        with deadlines.within(self.timeout_s, f"the job did not come up within {self.timeout_s:g} s: "
                              f"{os.environ.get('PMI_SIZE', 'all')} workers expected to meet; check that each was "
                              "started, and that the hosts reach each other"):
            _let_wait(self.mpi, "MPI_Init_thread", None, None, self.mpi.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
        for comm in (self.mpi.COMM_WORLD, self.mpi.COMM_SELF):
            comm.Set_errhandler(self.mpi.ERRORS_RETURN)  # as mpi4py does; MPI_Testsome's errors are of no communicator

    def close(self) -> None:
        engine.wait_all()  # rounds in flight; their own deadline holds
        if self._collective_end and not self.mpi.Is_finalized():
            with deadlines.within(self.timeout_s, f"the other workers did not leave within {self.timeout_s:g} s; "
                                  "under a plain mpiexec all leave together"):
                _let_wait(self.mpi, "MPI_Finalize")
        report("done", at=pulse.at)


def _let_wait(mpi: Any, name: str, *arguments: Any) -> None:
    """Call MPI's library past mpi4py, which would keep Python's lock while it waits, so that no deadline could fire."""
    code = getattr(ctypes.CDLL(mpi.__file__), name)(*arguments)
    if code:
        raise KVStoreError(f"{name} failed: {mpi.Get_error_string(code)}")


def _library() -> Any:
    try:
        import mpi4py
    except ModuleNotFoundError:
        raise LacksError(f"this store sends by MPI and mpi4py is not installed: {INSTALL}; or start a script of "
                         "PyTorch's by torchrun") from None
    mpi4py.rc.initialize = mpi4py.rc.finalize = False  # both are ours, with deadlines
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LacksError(f"this store sends by MPI and mpi4py finds no library of it ({error}): {INSTALL}") from None
    return MPI


def _unlink_shared_memory() -> None:
    """All workers of this host have mapped MPICH's file by now; a worker that is killed would leave it behind."""
    with open("/proc/self/maps") as maps:
        files = {line.split()[-1] for line in maps if "/dev/shm/mpich_shm_" in line}
    for file in files:
        with contextlib.suppress(OSError):
            os.unlink(file)


def check_job() -> None:
    """The launcher's options must go with a ring."""
    if "ODSGD_LOST" in os.environ:
        raise ConfigError("--on-worker-loss continue is for asynchronous stores, and this one cannot do without any "
                          "worker; leave it out")
    servers = os.environ.get("DMLC_NUM_SERVER", "0")
    if environment.launched() and servers != "0" and "PMI_RANK" not in os.environ:
        raise ConfigError(f"this store sends from worker to worker and the job has {servers} servers; launch it with "
                          "`-s 0`")


def _check_way() -> None:
    """ConfigError if the descriptor is closed with which a worker of `odsgd launch` finds the others."""
    if environment.launched() and "PMI_FD" in os.environ:
        try:
            os.fstat(int(os.environ["PMI_FD"]))
        except OSError:
            raise LacksError("the descriptor by which MPI finds the other workers (PMI_FD) has been closed by a "
                             "program between `odsgd launch` and this one; let it pass descriptors on (in Python "
                             "`subprocess.run(…, close_fds=False)`)") from None


def _check_netmod(mpi: Any) -> None:
    """ConfigError if the library lacks the transport that it is asked for: it would silently take another."""
    asked, library = os.environ.get("MPIR_CVAR_CH4_NETMOD"), mpi.Get_library_version()
    device = re.search(r"^MPICH Device:\s*(.*?)\s*$", library, re.MULTILINE)
    if asked and (device is None or asked not in device[1]):
        raise ConfigError(f"MPI is to send by `{asked}` (MPIR_CVAR_CH4_NETMOD; --secure needs `ofi`), and this library "
                          f"({device[1] if device else library.splitlines()[0]}) has been built without it; the wheel "
                          f"of MPICH has both: {INSTALL}")


def _check_world(worker_rank: int, num_workers: int, mpi: Any) -> None:
    """MPI must see the same job as the launcher."""
    names = "DMLC_NUM_WORKER", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"  # by the launcher, or by mpiexec
    expected = next(filter(None, map(os.environ.get, names)), None)
    if expected is None:
        raise ConfigError("this store needs a job; start the script with `odsgd launch -n 2 -s 0 python script.py` or "
                          "`mpiexec -n 2 python script.py`, or make the store `local` in one process")
    vendor = " ".join([mpi.get_vendor()[0], ".".join(map(str, mpi.get_vendor()[1]))])
    check_place(f"the rank in MPI ({vendor})", worker_rank, num_workers, expected, "mpi4py must be built on the MPI "
                "that starts the job, and for `odsgd launch` on MPICH or its kin "
                f"({INSTALL}); leave ODSGD_WORKER_RANK unset where mpiexec starts the workers")


def check_place(what: str, worker_rank: int, num_workers: int, expected: str, advice: str) -> None:
    """ConfigError unless this process has the rank that the launcher gave it, of the `expected` number of workers."""
    given = os.environ.get("ODSGD_WORKER_RANK", str(worker_rank))
    if (given, expected) != (str(worker_rank), str(num_workers)):
        raise ConfigError(f"{what} is {worker_rank} of {num_workers}, and this process is worker {given} of {expected} "
                          f"of the job; {advice}")
