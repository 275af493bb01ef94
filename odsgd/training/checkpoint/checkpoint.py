"""Checkpoints: all it takes to go on as if nothing had happened, as arrays and JSON.

docs/reference/run-folder.md lists the files. The manifest is what makes a checkpoint: a folder without one does not
count. Every file is written under a temporary name, flushed to disk and renamed; the manifest comes last, after every
worker has said what its file contains. In order, as `UnfinishedCheckpoint` has it:

    1. worker 0 takes away the manifest of an earlier attempt at this iteration, here and in the second place; all wait
       for that, and make no copies if it could not be done there
    2. every worker copies what it keeps; from here on they may train
    3. beside that a thread writes worker-M.npz; on worker 0 also servers.npz and weights.params
       meanwhile worker 0 fetches the servers' state of step 2, a few pieces after each iteration
    4. some iterations later all workers exchange the digests of their files
    5. worker 0 writes manifest.json, then says which checkpoints are kept; everyone removes the others, manifest first

A checkpoint that turns out to be damaged gives way to the one before it, with a warning (resuming.py).

Hosts. A worker's part lies under the same path on its own host, whether or not hosts share a file system. Manifest,
servers.npz and weights.params are on worker 0's; it decides what is resumed and tells the others what to expect.
"""
import json
import threading
from concurrent import futures
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

import numpy as np

from kvstore.errors import ConfigError, RoundTimeoutError, shown
from kvstore.fronts.gluon.store import Store
from kvstore.job import agreement, environment
from kvstore.job.pulse import pulse
from kvstore.job.report import report
from kvstore.messages.seam import Export
from kvstore.session import saving
from kvstore.state.npz import write_npz
from odsgd.training.checkpoint import manifests, weights
from odsgd.training.checkpoint.disk import make_folder, remove_for_good, replacing
from odsgd.training.checkpoint.mirror import CheckpointMirror, MirrorError

FETCHED_WITHIN = 10
"""Iterations in which the servers' state is fetched, beside the training."""
WRITTEN_WITHIN = 20
"""Iterations after which a checkpoint is waited for: workers can agree that it is complete at a fixed one only."""


def copies_within_s(store: Store) -> float:
    """How long the end of a checkpoint waits for its copies, while the others wait, too: well below their deadline."""
    return min(60.0, store.session.timeout_s / 2)


