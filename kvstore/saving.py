"""A session's state as arrays by parameter name and JSON, and back.

A worker's    arrays ``global/NAME`` and ``local/NAME`` (its weights), ``worker/ARRAY/NAME`` (what its method declares),
              ``optimizer_local/ARRAY/NAME``, ``wire/residual/NAME`` (what a codec keeps);
              JSON with the iteration, its rates and the facts
the servers'  arrays ``optimizer/ARRAY/NAME`` and ``rule/ARRAY/NAME``; JSON by bucket

Arrays are by parameter, so they outlive a layout of buckets; in a synchronous job all buckets' facts are alike.
"""
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np

from kvstore import buckets as layout
from kvstore import keeping
from kvstore.buckets import Bucket
from kvstore.engine import optimizers
from kvstore.engine._mxnet import NDArray, mx
from kvstore.errors import ConfigError, shown
from kvstore.session import Session
from kvstore.wire.interfaces import AsynchronousServers, State
from kvstore.wire.saved import array_text, text_array

Saved = Tuple[Dict[str, np.ndarray], Dict[str, Any]]  # arrays by name, and JSON


def worker_state(session: Session) -> Saved:
    """What this worker knows. Nothing may be in flight; in a synchronous job of a ring, collective."""
    arrays: Dict[str, np.ndarray] = {}
    names: Dict[str, Any] = {}
    for bucket in session.buckets:
        worker = session.workers[bucket.id]
        flats = {"global": session.global_weights(bucket), "local": session.w_local[bucket.id],
                 **{f"worker/{name}": array for name, array in keeping.arrays_of(worker).items()}}
        if bucket.id in session.local_steps:
            state = session.local_steps[bucket.id].arrays()
            flats.update({f"optimizer_local/{name}": array for name, array in state.items()})
        names = {**flats, **{f"wire/{name}": array for name, array in session.wire.kept(bucket).items()}}
        for prefix, flat in names.items():
            flat = flat if isinstance(flat, np.ndarray) else flat.asnumpy().reshape(-1)
            layout.split(bucket, flat, arrays, prefix + "/")
    first, step = session.buckets[0], session.step
    wire = session.wire
    versions = wire.versions() if session.method.asynchronous and isinstance(wire, AsynchronousServers) else {}
    return arrays, {
        "store": session.method.name, "iteration": step.t, "left_out": session.left_out, "since": session.since,
        "lr": step.lr, "lr_local": step.lr_local,
        "arrays": list(names), "facts": {bucket.label: keeping.facts_of(session.workers[bucket.id])
                                         for bucket in session.buckets},
        "optimizer_local": session.local_steps[first.id].facts() if session.local_steps else None,
        "versions": {bucket.label: versions[bucket.id] for bucket in session.buckets if versions}}


def load_worker(session: Session, saved: Saved) -> None:
    """Go on from what `worker_state` gave. The session has begun, at the saved weights."""
    arrays, meta = saved
    for bucket in session.buckets:
        def below(prefix: str, bucket: Bucket = bucket) -> Dict[str, np.ndarray]:
            return {name[len(prefix):]: layout.join(bucket, arrays, name + "/") for name in meta["arrays"]
                    if name.startswith(prefix)}

        worker = session.workers[bucket.id]
        keeping.put_back(worker, below("worker/"), of_bucket(session, bucket, meta["facts"]),
                         like=session.w_local[bucket.id])
        worker.resumed()
        if bucket.id in session.local_steps:
            session.local_steps[bucket.id].put_back(below("optimizer_local/"), meta["optimizer_local"])
        keeping.fill(session.wire.kept(bucket), below("wire/"))
    if meta["versions"]:
        assert isinstance(session.wire, AsynchronousServers)
        session.wire.set_versions({bucket.id: of_bucket(session, bucket, meta["versions"])
                                   for bucket in session.buckets})


def check_form(saved: Saved, key: str) -> None:
    """ConfigError unless the JSON of a state has this entry, as every state of this version has."""
    if not isinstance(saved[1], dict) or key not in saved[1]:
        raise ConfigError("the saved state is of another version of odsgd, which kept it in another form; go on with "
                          "that version, or begin anew")


def check_servers(saved: Saved, name: str) -> None:
    """ConfigError unless this is a `server_state`, by its JSON."""
    check_form(saved, "arrays")
    names, *by_bucket = saved[1]["arrays"], *(one for label, one in saved[1].items() if label != "arrays")
    if not (isinstance(names, list) and set(names) <= set(map(str, names)) and by_bucket and all(
            isinstance(one, dict) and isinstance(one.get("optimizer"), dict) for one in by_bucket)):
        raise ConfigError(f"`{shown(name)}` holds no state of servers, as `save_optimizer_states` writes it")


