"""Checkpoints: all it takes to go on as if nothing had happened, as arrays and JSON.

docs/reference/run-folder.md lists the files. The manifest is what makes a checkpoint: a folder without one does not
count. Every file is written under a temporary name, flushed to disk and renamed; the manifest comes last, after every
worker has said what its file contains. In order:

    1. worker 0 takes away the manifest of an earlier attempt at this iteration, all wait for that
    2. every worker copies what it keeps; from here on they may train
    3. beside that a thread writes worker-M.npz; on worker 0 also servers.npz and weights.params
       meanwhile worker 0 fetches the servers' state, which is that of step 2, a few pieces after each iteration
    4. some iterations later all workers exchange the digests of their files
    5. worker 0 writes manifest.json, then says which checkpoints are kept; everyone removes the others, manifest first

A checkpoint that turns out to be damaged gives way to the one before it, with a warning (`resume`).

Hosts. A worker's part lies under the same path on its own host, whether or not hosts share a file system. Manifest,
servers.npz and weights.params are on worker 0's; it decides what is resumed and tells the others what to expect.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import re
import shutil
import socket
import threading
from concurrent import futures
from pathlib import Path
from typing import Any, Callable, Collection, Dict, List, Mapping, Optional, Tuple

import numpy as np

from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError, RoundTimeoutError, shown
from kvstore.fronts.gluon.store import Store
from kvstore.job import agreement, environment
from kvstore.job.pulse import pulse
from kvstore.job.report import report
from kvstore.messages.seam import Export
from kvstore.session import saving
from kvstore.state.npz import read_npz, write_npz
from odsgd import __version__
from odsgd.config.files import read_text
from odsgd.training.checkpoint import weights
from odsgd.training.checkpoint.disk import flush_folder, replacing
from odsgd.training.checkpoint.mirror import CheckpointMirror, MirrorError

SCHEMA = 3
"""Grows when what is kept of a run changes its form. A checkpoint of another schema is refused, not guessed at: the
arrays of schema 1 had numbers where they have names now, which an option could change the meaning of; runs of schema 2
had other update rules (`easgd`, `downpour`, `gamma_p`, `poly`).
"""
MANIFEST, SERVERS, WEIGHTS = "manifest.json", "servers.npz", "weights.params"

MOST_MANIFEST_NBYTES = 1 << 24
FETCHED_WITHIN = 10
"""Iterations in which the servers' state is fetched, beside the training."""
WRITTEN_WITHIN = 20
"""Iterations after which a checkpoint is waited for: workers can agree that it is complete at a fixed one only."""

Digest = Dict[str, Any]


class DamagedError(ConfigError):
    """A checkpoint that is not what was written; the one before it may serve."""


def worker_file(worker_rank: int) -> str:
    """Name of one worker's part."""
    return f"worker-{worker_rank}.npz"


# --- writing ----------------------------------------------------------------------------------------------------------

def save(root: Path, store: Store, net: Any, facts: Mapping[str, Any], keep: int, frozen: Collection[str] = (),
         second: Optional[CheckpointMirror] = None) -> List[str]:
    """Write the checkpoint of this iteration; `facts` join the manifest. Collective; waits until it is complete.

    `frozen`: names of parameters that the store knows nothing of. `second`: where it is copied to. Returns what to warn
    of.
    """
    return UnfinishedCheckpoint(root, store, net, facts, keep, frozen, second).finish()


def copies_within_s(store: Store) -> float:
    """How long the end of a checkpoint waits for its copies, while the others wait, too: well below their deadline."""
    return min(60.0, store.session.timeout_s / 2)


