"""The checkpoints of a run that trains meanwhile."""
from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Collection, Mapping, Optional

from kvstore.fronts.gluon.store import Store
from odsgd.training.checkpoint.checkpoint import UnfinishedCheckpoint, copies_within_s
from odsgd.training.checkpoint.mirror import CheckpointMirror


class CheckpointWriter:
    """Writes one checkpoint at a time. All workers make the same calls after the same iterations; they are collective.

    `keep`: how many stay; `warn`: called with each line that the user should read.
    """

    def __init__(self, folder: Path, store: Store, net: Any, keep: int, warn: Callable[[str], None],
                 mirror: Optional[CheckpointMirror], frozen: Collection[str] = ()) -> None:
        self._folder, self._store, self._net, self._keep, self._warn = folder, store, net, keep, warn
        self._mirror, self._frozen = mirror, frozen
        self._unfinished: Optional[UnfinishedCheckpoint] = None

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Copy the state of this iteration. Its files are written while the training goes on, and count later."""
        self.finish()
        self._unfinished = UnfinishedCheckpoint(self._folder, self._store, self._net, facts, self._keep, self._frozen,
                                                self._mirror)

    def advance(self, iteration: int) -> None:
        """After each iteration: fetch some more, or make the checkpoint count if it is time."""
        if self._unfinished is not None and self._unfinished.advance(iteration):
            self.finish()

    def finish(self) -> None:
        """Make the last checkpoint count, if it does not yet."""
        if self._unfinished is not None:
            unfinished, self._unfinished = self._unfinished, None
            for line in unfinished.finish():
                self._warn(line)

    def close(self) -> None:
        """Wait until the last checkpoint is complete, and in the second place, if there is one."""
        self.finish()
        if self._mirror is not None:
            for line in self._mirror.failures(copies_within_s(self._store)):
                self._warn(line)
