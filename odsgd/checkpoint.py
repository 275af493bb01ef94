"""Checkpoints for a training script of your own, as `odsgd train` writes them.

    store = kvstore.create("odsgd")
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)
    keeper = checkpoint.keep(store, net, "runs/mine", every=100)  # goes on from the newest one there, if there is any
    for iteration in range(keeper.iteration, iterations):
        ...                                                       # the batch of this iteration is the script's affair
        trainer.step(batch_size)
        keeper.step()
    keeper.close()

With ``odsgd launch --max-restarts N`` such a script goes on by itself after a failure. All workers make the same calls.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Optional, Union

from kvstore.errors import ConfigError
from kvstore.gluon.store import Store
from odsgd.training import checkpoint


def latest(folder: Union[str, Path]) -> int:
    """The iteration of the newest complete checkpoint in `folder` on this host; 0 if there is none."""
    return max(checkpoint.complete(Path(folder)), default=0)


def keep(store: Store, net: Any, folder: Union[str, Path], every: int, kept: int = 3) -> Keeper:
    """Write a checkpoint after `every` iterations, and keep the last `kept`. Collective, before the first step.

    All parameters of `net` are initialized. If `folder` holds a checkpoint it is gone on from: `net`, the store and the
    optimizer's state are as they were after that iteration.
    """
    if every < 1 or kept < 1:
        raise ConfigError(f"every {every}, kept {kept}: expected whole numbers of at least 1")
    return Keeper(store, net, Path(folder), every, kept)


class Keeper:
    """Writes one script's checkpoints. Files are written while the training goes on."""

    def __init__(self, store: Store, net: Any, folder: Path, every: int, kept: int) -> None:
        self._store, self._net, self._folder, self._every, self._kept = store, net, folder, every, kept
        self._draft: Optional[checkpoint.Draft] = None
        self.iteration = 0
        """Iterations done."""
        if checkpoint.from_worker_0(store, latest(folder)):
            found, warnings = checkpoint.resume(folder, store, net, self._check)
            self.iteration = int(found.name)
            if store.rank == 0:
                print("\n".join([*(f"warning: {line}" for line in warnings), f"resumed from {found}"]), flush=True)

    def step(self) -> None:
        """After each ``trainer.step``. Every now and then collective."""
        self.iteration += 1
        if self._draft is not None and self._draft.advance(self.iteration):
            self.close()
        if self.iteration % self._every == 0:
            self.close()
            self._draft = checkpoint.Draft(self._folder, self._store, self._net, {}, self._kept)

    def close(self) -> None:
        """Wait until the last checkpoint is complete. Collective."""
        if self._draft is not None:
            draft, self._draft = self._draft, None
            draft.finish()

    def _check(self, manifest: Dict[str, Any]) -> None:
        checkpoint.check_facts(manifest, {"num_workers": self._store.num_workers}, [])
        checkpoint.check_model(manifest, self._net)