class UnfinishedCheckpoint:
    """The checkpoint of this iteration, while it is being written. Collective; returns when a worker's own state is
    copied and the servers have laid theirs aside.

    All workers call `advance` after each iteration, and `finish` after the same; until then the checkpoint does not
    count.
    """

    @pulse.doing("checkpoint")
    def __init__(self, root: Path, store: Store, net: Any, facts: Mapping[str, Any], keep: int,
                 second: Optional[CheckpointMirror] = None, whole: int = 0, spare: Sequence[int] = ()) -> None:
        self.whole = whole
        """The last checkpoint that is sure to have the parts of all workers, which all of them keep; 0: none."""
        self._root, self._store, self._keep, self._second = root, store, keep, second
        self._copies: List[futures.Future[None]] = []
        self.is_late = False
        """Whether copies were missing when it finished; they may come."""
        self.iteration = store.iteration
        self._folder = root / str(store.iteration)
        self._facts = {**facts, "schema": manifests.SCHEMA, "versions": manifests.versions(),
                       "iteration": store.iteration, "left_out": store.session.left_out, "since": store.session.since,
                       "num_workers": store.num_workers, "spare": list(spare), "parameters": manifests.describe(net)}
        self._leads = store.leads
        self._files: Dict[str, manifests.Digest] = {}
        self._error: Optional[BaseException] = None
        new = self._leads and not self._folder.is_dir()
        if self._leads:  # step 1: an earlier checkpoint of this number counts no more
            remove_for_good(self._folder / manifests.MANIFEST)
        store.barrier()
        make_folder(self._folder)
        self._uncopied = "" if second is None else _from_leader(store, lambda: "" if new else self._uncount_copy())
        writes: Dict[str, Callable[[Path], None]] = {}
        arrays, meta = store.worker_state()  # step 2
        arrays.update({f"frozen/{name}": parameter.list_data()[0].asnumpy()  # what the store does not know
                       for name, parameter in net.collect_params().items()
                       if arrays.keys().isdisjoint({f"local/{name}", f"aux/0/{name}"})})
        writes[manifests.worker_file(store.rank)] = lambda path: write_arrays(path, arrays, meta)
        with store.global_weights():
            shared = weights.copied(net) if self._leads else {}
        export = store.exporting() if self._leads or store.state_is_shared else Export({})
        store.go_on_after(export)
        self._export, self._arrived = export, threading.Event()  # step 3
        self._each = -(-export.left // FETCHED_WITHIN)
        self._fetch(0)
        if self._leads:
            writes[manifests.WEIGHTS] = lambda path: weights.write(path, shared)
            writes[manifests.SERVERS] = self._write_servers
        self._thread = threading.Thread(target=self._write, args=(writes,), name="odsgd-checkpoint", daemon=True)
        self._thread.start()

    def _write(self, writes: Mapping[str, Callable[[Path], None]]) -> None:
        try:
            for name, write in writes.items():
                write(self._folder / name)
                self._files[name] = manifests.digest(self._folder / name)
                self._copy(name)
        except BaseException as error:  # raised where the run waits for it
            self._error = error

    def _write_servers(self, path: Path) -> None:
        self._arrived.wait()
        write_arrays(path, *saving.server_state(self._store.session, self._export.state()))

    def advance(self, iteration: int) -> bool:
        """Fetch some of the servers' state; whether the checkpoint is to be finished after this iteration."""
        self._fetch(self._each)
        return iteration >= self.iteration + WRITTEN_WITHIN

    def _fetch(self, most: int) -> None:
        for _ in range(min(most, self._export.left)):
            self._export.fetch()
        if not self._export.left:
            self._arrived.set()

    def _copy(self, name: str) -> None:
        """Begin to copy a file to the second place, if there is one."""
        if self._second is not None and not self._uncopied:
            self._copies.append(self._second.later(self._second.put, self._folder / name, self.iteration))

    @pulse.doing("checkpoint")
    def finish(self) -> List[str]:
        """Wait for the files, and make the checkpoint count; what to warn of. Collective."""
        store = self._store
        self._fetch(self._export.left)
        within_s = store.session.timeout_s
        self._thread.join(min(within_s, threading.TIMEOUT_MAX))
        if self._thread.is_alive():
            raise RoundTimeoutError(f"checkpoint {self.iteration} was not written to `{shown(self._folder)}` within "
                                    f"{within_s:g} s: its disk is very slow, or gone. Check it, or raise `timeout_s`")
        if self._error is not None:
            raise self._error
        mine = json.dumps(self._files[manifests.worker_file(store.rank)])
        texts = agreement.gather_texts(store.session.transport, mine)  # step 4; a worker that the job has lost has none
        self._files.update({manifests.worker_file(rank): json.loads(text) for rank, text in enumerate(texts) if text})
        if self._leads:  # step 5
            manifest = {**self._facts, "files": self._files}
            manifests.write_manifest(self._folder, manifest)
            if manifests.is_whole(manifest):
                self.whole = self.iteration
                report("saved", iteration=self.iteration, folder=str(self._root))
        uncopied = self._missing_copies()
        kept, self.whole = _from_leader(store, lambda: (_worth_keeping(self._root, self._keep, self.whole), self.whole))
        _retire(self._root, kept, self.iteration)
        if not self._leads or self._second is None:
            return uncopied
        earlier = self._second.failures()
        if not uncopied:
            self._count_copy()
        if not self._uncopied:
            self._second.aside(_retire_copies, self._second, kept, self.iteration, self.whole, self._keep)
        return [*earlier, *uncopied]

    def settle(self, within_s: float = 0.0) -> None:
        """Let a copy count that was late when this finished. Collective."""
        told = agreement.gather_texts(self._store.session.transport, _failure(self._copies, within_s))
        if self._leads and not any(told):
            self._count_copy()

    def _count_copy(self) -> None:
        assert self._second is not None
        names = [manifests.worker_file(self._store.rank), manifests.WEIGHTS, manifests.SERVERS]
        self._second.aside(_put_manifest, self._second, self._folder, names)

    def _uncount_copy(self) -> str:
        """Remove the manifest of this number from the second place; returns why it may still be there, or ""."""
        assert self._second is not None
        removed = self._second.later(self._second.uncount, self.iteration)
        return _failure([removed], copies_within_s(self._store))

    def _missing_copies(self) -> List[str]:
        """Wait a while for the copies; returns why some are missing. Collective."""
        line = f"checkpoint {self.iteration} is not in the second place: "
        if self._second is None or self._uncopied:
            return [f"{line}an earlier one could not be removed there: {self._uncopied}"] if self._uncopied else []
        within_s = copies_within_s(self._store)
        told = agreement.gather_texts(self._store.session.transport, _failure(self._copies, within_s))
        self.is_late = any(told)
        return [f"{line}worker {rank} could not copy its part: {why}" for rank, why in enumerate(told) if why]


class CheckpointWriter:
    """Writes one checkpoint at a time. All workers make the same calls after the same iterations; they are collective.

    `keep`: how many stay; `warn`: called with each line that the user should read.
    """

    def __init__(self, folder: Path, store: Store, net: Any, keep: int, warn: Callable[[str], None],
                 mirror: Optional[CheckpointMirror]) -> None:
        self._folder, self._store, self._net, self._keep, self._warn = folder, store, net, keep, warn
        self._mirror, self._spare = mirror, sorted(environment.lost_workers())  # of now: they have never begun
        self._unfinished: Optional[UnfinishedCheckpoint] = None
        self._late: Optional[UnfinishedCheckpoint] = None
        self.whole = 0
        """The last checkpoint that can be resumed, or the one that the run goes on from; 0: none."""

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Copy the state of this iteration. Its files are written while the training goes on, and count later."""
        self.finish()
        self._unfinished = UnfinishedCheckpoint(self._folder, self._store, self._net, facts, self._keep, self._mirror,
                                                self.whole, self._spare)

    def advance(self, iteration: int) -> None:
        """After each iteration: fetch some more, or make the checkpoint count if it is time."""
        if self._unfinished is not None and self._unfinished.advance(iteration):
            self.finish()

    def finish(self) -> None:
        """Make the last checkpoint count, if it does not yet."""
        if self._unfinished is not None:
            unfinished, self._unfinished = self._unfinished, None
            self._settle()
            for line in unfinished.finish():
                self._warn(line)
            self.whole = unfinished.whole
            self._late = unfinished if unfinished.is_late else None

    def close(self) -> None:
        """Wait until the last checkpoint is complete, and in the second place, if there is one."""
        self.finish()
        self._settle(copies_within_s(self._store))
        if self._mirror is not None:
            for line in self._mirror.failures(copies_within_s(self._store)):
                self._warn(line)

    def _settle(self, within_s: float = 0.0) -> None:
        """If copies of the last checkpoint were late, perhaps they are there now. Collective."""
        late, self._late = self._late, None
        if late is not None:
            late.settle(within_s)


def _failure(calls: List["futures.Future[None]"], within_s: float) -> str:
    """Wait at most `within_s` for these calls; returns why one has failed or is not done, or ""."""
    futures.wait(calls, within_s)
    late = f"not done within {within_s:g} s"
    errors = [call.exception() if call.done() else late for call in calls]
    return next((shown(str(error) or repr(error)) for error in errors if error is not None), "")


def write_arrays(path: Path, arrays: Dict[str, np.ndarray], meta: Dict[str, Any]) -> None:
    """An .npz of `arrays` and, as bytes of JSON, `meta`."""
    with replacing(path) as temporary, open(temporary, "wb") as file:
        write_npz(file, arrays, meta)


def _worth_keeping(root: Path, keep: int, whole: int) -> List[int]:
    """The last `keep` checkpoints, and the last that can be resumed: after the loss of a worker none can.

    That is `whole`, or a later one here. The manifest of `whole` may be lost with the host of the worker that led.
    """
    def can_be_resumed(iteration: int) -> bool:
        try:
            return manifests.is_whole(manifests.read_manifest(root / str(iteration)))
        except ConfigError:
            return False

    iterations = manifests.complete(root)
    return sorted({*iterations[-keep:], *list(filter(can_be_resumed, iterations))[-1:], whole})


def _retire(root: Path, kept: List[int], iteration: int) -> None:
    """Remove what is older than `iteration` and not kept.

    Never newer: a worker that is slow here must not take away what a faster one has begun to write. Several workers
    may be at it in one folder.
    """
    for folder in manifests.numbered(root):
        if int(folder.name) < iteration and int(folder.name) not in kept:
            manifests.remove(folder)


def _put_manifest(second: CheckpointMirror, folder: Path, names: Sequence[str]) -> None:
    """Let a copy count, unless that place has lost these files of it meanwhile."""
    gone = [name for name in names if int(folder.name) not in second.holds(name)]
    if gone:
        raise MirrorError(f"checkpoint {folder.name} does not count there, since {', '.join(gone)} went missing after "
                          "it was copied; is that disk still there?")
    second.put(folder / manifests.MANIFEST, int(folder.name))


def _retire_copies(second: CheckpointMirror, kept: List[int], iteration: int, whole: int, keep: int) -> None:
    """Remove the same from the second place, and folders there that never became a checkpoint.

    Not all that are kept may have been copied: the last `keep` of the copies stay, and the last of `whole` or before.
    """
    copies = second.holds(manifests.MANIFEST)
    stay = {*kept, *copies[-keep:], *[old for old in copies if old <= whole][-1:]}
    for old in second.holds():
        if old < iteration and old not in stay:
            second.remove(old)


def _from_leader(store: Store, value: Callable[[], Any]) -> Any:
    """The `value` of worker 0, or of the first that is left, which is JSON, on every worker. Collective; waits.

    A worker that is lost leaves its part out of a sum, perhaps only of the second one: then they ask again.
    """
    while True:
        mine = json.dumps(value()).encode() if store.leads else b""
        told = agreement.from_one(store.session.transport, mine).strip(b"\0")
        if told:
            return json.loads(told)
