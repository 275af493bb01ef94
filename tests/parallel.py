"""How several processes share the tests (pytest-xdist): in units whose tests have a fixture or a job in common."""
import re
from typing import Any, Dict, Optional

from xdist.scheduler import LoadScopeScheduling


def unit_of(nodeid: str) -> str:
    """A file; of the contract suite, all with one number of workers: a process starts each of its jobs once."""
    workers = re.search(r"(?:in process |virtual |ps-lite |sockets |MPI |\[)([123])", nodeid)
    if nodeid.startswith("tests/contract/") and workers:
        return f"contract of {workers[1]}"
    return nodeid.partition("::")[0]


class Units(LoadScopeScheduling):
    """Units are handed out in the order of collection: the jobs of real processes first, which take longest."""

    def __init__(self, config: Any, log: Any) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)

    def remove_node(self, node: Any) -> Optional[str]:
        """Called when a process has died: the test that it died of has failed, and is not run again."""
        left: Dict[str, Dict[str, bool]] = {}
        for unit, tests in self.assigned_work[node].items():
            waiting = {nodeid: False for nodeid, done in tests.items() if not done}
            if waiting:
                left[unit] = waiting
        crashed = next((nodeid for tests in left.values() for nodeid in tests), None)
        if crashed is not None:
            tests = left[unit_of(crashed)]
            del tests[crashed]
            if not tests:
                del left[unit_of(crashed)]
        self.assigned_work[node] = left
        super().remove_node(node)
        return crashed
