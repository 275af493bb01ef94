"""Nothing that only observes a job may end it, or hang it: whatever raises, is full, or is read by nobody."""
import contextlib
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path
from typing import Callable, Dict, List

import pytest

from odsgd.launch.view import status_file
from tests.integration import launching
from tests.integration.launching import PATIENCE_S, ROOT, Launch, words
from tests.integration.test_launch_local import script
from tests.jobs import until

pytest.importorskip("tensorboardX")

pytestmark = [pytest.mark.slow]
SERVER = {"LAUNCH_TEST_SERVER": words(sys.executable, "-m", "kvstore.weights.servers"), "OMP_NUM_THREADS": "1"}
OBSERVED = os.path.join(ROOT, "tests", "observed.py")
FAILED = " failed, and the job goes on without: "
RAISES = ("odsgd.launch.supervisor:Overview:beats odsgd.launch.supervisor:Overview:ended "
          "odsgd.launch.supervisor:Overview:status odsgd.launch.supervisor:StatusFile:write "
          "odsgd.launch.view.console:Console:_show_bar")
TRACES = "worker-0.json", "worker-1.json", "server-0.json"


def said(launch: Launch) -> Dict[str, List[str]]:
    """Who has said that which observer failed."""
    found: Dict[str, List[str]] = {}
    for line in launch.errors:
        if FAILED in line:
            who, _, what = line.partition(FAILED)[0].replace(" | ", ": ", 1).rpartition("warning: ")
            found.setdefault(who.strip(": "), []).append(what)
    return {who: sorted(what) for who, what in found.items()}


def observed(fault: str, folder: Path, **more: str) -> Launch:
    env = {**SERVER, **more, "ODSGD_TRACE": str(folder / "trace")}
    return Launch("-n", 2, "-s", 1, sys.executable, OBSERVED, fault, folder / "board", env=env)


def ends_well(launch: Launch) -> None:
    assert launch.wait() == 0, str(launch)
    results = {line.partition(" | ")[2] for line in launch.output}
    assert len(launch.output) == 2 and len(results) == 1 and "trained, " in str(results), str(launch)


def test_a_job_goes_on_without_observers_that_raise(tmp_path: Path) -> None:
    with observed("raise", tmp_path, LAUNCH_TEST_RAISES=RAISES) as launch:
        ends_well(launch)
    assert said(launch) == {
        "": ["the console"],
        "odsgd launch": ["the file for `odsgd watch`", "the overview", "the status line"],
        "worker 0": ["TensorBoard's event file", "`broken` of the pulse", "the trace"],
        "worker 1": ["`broken` of the pulse", "the trace"]}, str(launch)


def test_a_job_goes_on_where_observers_find_no_room(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "server-0.json").symlink_to("/dev/full")
    with observed("full", tmp_path) as launch:
        takes_the_place_of_the_notice(launch, lambda path: path.symlink_to("/dev/full"))
        ends_well(launch)
    assert said(launch) == {
        "odsgd launch": ["the file for `odsgd watch`"],
        "server 0": ["the trace"],
        "worker 0": ["TensorBoard's event file", "`broken` of the pulse", "the trace"],
        "worker 1": ["`broken` of the pulse", "the trace"]}, str(launch)


def test_a_job_goes_on_where_nobody_reads_what_observers_write(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    readers = []
    for name in TRACES:
        os.mkfifo(tmp_path / "trace" / name)
        readers.append(os.open(tmp_path / "trace" / name, os.O_RDONLY | os.O_NONBLOCK))
    with observed("block", tmp_path) as launch:
        takes_the_place_of_the_notice(launch, os.mkfifo)
        ends_well(launch)
    for reader in readers:
        os.close(reader)
    assert said(launch) == {
        "odsgd launch": ["the file for `odsgd watch`"],
        "server 0": ["the trace"],
        "worker 0": ["TensorBoard's event file", "the trace"],
        "worker 1": ["the trace"]}, str(launch)


SPEAKS = """
for _ in range(3000):
    print("x" * 1000)
open(f"done-{os.environ['ODSGD_WORKER_RANK']}", "w").close()
"""
LEFT_OUT = "lines are left out here: nobody read them"


def have_done(folder: Path) -> None:
    until(lambda: all((folder / f"done-{rank}").exists() for rank in range(2)))


def test_a_job_goes_on_where_nobody_reads_its_output_and_says_later_what_is_left_out(tmp_path: Path) -> None:
    with Launch("-n", 2, "-s", 0, "--store", "none", script(tmp_path, SPEAKS), cwd=tmp_path, unread=True) as launch:
        have_done(tmp_path)
        assert launch.process.stdout
        with launch.process.stdout as stdout:
            text = stdout.read()
        assert launch.wait() == 0
    assert LEFT_OUT in text and text.endswith("\n"), text[-3000:]


def test_a_job_goes_on_where_its_terminal_is_stopped(tmp_path: Path) -> None:
    terminal, end = pty.openpty()
    termios.tcflow(end, termios.TCOOFF)  # as Ctrl-S does
    command = [sys.executable, launching.__file__, "-n", "2", "-s", "0", "--store", "none",
               script(tmp_path, SPEAKS)]
    with subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": ROOT}, stdin=subprocess.DEVNULL,
                          stdout=end, stderr=end) as process:
        have_done(tmp_path)
        termios.tcflow(end, termios.TCOON)
        os.close(end)
        shown = b""
        with contextlib.suppress(OSError):  # nobody writes any more
            while True:
                shown += os.read(terminal, 65536)
        assert process.wait(PATIENCE_S) == 0
    os.close(terminal)
    assert LEFT_OUT in shown.decode()


def test_a_job_goes_on_where_its_log_has_no_room(tmp_path: Path) -> None:
    command = [sys.executable, launching.__file__, "-n", "2", "-s", "0", "--store", "none", script(tmp_path, SPEAKS)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": ROOT}, stdin=subprocess.DEVNULL,
                              stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S)
    have_done(tmp_path)
    assert done.returncode == 0
    assert done.stderr == f"warning: standard output{FAILED}OSError: [Errno 28] No space left on device\n"


def test_a_job_goes_on_where_its_output_was_closed(tmp_path: Path) -> None:
    command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, launching.__file__, "-n", "2", "-s", "0",
               "--store", "none", script(tmp_path, SPEAKS)]
    assert subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": ROOT}, stdin=subprocess.DEVNULL,
                          timeout=PATIENCE_S).returncode == 0
    have_done(tmp_path)


def takes_the_place_of_the_notice(launch: Launch, make: Callable[[Path], None]) -> None:
    """What the launcher opens to write its next status file is this from now on."""
    draft = status_file.folder() / f"{launch.process.pid}.new"

    def made() -> bool:
        try:
            make(draft)
        except OSError:  # it writes just then, or has not begun to
            return False
        return True
    until(lambda: draft.with_suffix(".json").exists())
    until(made)
