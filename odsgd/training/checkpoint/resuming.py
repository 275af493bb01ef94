"""Going on from a checkpoint: which one all workers find whole, and the state that they read from it."""
import contextlib
import json
import socket
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from kvstore.engine._mxnet import mx
from kvstore.errors import ConfigError, shown
from kvstore.fronts.gluon.store import Store
from kvstore.job import agreement, environment
from kvstore.job.report import report
from kvstore.state.npz import read_npz
from odsgd.training.checkpoint import manifests, weights
from odsgd.training.checkpoint.mirror import CheckpointMirror, MirrorError


def complete(root: Path, second: Optional[CheckpointMirror]) -> Tuple[List[int], List[str]]:
    """Iterations of the complete checkpoints here and in the second place, oldest first; and what to warn of.

    If the second place cannot be read, it is enough that the last checkpoint that the job has saved is here.
    """
    here = manifests.complete(root)
    try:
        return sorted({*here, *([] if second is None else second.holds(manifests.MANIFEST))}), []
    except MirrorError as error:
        if not here or here[-1] < environment.saved_iteration():
            raise
        return here, [f"the second place of checkpoints: {error}"]


def check_saved(root: Path, there: Sequence[int], second: Optional[CheckpointMirror]) -> List[str]:
    """On worker 0 of a job that was started again: ConfigError if the checkpoint that it had is not there.

    With a second place, to which not all may have been copied, an older one will do: then it returns a warning.
    """
    expected = environment.saved_iteration()
    found = max(there, default=0)
    if found >= expected:
        return []
    where = f"in `{root}` on host {socket.gethostname()}" + (" or in the second place" if second is not None else "")
    here = f"the newest {where} is {found}" if found else f"there is none {where}"
    if found and second is not None:
        return [f"the job has saved checkpoint {expected}, and {here}"]
    raise ConfigError(f"the job has saved checkpoint {expected}, and {here}, where worker 0 runs now; copy its folder "
                      "there and start again (odsgd train: with --resume), and have the checkpoints where every host "
                      "finds them: a shared folder, or a second place (--checkpoint-to, `to` of keep)")


def resume(root: Path, store: Store, net: Any, check: Callable[[Dict[str, Any]], None],
           second: Optional[CheckpointMirror] = None, required: bool = False,
           newest: Optional[int] = None) -> Tuple[Dict[str, Any], List[str]]:
    """Go on from the newest complete checkpoint that every worker finds whole; its manifest, and what to warn of.
    Without a checkpoint the manifest is empty, or, if one is `required`, worker 0 raises ConfigError. Those of later
    iterations than `newest` do not count.

    `check`: raises ConfigError on worker 0 for a manifest of another run. Collective, before the trainer's first step.
    Where it lets pass a manifest of another number of workers, they go on from what all of them had in common. What is
    not in `root` any more comes from the `second` place.
    """
    there, warnings = complete(root, second) if store.rank == 0 else ([], [])
    older = check_saved(root, there, second) if store.rank == 0 else []
    there = [iteration for iteration in there if newest is None or iteration <= newest]
    if required and store.rank == 0 and not there:
        raise ConfigError(f"no complete checkpoint in `{root}`; check --out, or leave --resume out to begin a new run")
    passed: List[Tuple[str, str]] = []  # the checkpoints that are not whole, and why
    while True:
        offer = _offer(root, there, check, passed, second) if store.rank == 0 else None
        manifest, passed = from_worker_0(store, (offer, passed))
        if manifest is None:
            if passed:
                newer = f"; the job has saved checkpoint {environment.saved_iteration()}, which is not here"
                raise ConfigError(passed[0][1] + newer * bool(older))
            tell_begun(store, root, 0)
            return {}, [*warnings, *older]
        folder = root / str(manifest["iteration"])
        others = manifest["num_workers"] != store.num_workers
        complaint = ""
        try:
            if second is not None and not others:
                with contextlib.suppress(MirrorError):  # a missing file is reported below
                    bring(second, folder, manifests.worker_file(store.rank))
            verify_mine(folder, manifest, store.rank, others)
        except manifests.DamagedError as error:
            complaint = str(error)
        complaints = list(filter(None, agreement.gather_texts(store.session.transport, complaint)))
        if not complaints:
            if others:
                restore_shared(folder, store, net, manifest)
            else:
                restore(folder, store, net)
            tell_begun(store, root, manifest["iteration"])
            warnings += [*older, *manifests.other_writer(manifest),
                         *(f"checkpoint {name} is not whole ({shown(why)})" for name, why in passed)]
            return manifest, [f"{warning}; going on from checkpoint {folder.name}" for warning in warnings]
        passed.append((folder.name, complaints[0]))


