"""Checkpoints for a training script of your own, as `odsgd train` writes them.

    store = kvstore.create("odsgd")
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)
    net(batch)                                                    # so that all parameters have their shapes
    keeper = checkpoint.keep(store, net, "runs/mine", every=100)  # goes on from the newest one there, if there is any
    for iteration in range(keeper.iteration, iterations):
        ...                                                       # the batch of this iteration is the script's affair
        trainer.step(batch_size)
        keeper.step()
    keeper.close()

With ``odsgd launch --max-restarts N`` such a script goes on by itself after a failure. All workers make the same calls.
"""
import contextlib
from pathlib import Path
from typing import Any, Dict, Optional, Tuple, Union

from kvstore.errors import ConfigError, shown
from kvstore.fronts.gluon.store import Store
from kvstore.job import environment
from kvstore.options import integer
from odsgd.training.checkpoint import disk, manifests, mirror, resuming
from odsgd.training.checkpoint.checkpoint import CheckpointWriter
from odsgd.training.checkpoint.mirror import CheckpointMirror


def latest(folder: Union[str, Path]) -> int:
    """The iteration of the newest complete checkpoint in `folder` on this host; 0 if there is none."""
    return max(manifests.complete(Path(folder)), default=0)


def keep(store: Store, net: Any, folder: Union[str, Path], every: int, kept: int = 3,
         to: Optional[str] = None, newest: Optional[int] = None) -> "CheckpointKeeper":
    """Write a checkpoint after `every` iterations, and keep the last `kept`. Collective, before the first step.

    `to`: a second place for them, a folder or ``HOST:FOLDER``; newer ones there than in `folder` are fetched back.

    All parameters of `net` have shapes and values, and are dense. If there is a checkpoint, the script goes on from it:
    `net`, the store and the optimizer's state are as they were after that iteration. If there are as many workers, a
    Trainer without lr_scheduler, made before, has the rate of that iteration; set another after this call. Until
    `close` another job that asks for the folder is refused. A script with several networks gives each a folder.
    `newest`: the iteration at which another network's keeper began; later checkpoints are passed over, such as a
    failure between the checkpoints of two networks leaves.
    """
    try:
        every, kept = map(integer(at_least=1).convert, (every, kept))
    except (ValueError, TypeError):
        raise ConfigError(f"every {shown(every)}, kept {shown(kept)}: expected whole numbers of at least 1") from None
    if not hasattr(net, "collect_params"):
        raise ConfigError(f"checkpoint.keep is for networks of Gluon, and this is a {type(net).__name__}; a script of "
                          "PyTorch's saves optimizer.state_dict() on every worker (docs/how-to/pytorch.md)")
    if not isinstance(store, Store):
        raise ConfigError(f"checkpoint.keep: the store is a {type(store).__name__}; expected one made by "
                          "kvstore.create, which the trainer has, too")
    if store.options.uneven == "join":
        raise ConfigError('checkpoint.keep of a store with uneven="join": its workers do not come to a checkpoint in '
                          "the same iteration; give all as many batches, and leave uneven out")
    for name, parameter in net.collect_params().items():
        if parameter._stype != "default":
            raise ConfigError(f"checkpoint.keep: {name} is {parameter._stype}, and only dense weights can be kept")
        if parameter._data is None:
            raise ConfigError(f"checkpoint.keep: {name} has no shape or value yet; initialize the network and run one "
                              "batch through it first")
    return CheckpointKeeper(store, net, Path(folder), every, kept, mirror.mirror_at(to), newest)


_kept: Dict[Tuple[Path, int], int] = {}
"""By folder and worker: the iteration that an open keeper of this process began at."""


class CheckpointKeeper:
    """Writes one script's checkpoints. Files are written while the training goes on.

    A worker that has joined the running job has no part in them: its state is the servers'.
    """

    def __init__(self, store: Store, net: Any, folder: Path, every: int, kept: int,
                 second: Optional[CheckpointMirror], newest: Optional[int]) -> None:
        self._store, self._net, self._every = store, net, every
        self._writer = CheckpointWriter(folder, store, net, kept, self._warn, second)
        self.iteration = environment.joined_at()
        """Iterations done."""
        place = folder.resolve(), store.rank
        if place in _kept:  # each would write over what the other has written
            raise ConfigError(f"checkpoint.keep: `{place[0]}` is this script's for another network already; give each "
                              "its own folder, or close that keeper first")
        with contextlib.ExitStack() as held:
            _kept[place] = 0
            held.callback(_kept.pop, place)
            held.enter_context(disk.held(folder, store.rank))
            held.enter_context(mirror.held(second, store.rank))
            if not environment.joined():
                self._resume(folder, second, newest)
                self._compare(folder)
            self._held = held.pop_all()

    def _resume(self, folder: Path, second: Optional[CheckpointMirror], newest: Optional[int]) -> None:
        manifest, warnings = resuming.resume(folder, self._store, self._net, self._check, second, newest=newest)
        for line in warnings:
            self._warn(line)
        if manifest:
            self.iteration = self._writer.whole = manifest["iteration"]
            resumed = f"resumed from {folder / str(self.iteration)}{self._resume_rate()}"
            if self._store.rank == 0:
                print(resumed, flush=True)

    def _compare(self, folder: Path) -> None:
        """Warn if another keeper of this worker has begun at another iteration."""
        _kept[folder.resolve(), self._store.rank] = self.iteration
        for (other, worker_rank), iteration in list(_kept.items()):  # other threads have theirs
            if worker_rank == self._store.rank and iteration != self.iteration:
                self._warn(f"`{folder}` goes on from iteration {self.iteration}, and `{other}`, another network of "
                           f"this script, from {iteration}; where one loop trains both, let keep have newest= for the "
                           "later one (docs/how-to/checkpoints.md)")

    def _resume_rate(self) -> str:
        """Give a trainer without a schedule the rate of the last step; text if it had another.

        The rate is unknown where another number of workers has saved.
        """
        lr = self._store.session.step.lr
        trainers = (one._trainer for one in self._net.collect_params().values())
        trainer = next((one for one in trainers if one and one._kvstore_params["kvstore"] is self._store), None)
        if not lr or trainer is None or trainer.optimizer.lr_scheduler or trainer.learning_rate == lr:
            return ""
        had = trainer.learning_rate
        trainer.set_learning_rate(lr)
        return f", at its learning rate of {lr:g} (the trainer had {had:g})"

    def step(self) -> None:
        """After each ``trainer.step``. Every now and then collective."""
        self.iteration += 1
        self._writer.advance(self.iteration)
        if self.iteration % self._every == 0 and not environment.joined():
            self._writer.begin({})

    def close(self) -> None:
        """Wait until the last checkpoint is complete, and in the second place, if there is one. Collective.

        From here on another job may have the folder.
        """
        with self._held:
            self._writer.close()

    def _warn(self, line: str) -> None:
        if self._store.leads:
            print(f"warning: {line}", flush=True)

    def _check(self, manifest: Dict[str, Any]) -> None:
        now = {} if environment.most_workers() else {"num_workers": self._store.num_workers}
        manifests.check_facts(manifest, now, [])
        manifests.check_model(manifest, self._net)