def weights_of(saved: Saved, prefix: str, context: mx.Context) -> Callable[[Bucket], NDArray]:
    """Function from a bucket to its saved weights, ``global/`` or ``local/``."""
    return lambda bucket: mx.nd.array(layout.join(bucket, saved[0], prefix), ctx=context)


def server_state(session: Session, exported: State) -> Saved:
    """What the servers know, or in their place this worker, of what the session's wire has exported."""
    arrays: Dict[str, np.ndarray] = {}
    meta: Dict[str, Any] = {}
    for bucket in session.buckets:
        for name, flat in exported[bucket.id].items():
            if name == "meta":
                meta[bucket.label] = array_text(flat)
            else:
                layout.split(bucket, flat, arrays, name + "/")
                meta.setdefault("arrays", {})[name] = None
    return arrays, {**meta, "arrays": list(meta.get("arrays", {}))}


def load_servers(session: Session, saved: Optional[Saved]) -> int:
    """Worker 0's `server_state`, if it has one, goes to where the global optimizer lives. Collective.

    Returns how many updates that optimizer had done.
    """
    state, updates = None, 0
    if saved is not None and session.leads:
        state, updates = for_servers(session, saved)
    return send(session, state, updates)


def send(session: Session, state: Optional[State], updates: int) -> int:
    """What `for_servers` has made goes where it belongs: one worker has it, or none. Collective.

    Returns its `updates`.
    """
    session.wire.import_state(state, session.buckets)
    return int(session.transport.total(np.array([updates]))[0])


def for_servers(session: Session, saved: Saved) -> Tuple[State, int]:
    """A `server_state` by the buckets of this session, and how many updates its optimizer had done; ConfigError if it
    does not go with them.
    """
    arrays, meta = saved
    facts = {label: one for label, one in meta.items() if label != "arrays"}
    assert session.optimizer is not None
    _check_fits(session.optimizer, _any(facts), meta["arrays"])
    anew = "rule" not in _any(facts)  # `optimizer_alone`
    state = {bucket.id: {**{name: layout.join(bucket, arrays, name + "/") for name in meta["arrays"]},
                         "meta": text_array(facts.get(bucket.label, _any(facts)) if anew else
                                            of_bucket(session, bucket, facts))}
             for bucket in session.buckets}
    return state, _any(facts)["optimizer"]["count"] - session.optimizer.begin_num_update


def _check_fits(optimizer: mx.optimizer.Optimizer, facts: Dict[str, Any], arrays: List[str]) -> None:
    """ConfigError if the state is of an optimizer of another kind, or with other arrays."""
    if facts.get("rule", {}) is None:
        return  # there was none yet
    its = sorted(name for name in arrays if name.startswith("optimizer/"))
    mine = [f"optimizer/{name}" for name in optimizers.state_names(optimizer)]
    kind = optimizers.describe(optimizer)["class"]
    if facts["optimizer"].get("class", kind) != kind or its != mine:
        def told(kind: str, arrays: List[str]) -> str:
            return f"{kind.rpartition(':')[2]} with {', '.join(arrays) or 'no arrays'}"

        raise ConfigError(f"the saved state is of {told(facts['optimizer'].get('class', 'an optimizer'), its)}, the "
                          f"global optimizer is {told(kind, mine)}; make it as it was when the state was saved")


def optimizer_alone(saved: Saved) -> Saved:
    """Of the servers' state what does not depend on which workers there are: rules begin anew."""
    arrays, meta = saved
    names = [name for name in meta["arrays"] if name.startswith("optimizer/")]
    facts = {label: {"optimizer": one["optimizer"]} for label, one in meta.items() if label != "arrays"}
    return {name: array for name, array in arrays.items() if name.startswith("optimizer/")}, {**facts, "arrays": names}


def of_bucket(session: Session, bucket: Bucket, saved: Dict[str, Any]) -> Any:
    """What was saved of a bucket. In a synchronous job all buckets are alike, so they may be cut anew."""
    if not session.method.asynchronous:
        return saved.get(bucket.label, _any(saved))
    if set(saved) != {each.label for each in session.buckets}:
        raise ConfigError(f"the saved state has {len(saved)} buckets that begin elsewhere than the "
                          f"{len(session.buckets)} of this run; an asynchronous run is resumed with the "
                          "`bucket_nbytes` it was saved with")
    return saved[bucket.label]


def _any(by_bucket: Dict[str, Any]) -> Any:
    return next(iter(by_bucket.values()))
