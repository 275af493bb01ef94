"""Workers in one process whose exchanges arrive in an order that a test gives."""
import collections
from typing import Any, Iterable, List, Optional

from kvstore.options import DEFAULT_TIMEOUT_S
from kvstore.transports.in_process import Stage
from kvstore.transports.turns import LateAnswer


class ScriptedStage(Stage):
    """`order`: worker ranks, one per exchange, in the order in which exchanges reach the servers; None: as they come.

        stage = ScriptedStage(2, order=[0, 1, 1, 0])        # round 0: worker 0, then 1; round 1: worker 1, then 0
    """

    def __init__(self, num_workers: int, order: Optional[Iterable[int]], timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        super().__init__(num_workers, timeout_s)
        self._order = None if order is None else collections.deque(order)
        self.log: List[int] = []  # worker ranks in the order of their exchanges

    def push(self, worker_rank: int, *message: Any) -> LateAnswer:
        order = self._order
        if order is not None:
            self.wait_until(lambda: bool(order) and order[0] == worker_rank, f"worker {worker_rank}'s turn")
            order.popleft()
        self.log.append(worker_rank)
        return super().push(worker_rank, *message)
