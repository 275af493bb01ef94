"""Server and scheduler: ``python -m kvstore.weights.servers`` with DMLC_ROLE set, or any script that imports odsgd.

The scheduler only introduces the others to each other. On ps-lite it loads MXNet's library without its front end, whose
import half a job would wait for.
"""
import ctypes
import importlib.util
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from kvstore.errors import EXIT_FAILURE, EXIT_USAGE, KVStoreError
from kvstore.job import commands, ending, environment, lean
from kvstore.job.pulse import connecting
from kvstore.job.report import report


def main() -> int:
    """Be what DMLC_ROLE says, until the job is over."""
    role = os.environ.get("DMLC_ROLE")
    if role not in ("server", "scheduler"):
        print(f"kvstore.weights.servers: DMLC_ROLE is {role!r}, expected `server` or `scheduler`; it is started by "
              "`odsgd launch`", file=sys.stderr)
        return EXIT_USAGE
    if role == "server" and not commands.trusted():
        print(f"{environment.who()}: no ODSGD_SECRET in the environment: commands are not authenticated, and only "
              "optimizers and methods of MXNet's and our own are accepted", file=sys.stderr)
    environment.serving = True
    if "ODSGD_MODULES" in os.environ:  # last, so that no file there hides a module of ours
        sys.path.append(os.environ["ODSGD_MODULES"])
    lean.begin()
    if role == "server":
        from kvstore.engine import _before  # noqa: F401  modules of the job's own may import MXNet, as in workers
    os.umask(0o077)  # its socket, where it is a file, is this user's alone
    if environment.on_sockets():
        from kvstore.weights.servers import sockets
        sockets.introduce() if role == "scheduler" else sockets.serve()
    elif not environment.has_mxnet():
        ending.die(environment.NO_MXNET, EXIT_USAGE)
    elif role == "scheduler":
        _schedule()
    else:
        from kvstore.weights.servers.server import serve
        serve()
    report("done")
    return 0


def _schedule() -> None:
    library = _library()
    connecting()
    report("joined")
    store = ctypes.c_void_p()
    for code in (library.MXKVStoreCreate(b"dist_async", ctypes.byref(store)),
                 library.MXKVStoreRunServer(store, None, None)):
        why = library.MXGetLastError().decode() if code else ""
        if "bind failed" in why:
            address, port = os.environ.get("DMLC_PS_ROOT_URI"), os.environ.get("DMLC_PS_ROOT_PORT")
            ending.die(f"port {port} of {address} is taken by another program; name another one with --port, or leave "
                       "the option out and a free one is chosen", EXIT_FAILURE)
        if code:
            raise KVStoreError(f"MXNet's scheduler ended with an error: {why}")


def _library() -> Any:
    """MXNet's library, found as its front end finds it."""
    package = importlib.util.find_spec("mxnet")
    assert package is not None and package.submodule_search_locations
    libinfo = runpy.run_path(str(Path(package.submodule_search_locations[0]) / "libinfo.py"))
    library = ctypes.CDLL(libinfo["find_lib_path"]()[0])
    library.MXGetLastError.restype = ctypes.c_char_p
    return library


if __name__ == "__main__":
    sys.exit(main())