class UnfinishedCheckpoint:
    """The checkpoint of this iteration, while it is being written. Collective; returns when a worker's own state is
    copied, and that of the servers laid aside.

    All workers call `advance` after each iteration, and `finish` after the same; until then the checkpoint does not
    count.
    """

    @pulse.doing("checkpoint")
    def __init__(self, root: Path, store: Store, net: Any, facts: Mapping[str, Any], keep: int,
                 frozen: Collection[str] = (), second: Optional[CheckpointMirror] = None) -> None:
        self._root, self._store, self._keep, self._second = root, store, keep, second
        self._copies: List[futures.Future[None]] = []
        self.iteration = store.iteration
        self._folder = root / str(store.iteration)
        self._facts = {**facts, "schema": SCHEMA, "iteration": store.iteration, "num_workers": store.num_workers,
                       "parameters": describe(net)}
        self._leads = store.leads
        self._files: Dict[str, Digest] = {}
        self._error: Optional[BaseException] = None
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._leads:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self._folder / MANIFEST)
        store.barrier()
        writes: Dict[str, Callable[[Path], None]] = {}
        (arrays, meta), parameters = store.worker_state(), net.collect_params()
        arrays.update({f"frozen/{name}": parameters[name].list_data()[0].asnumpy() for name in frozen})
        writes[worker_file(store.rank)] = lambda path: write_arrays(path, arrays, meta)
        with store.global_weights():
            shared = weights.copied(net) if self._leads else {}
        export = store.exporting() if self._leads or store.state_is_shared else Export({})
        self._export, self._arrived = export, threading.Event()
        self._each = -(-export.left // FETCHED_WITHIN)
        self._fetch(0)
        if self._leads:
            writes[WEIGHTS] = lambda path: weights.write(path, shared)
            writes[SERVERS] = self._write_servers
        self._thread = threading.Thread(target=self._write, args=(writes,), name="odsgd-checkpoint", daemon=True)
        self._thread.start()

    def _write(self, writes: Mapping[str, Callable[[Path], None]]) -> None:
        try:
            for name, write in writes.items():
                write(self._folder / name)
                self._files[name] = digest(self._folder / name)
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
        if self._second is not None:
            put = functools.partial(self._second.put, self._folder / name, self.iteration)
            self._copies.append(self._second.later(put))

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
        self._files.update(_gather_digests(store, self._files[worker_file(store.rank)]))
        if self._leads:
            write_manifest(self._folder, {**self._facts, "files": self._files})
            if _is_whole({**self._facts, "files": self._files}):
                report("saved", iteration=self.iteration)
        uncopied = [] if self._second is None else self._uncopied()
        kept = _from_leader(store, lambda: _worth_keeping(self._root, self._keep))
        _retire(self._root, kept, self.iteration)
        if not self._leads or self._second is None:
            return uncopied
        earlier = self._second.failures()
        if not uncopied:
            self._second.aside(functools.partial(self._second.put, self._folder / MANIFEST, self.iteration))
            self._second.aside(functools.partial(_retire_copies, self._second, kept, self.iteration))
        return [*earlier, *uncopied]

    def _uncopied(self) -> List[str]:
        """Wait a while for the copies; why some are missing. Collective."""
        within_s = copies_within_s(self._store)
        futures.wait(self._copies, within_s)
        late = f"not done within {within_s:g} s"
        errors = [copy.exception() if copy.done() else late for copy in self._copies]
        mine = next((str(error) for error in errors if error is not None), "")
        told = agreement.gather_texts(self._store.session.transport, shown(mine))
        return [f"checkpoint {self.iteration} is not in the second place: worker {rank} could not copy its part: {why}"
                for rank, why in enumerate(told) if why]


def write_arrays(path: Path, arrays: Dict[str, np.ndarray], meta: Dict[str, Any]) -> None:
    """An .npz of `arrays` and, as bytes of JSON, `meta`."""
    with replacing(path) as temporary, open(temporary, "wb") as file:
        write_npz(file, arrays, meta)


def write_manifest(folder: Path, manifest: Dict[str, Any]) -> None:
    """From here on the checkpoint counts."""
    with replacing(folder / MANIFEST) as temporary:
        temporary.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    flush_folder(folder.parent)


def _worth_keeping(root: Path, keep: int) -> List[int]:
    """The last `keep` checkpoints, and the last that can be resumed: after the loss of a worker none can."""
    def can_be_resumed(iteration: int) -> bool:
        try:
            return _is_whole(read_manifest(root / str(iteration)))
        except ConfigError:
            return False

    iterations = complete(root)
    return sorted({*iterations[-keep:], *list(filter(can_be_resumed, iterations))[-1:]})


def _is_whole(manifest: Mapping[str, Any]) -> bool:
    """Whether it has the parts of all workers."""
    return all(worker_file(rank) in manifest["files"] for rank in range(manifest["num_workers"]))


def _retire(root: Path, kept: List[int], iteration: int) -> None:
    """Remove what is older than `iteration` and not kept.

    Never newer: a worker that is slow here must not take away what a faster one has begun to write. Several workers
    may be at it in one folder. The manifest goes first, and for good, so that half a folder never counts.
    """
    for folder in _numbered(root):
        if int(folder.name) < iteration and int(folder.name) not in kept:
            with contextlib.suppress(FileNotFoundError):
                os.remove(folder / MANIFEST)
                flush_folder(folder)
            shutil.rmtree(folder, ignore_errors=True)


def _retire_copies(second: CheckpointMirror, kept: List[int], iteration: int) -> None:
    """The same there: also what has never become a checkpoint."""
    for old in second.iterations():
        if old < iteration and old not in kept:
            second.remove(old, first=MANIFEST)


# --- finding and checking ---------------------------------------------------------------------------------------------

def complete(root: Path) -> List[int]:
    """Iterations of the complete checkpoints below `root`, oldest first."""
    return [int(folder.name) for folder in _numbered(root) if (folder / MANIFEST).is_file()]


def _numbered(root: Path) -> List[Path]:
    folders = [folder for folder in root.iterdir() if folder.name.isdigit()] if root.is_dir() else []
    return sorted(folders, key=lambda folder: int(folder.name))


def read_manifest(folder: Path) -> Dict[str, Any]:
    """The manifest of `folder`; ConfigError if it is damaged or of another version."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(read_text(path, "the manifest of a checkpoint", MOST_MANIFEST_NBYTES))
        schema = manifest["schema"]
        versions = manifest.get("versions")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"`{path}`: expected the manifest of a checkpoint, got {type(error).__name__} "
                           f"({shown(str(error))}); {REMEDY.format(folder)}") from None
    if schema != SCHEMA:
        writer = "odsgd " + shown(versions.get("odsgd", "(version not told)") if isinstance(versions, dict) else "?")
        raise ConfigError(f"`{path}` was written by {writer}, in schema {shown(schema)}; odsgd {__version__} reads "
                          f"schema {SCHEMA}. Resume it with {writer}, or begin a new run with another --out")
    wrong = [name for name, fits in MANIFEST_HAS.items() if not fits(manifest.get(name))]
    if wrong or folder.name != str(manifest["iteration"]):
        raise DamagedError(f"`{path}`: `{(wrong or ['iteration'])[0]}` is not what a manifest has there; "
                           f"{REMEDY.format(folder)}")
    return dict(manifest)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2 ** 53


def _are_digests(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(one, dict) and _is_count(one.get("nbytes")) and re.fullmatch("[0-9a-f]{64}", str(one.get("sha256")))
        for one in value.values())


def _are_shapes(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(one, dict) and isinstance(one.get("dtype"), str) and isinstance(one.get("shape"), list)
        and all(map(_is_count, one["shape"])) for one in value.values())


REMEDY = "remove `{}` to resume from the checkpoint before it"
MANIFEST_HAS: Dict[str, Callable[[Any], bool]] = {
    "iteration": _is_count, "num_workers": lambda value: _is_count(value) and value > 0,
    "config": lambda value: value is None or isinstance(value, dict),
    "batches_per_epoch": lambda value: value is None or (_is_count(value) and value > 0),
    "course": lambda value: value is None or (isinstance(value, list) and len(value) == 3
                                              and all(_is_count(abs(one)) for one in value if isinstance(one, int))),
    "parameters": _are_shapes, "files": _are_digests,
    "virtual_seconds": lambda value: value is None or (isinstance(value, (int, float)) and 0 <= value < math.inf)}
"""What is read of a manifest, and what it must be."""


def digest(path: Path) -> Digest:
    """Size and SHA-256 of a file."""
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            sha.update(piece)
        return {"nbytes": file.tell(), "sha256": sha.hexdigest()}


def verify(folder: Path, name: str, manifest: Dict[str, Any]) -> Path:
    """The path of file `name`, whose content is what the manifest says; ConfigError in one line otherwise."""
    remedy = f"Remove `{folder}` on worker 0's host to resume from the checkpoint before it"
    if name not in manifest["files"]:
        raise DamagedError(f"checkpoint {manifest['iteration']} has no `{name}`: the job had lost that worker by then. "
                           f"{remedy}, or begin a new run")
    path, expected = folder / name, manifest["files"][name]
    if not path.is_file():
        raise DamagedError(f"no `{path}`, a part of checkpoint {manifest['iteration']}: a worker's part lies on the "
                           "host where that worker ran. Start the workers on the same hosts, or copy the file. "
                           f"{remedy}")
    got = digest(path)
    for fact, words in (("nbytes", "{} bytes"), ("sha256", "SHA-256 {}")):
        if got[fact] != expected[fact]:
            raise DamagedError(f"`{path}`: expected {words.format(expected[fact])}, got {words.format(got[fact])}; "
                               f"it is damaged. {remedy}")
    return path


def describe(net: Any) -> Dict[str, Any]:
    """Name -> shape and dtype of every parameter."""
    return {name: {"shape": list(parameter.shape), "dtype": np.dtype(parameter.dtype).name}
            for name, parameter in net.collect_params().items()}


def check_model(manifest: Dict[str, Any], net: Any) -> None:
    """ConfigError with a diff unless the checkpoint has the parameters of `net`."""
    then, now = manifest["parameters"], describe(net)
    lines = [f"{name}: {_shape(then.get(name))} saved, {_shape(now.get(name))} now"
             for name in dict.fromkeys([*then, *now]) if then.get(name) != now.get(name)]
    if lines:
        raise ConfigError(f"checkpoint {manifest['iteration']} is of another model: {_few(lines)}. "
                          "Resume with the model (and the versions of MXNet and GluonCV) it was saved with")


def check_facts(manifest: Dict[str, Any], now: Mapping[str, Any], mismatches: List[str]) -> None:
    """ConfigError unless options (`mismatches` from TrainConfig) and what is true `now` are those of the saved run."""
    lines = mismatches + [f"{name}: {manifest.get(name)} in the saved run, {value} now"
                          for name, value in now.items() if manifest.get(name) != value]
    if lines:
        raise ConfigError(f"checkpoint {manifest['iteration']} is of a run with other settings: {_few(lines)}. Resume "
                          "with the same, or begin a new run with another --out")


def _shape(entry: Optional[Dict[str, Any]]) -> str:
    return "none" if entry is None else f"{'x'.join(map(str, entry['shape']))} {entry['dtype']}"


def _few(lines: List[str], most: int = 5) -> str:
    more = f" and {len(lines) - most} more" if len(lines) > most else ""
    return "; ".join(lines[:most]) + more


def check_saved(root: Path, second: Optional[CheckpointMirror]) -> List[str]:
    """On worker 0 of a job that was started again: ConfigError if the checkpoint that it had is not here.

    It may be older where it was brought back from a second place, to which not all may have been copied: a warning.
    """
    expected, found = environment.saved_iteration(), max(complete(root), default=0)
    if found >= expected:
        return []
    here = f"the newest in `{root}` on host {socket.gethostname()} is {found}" if found else (
        f"there is none in `{root}` on host {socket.gethostname()}")
    if found and second is not None:
        return [f"the job has saved checkpoint {expected}, and {here}; going on from that one"]
    raise ConfigError(f"the job has saved checkpoint {expected}, and {here}, where worker 0 runs now; copy its folder "
                      "there and go on with --resume, and have the checkpoints where every host finds them (a shared "
                      "folder, or --checkpoint-to)")


# --- reading ----------------------------------------------------------------------------------------------------------

def resume(root: Path, store: Store, net: Any, check: Callable[[Dict[str, Any]], None],
           frozen: Collection[str] = (),
           second: Optional[CheckpointMirror] = None) -> Tuple[Dict[str, Any], List[str]]:
    """Go on from the newest complete checkpoint that every worker finds whole; its manifest, and what to warn of.

    `check`: raises ConfigError on worker 0 for a manifest of another run. Collective, before the trainer's first step.
    Where it lets pass a manifest of another number of workers, they go on from what all of them had in common. What is
    not in `root` any more comes from the `second` place.
    """
    there = complete(root) if store.rank == 0 else []
    if store.rank == 0 and not there:
        raise ConfigError(f"no complete checkpoint in `{root}`; check --out, or leave --resume out to begin a new run")
    passed: List[Tuple[str, str]] = []  # the checkpoints that are not whole, and why
    while True:
        offer = from_worker_0(store, _offer(root, there, check, passed) if store.rank == 0 else None)
        if offer["manifest"] is None:
            raise ConfigError(offer["passed"][0][1])
        manifest = offer["manifest"]
        folder = root / str(manifest["iteration"])
        others = manifest["num_workers"] != store.num_workers
        complaint = ""
        try:
            if second is not None and not others:
                with contextlib.suppress(MirrorError):  # then it is missing, which is told below
                    bring(second, folder, worker_file(store.rank))
            verify_mine(folder, manifest, store.rank, others)
        except DamagedError as error:
            complaint = str(error)
        complaints = list(filter(None, agreement.gather_texts(store.session.transport, complaint)))
        if not complaints:
            if others:
                restore_shared(folder, store, net, manifest["iteration"])
            else:
                restore(folder, store, net, frozen)
            if store.rank == 0:
                report("resumed", iteration=manifest["iteration"])
            return manifest, [f"checkpoint {name} is not whole ({shown(why)}); going on from checkpoint {folder.name}"
                              for name, why in offer["passed"]]
        passed.append((folder.name, complaints[0]))


def bring_back(root: Path, second: Optional[CheckpointMirror]) -> None:
    """Copy the newest checkpoint of the second place to `root`, if that has none as new, without the parts of other
    workers."""
    there = [] if second is None else second.holds(MANIFEST)
    if second is None or not there or there[-1] <= max(complete(root), default=-1):
        return
    for name in (WEIGHTS, SERVERS, MANIFEST):
        bring(second, root / str(there[-1]), name)


def bring(second: CheckpointMirror, folder: Path, name: str) -> None:
    """Copy a file of a checkpoint back, if it is not in the folder."""
    if not (folder / name).exists():
        folder.mkdir(parents=True, exist_ok=True)
        second.get(int(folder.name), name, folder / name)


def _offer(root: Path, there: List[int], check: Callable[[Dict[str, Any]], None],
           passed: List[Tuple[str, str]]) -> Dict[str, Any]:
    """Worker 0's next proposal: the newest manifest that is left in `there`."""
    while there:
        folder = root / str(there.pop())
        try:
            manifest = read_manifest(folder)
        except DamagedError as error:
            passed.append((folder.name, str(error)))
            continue
        check(manifest)
        return {"manifest": manifest, "passed": passed}
    return {"manifest": None, "passed": passed}


def verify_mine(folder: Path, manifest: Dict[str, Any], worker_rank: int, others: bool = False) -> None:
    """Compare the files that this worker reads with their digests; `DamagedError` if they differ.

    `others`: the workers are not those that saved, so that nobody reads a worker's part.
    """
    for name in [*([] if others else [worker_file(worker_rank)]), *([WEIGHTS, SERVERS] if worker_rank == 0 else [])]:
        verify(folder, name, manifest)


def restore(folder: Path, store: Store, net: Any, frozen: Collection[str] = ()) -> None:
    """Bring this worker, and from worker 0 the servers, to the saved state; before the trainer's first step.

    The files are whole (`verify_mine`).
    """
    mine = read_arrays(folder / worker_file(store.rank))
    servers = read_arrays(folder / SERVERS) if store.rank == 0 else None
    for name, parameter in net.collect_params().items():
        for device, array in enumerate(parameter.list_data()):
            saved = mine[0][f"frozen/{name}" if name in frozen else f"aux/{device}/{name}"
                            if parameter.grad_req == "null" else f"local/{name}"]
            # Not array[:] = saved: that fails where oneDNN keeps a weight in a layout of its own.
            mx.nd.array(saved, dtype=array.dtype).copyto(array)
    store.load_state(worker=mine, server=servers)


def restore_shared(folder: Path, store: Store, net: Any, iteration: int) -> None:
    """Bring this worker to the global weights, which worker 0 reads, and the servers to their optimizer's state."""
    reads = store.rank == 0
    saved = weights.read(folder / WEIGHTS) if reads else {}
    for name, parameter in net._collect_params_with_prefix().items():
        arrays = parameter.list_data()
        shared = store.allreduce(saved[name] if reads else np.zeros(arrays[0].shape))
        for array in arrays:
            mx.nd.array(shared, dtype=array.dtype).copyto(array)
    store.load_shared(iteration, read_arrays(folder / SERVERS) if reads else None)


def read_arrays(path: Path) -> Tuple[Dict[str, np.ndarray], Any]:
    """The arrays and the JSON of a file of a checkpoint."""
    try:
        return read_npz(path)
    except (OSError, ConfigError) as error:
        raise DamagedError(str(error)) from None


# --- between workers --------------------------------------------------------------------------------------------------

def from_worker_0(store: Store, value: Any) -> Any:
    """Worker 0's `value`, which is JSON, on every worker. Collective; waits."""
    return json.loads(agreement.from_worker_0(store.session.transport, json.dumps(value).encode()))


def _from_leader(store: Store, value: Callable[[], Any]) -> Any:
    """The `value` of worker 0, or of the first that is left, which is JSON, on every worker. Collective; waits.

    A worker that is lost leaves its part out of a sum, of the second one alone, perhaps: then they ask again.
    """
    while True:
        mine = json.dumps(value()).encode() if store.leads else b""
        told = agreement.from_one(store.session.transport, mine).strip(b"\0")
        if told:
            return json.loads(told)


def _gather_digests(store: Store, mine: Digest) -> Dict[str, Digest]:
    """File name -> digest of every worker's part. A worker that the job has lost has none."""
    texts = agreement.gather_texts(store.session.transport, json.dumps(mine))
    return {worker_file(rank): json.loads(text) for rank, text in enumerate(texts) if text}
