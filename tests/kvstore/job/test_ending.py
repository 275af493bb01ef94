"""Whether a script has failed, as it is known when the process ends."""
import subprocess
import sys

import pytest

SCRIPT = """
import atexit, sys
from kvstore.job import ending
ending.follow()
ending.follow()
atexit.register(lambda: print("failed" if ending.failed() else "well"))
def main():
    {}
main()
"""
WELL = ["pass", "sys.exit()", "sys.exit(0)", "sys.exit(None)", "raise SystemExit", "raise SystemExit(0)", "exit(0)"]
CAUGHT = "try: sys.exit(2)\n    except SystemExit: pass"
FAILED = ["sys.exit('bad data')", "sys.exit(3)", "raise SystemExit('bad data')", "exit(1)", "1 / 0",
          "print('no data', file=sys.stderr)\n    raise SystemExit('bad data')"]


@pytest.mark.parametrize("last, told", [*((last, "well") for last in [*WELL, CAUGHT]),
                                        *((last, "failed") for last in FAILED)])
def test_a_script_has_failed_unless_it_came_to_its_end_or_says_so_itself(last: str, told: str) -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT.format(last)], capture_output=True, text=True, timeout=300)
    assert ended.stdout == f"{told}\n"


@pytest.mark.parametrize("main, told", [
    ("return 0", "well"), ("return None", "well"), ("return 'bad data'", "failed"), ("1 / 0", "failed"),
    ("sys.exit(3)", "failed"), (CAUGHT, "well"), ("print('a warning', file=sys.stderr)\n    return 0", "well")])
def test_a_script_may_end_by_raising_the_status_of_its_main_function(main: str, told: str) -> None:
    script = SCRIPT.format(main).replace("\nmain()\n", "\nraise SystemExit(main())\n")
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert ended.stdout == f"{told}\n"
