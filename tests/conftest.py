"""What holds for every test: none may hang the run."""
from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import resource
import signal
import sys
from typing import Any, Iterator

import pytest

from tests.integration import debian

_stderr = os.dup(sys.__stderr__.fileno()) if sys.__stderr__ is not None else 2
_peak_mb = 0


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `scripts/test` takes beside pytest's own."""
    parser.addoption("--system", action="store_true",
                     help="tests may change this machine: as root they install sshd, Slurm and MPIs by apt-get, and "
                     "load the schemas of Kubernetes by pip")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the real stderr, which is not captured at this moment; hear Ctrl-C where a shell began this with `&`."""
    global _stderr
    debian.system = config.getoption("--system")
    os.close(_stderr)
    _stderr = os.dup(2)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # tests of an interruption raise it
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _end_a_run_stuck_in_native_code(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the process, with all stacks, when a test is still there long after its timeout.

    pytest-timeout interrupts Python code; a wait inside MXNet or ps-lite never returns to it.
    """
    marker = request.node.get_closest_marker("timeout")
    limit_s = float(marker.args[0]) if marker and marker.args else float(request.config.getini("timeout") or 0)
    if limit_s > 0:
        faulthandler.dump_traceback_later(limit_s + 60, exit=True, file=_stderr)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def gives_memory_back() -> Iterator[None]:
    """For tests of whole networks, which refer to themselves and take 100 MB: that goes back to the system."""
    yield
    _give_back()


@pytest.fixture(scope="module", autouse=True)
def _each_file_gives_memory_back() -> Iterator[None]:
    """glibc would keep it, file by file."""
    yield
    _give_back()


def _give_back() -> None:
    gc.collect()
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def pytest_runtest_teardown() -> None:
    """Keep the peak of memory, which the tests of readers have the kernel forget."""
    global _peak_mb
    _peak_mb = max(_peak_mb, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how large this process has grown; MXNet keeps 5 MB for each thread that has ever computed."""
    terminalreporter.write_line(f"peak memory of the test process: {_peak_mb} MB", red=_peak_mb > 1000)
