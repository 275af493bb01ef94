"""What holds for every test: none may hang the run, nor take the machine's memory."""
from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import resource
import signal
import sys
from typing import Any, Dict, Generator, Iterator, List

import pytest

import tests.lean  # noqa: F401  before anything imports MXNet
from tests.integration import debian

_stderr = os.dup(sys.__stderr__.fileno()) if sys.__stderr__ is not None else 2
MOST_MB = 1600
"""A process that runs tests may have so much: the profile of a network alone takes 1 GB, once."""
_peak_mb = 0
_peaks_mb: Dict[str, int] = {}
"""Of the processes that share the tests."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `scripts/test` takes beside pytest's own."""
    parser.addoption("--system", action="store_true",
                     help="all tests, also those marked `again`; they may change this machine: as root they install "
                     "sshd, Slurm and MPIs by apt-get, and load the schemas of Kubernetes by pip")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the real stderr, which is not captured at this moment; hear Ctrl-C where a shell began this with `&`."""
    global _stderr
    debian.system = config.getoption("--system")
    os.close(_stderr)
    _stderr = os.dup(2)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # tests of an interruption raise it
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: List[pytest.Item]) -> None:
    """Leave out the tests that are marked `again`, unless `--system` is given."""
    left_out = [] if config.getoption("--system") else [item for item in items if item.get_closest_marker("again")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, None]:
    """Where there is no MXNet, files that import it are skipped; a test that does so by itself fails."""
    report = (yield).get_result()
    if report.failed and "MXNet is not installed" in str(report.longrepr):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, "Skipped: MXNet is not installed")


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


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Keep the peak of memory, which the tests of readers have the kernel forget; the test that goes too far fails."""
    global _peak_mb
    before, _peak_mb = _peak_mb, max(_peak_mb, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
    torch = sys.modules.get("torch")
    on_gpu = torch is not None and torch.cuda.is_initialized()  # whose libraries alone take more
    if before <= MOST_MB < _peak_mb and not on_gpu:
        pytest.fail(f"this process has grown by {_peak_mb - before} MB to {_peak_mb} MB in this test; expected at most "
                    f"{MOST_MB} MB. Give networks back (`gives_memory_back`), or start fewer threads", pytrace=False)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Which process runs which tests, where several share them (`-n`)."""
    from tests.parallel import Units
    return Units(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that began the run, if this is one of several."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["peak_mb"] = _peak_mb


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_testnodedown(node: Any) -> None:
    _peaks_mb[node.gateway.id] = getattr(node, "workeroutput", {}).get("peak_mb", 0)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how large the processes have grown; MXNet keeps 5 MB for each thread that has ever computed."""
    peaks = ", ".join(map(str, _peaks_mb.values() or [_peak_mb]))
    terminalreporter.write_line(f"peak memory of each test process: {peaks} MB")