def tell_begun(store: Store, root: Path, iteration: int) -> None:
    """Worker 0 tells the launcher which checkpoint it goes on from; 0: none was there, and what comes is the job's."""
    if store.rank == 0:
        report("resumed", iteration=iteration, folder=str(root))


def bring(second: CheckpointMirror, folder: Path, name: str) -> None:
    """Copy a file of a checkpoint back, if it is not in the folder."""
    if not (folder / name).exists():
        folder.mkdir(parents=True, exist_ok=True)
        second.get(int(folder.name), name, folder / name)


def _offer(root: Path, there: List[int], check: Callable[[Dict[str, Any]], None],
           passed: List[Tuple[str, str]], second: Optional[CheckpointMirror]) -> Optional[Dict[str, Any]]:
    """Worker 0's next proposal: the newest manifest that is left in `there`, brought from the second place if need be,
    without the parts of other workers."""
    while there:
        folder = root / str(there.pop())
        try:
            if second is not None and not (folder / manifests.MANIFEST).exists():
                for name in (manifests.WEIGHTS, manifests.SERVERS, manifests.MANIFEST):
                    bring(second, folder, name)
            manifest = manifests.read_manifest(folder)
        except (manifests.DamagedError, MirrorError) as error:
            passed.append((folder.name, str(error)))
            continue
        try:
            check(manifest)
        except ConfigError as error:
            raise type(error)("; ".join([str(error), *manifests.other_writer(manifest)])) from None
        return manifest
    return None


def verify_mine(folder: Path, manifest: Dict[str, Any], worker_rank: int, others: bool = False) -> None:
    """Compare the files that this worker reads with their digests; `DamagedError` if they differ.

    `others`: other workers saved it, so nobody reads a worker's part.
    """
    of_worker_0 = [manifests.WEIGHTS, manifests.SERVERS] if worker_rank == 0 else []
    for name in [*([] if others else [manifests.worker_file(worker_rank)]), *of_worker_0]:
        manifests.verify(folder, name, manifest)


def restore(folder: Path, store: Store, net: Any) -> None:
    """Bring this worker, and from worker 0 the servers, to the saved state; before the trainer's first step.

    The files are whole (`verify_mine`).
    """
    mine = read_arrays(folder / manifests.worker_file(store.rank))
    servers = read_arrays(folder / manifests.SERVERS) if store.rank == 0 else None
    for name, parameter in net.collect_params().items():
        trained = f"global/{name}" if parameter.grad_req == "null" else f"local/{name}"  # global: it is frozen now
        for device, array in enumerate(parameter.list_data()):
            keys = (f"aux/{device}/{name}", f"aux/0/{name}", f"frozen/{name}", trained)
            key = next((key for key in keys if key in mine[0]), None)
            if key is None:
                raise ConfigError(f"checkpoint {folder.name} has nothing of {name}; begin with another folder")
            # Not array[:] = saved: that fails where oneDNN keeps a weight in a layout of its own.
            mx.nd.array(mine[0][key], dtype=array.dtype).copyto(array)
    store.load_state(worker=mine, server=servers)


def restore_shared(folder: Path, store: Store, net: Any, manifest: Dict[str, Any]) -> None:
    """Bring this worker to the global weights, which worker 0 reads, and the servers to their optimizer's state."""
    reads = store.rank == 0
    saved = weights.read(folder / manifests.WEIGHTS) if reads else {}
    for name, parameter in net._collect_params_with_prefix().items():
        arrays = parameter.list_data()
        shared = store.allreduce(saved[name] if reads else np.zeros(arrays[0].shape))
        for array in arrays:
            mx.nd.array(shared, dtype=array.dtype).copyto(array)
    left_out, since = manifest.get("left_out") or 0, manifest.get("since") or 0
    store.load_shared(manifest["iteration"] - left_out, read_arrays(folder / manifests.SERVERS) if reads else None,
                      left_out, since)


def read_arrays(path: Path) -> Tuple[Dict[str, np.ndarray], Any]:
    """The arrays and the JSON of a file of a checkpoint."""
    try:
        return read_npz(path)
    except (OSError, ConfigError) as error:
        raise manifests.DamagedError(str(error)) from None


def from_worker_0(store: Store, value: Any) -> Any:
    """Worker 0's `value`, which is JSON, on every worker. Collective; waits."""
    return json.loads(agreement.from_worker_0(store.session.transport, json.dumps(value).encode()))
