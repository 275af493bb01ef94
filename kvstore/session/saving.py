"""A session's state as arrays by parameter name and JSON, and back.

A worker's    arrays ``global/NAME`` and ``local/NAME`` (its weights), ``worker/ARRAY/NAME`` (what its method declares),
              ``optimizer_local/ARRAY/NAME``, ``wire/residual/NAME`` (what a codec keeps);
              JSON with the iteration, its rates and the facts
the servers'  arrays ``optimizer/ARRAY/NAME``, ``rule/ARRAY/NAME``, with `codec_weights` ``kept/w/NAME``; JSON by bucket

Arrays are by parameter, so they outlive a layout of buckets, and JSON says which of them each bucket has. In a
synchronous job buckets may be cut anew where they all kept the same arrays and facts.
"""
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np

from kvstore.engine import engine
from kvstore.engine.engine import NDArray
from kvstore.errors import ConfigError, shown
from kvstore.messages import buckets as layout
from kvstore.messages.buckets import Bucket
from kvstore.messages.seam import Saved, Servers, State
from kvstore.optimizers import described
from kvstore.session.session import Session
from kvstore.state import declared
from kvstore.state.npz import below

MOST_COUNTED = 2 ** 53
"""Iterations, updates and versions are fewer, as long as a float has them exactly."""


def worker_state(session: Session) -> Saved:
    """What this worker knows. Nothing may be in flight; in a synchronous job of a ring, collective."""
    arrays: Dict[str, np.ndarray] = {}
    names: Dict[str, List[str]] = {}
    facts: Dict[str, Dict[str, Any]] = {}
    for bucket in session.buckets:
        of_worker, facts[bucket.label] = declared.saved(session.workers[bucket.id])
        local = session.local_steps.get(bucket.id)
        flats = {"global": session.global_weights(bucket), "local": session.w_local[bucket.id],
                 **{f"worker/{name}": array for name, array in of_worker.items()},
                 **{f"optimizer_local/{name}": array for name, array in (local.arrays() if local else {}).items()},
                 **{f"wire/{name}": array for name, array in session.weights_holder.codec_state(bucket).items()}}
        names[bucket.label] = list(flats)
        for prefix, flat in flats.items():
            flat = flat if isinstance(flat, np.ndarray) else flat.asnumpy().reshape(-1)
            layout.split(bucket, flat, arrays, prefix + "/")
    step, holder = session.step, session.weights_holder
    versions = holder.versions() if session.method.asynchronous and isinstance(holder, Servers) else {}
    return arrays, {
        "store": session.method.name, "iteration": step.t, "left_out": session.left_out, "since": session.since,
        "lr": step.lr, "lr_local": step.lr_local, "counted": list(session.counted),
        "sampled": list(session.sampled), "arrays": names, "facts": facts,
        "optimizer_local": {bucket.label: session.local_steps[bucket.id].facts() for bucket in session.buckets
                            if session.local_steps},
        "versions": {bucket.label: versions[bucket.id] for bucket in session.buckets if versions}}


def load_worker(session: Session, saved: Saved) -> None:
    """Go on from what `worker_state` gave. The session has begun, at the saved weights."""
    arrays, meta = saved
    session.counted.extend(meta.get("counted", []))
    session.sampled.extend(meta.get("sampled", []))
    by_rounds = session.method.takes == "weights" and session.sends_at_once
    if by_rounds and len(session.sampled) == session.sampled.maxlen:  # version 0.4.0 kept what had been sent, too
        session.counted.clear()
        session.sampled.clear()
    for bucket in session.buckets:
        flats = {name: layout.join(bucket, arrays, name + "/") for name in of_bucket(session, bucket, meta["arrays"])}
        worker = session.workers[bucket.id]
        declared.restore(worker, below("worker/", flats), of_bucket(session, bucket, meta["facts"]),
                         like=session.w_local[bucket.id])
        worker.resumed()
        if bucket.id in session.local_steps:
            local, progress = session.local_steps[bucket.id], of_bucket(session, bucket, meta["optimizer_local"])
            if described.known(local.optimizer):
                described.check_settings(local.optimizer, progress["settings"], "a local optimizer")
            local.restore(below("optimizer_local/", flats), progress)
        declared.fill(session.weights_holder.codec_state(bucket), below("wire/", flats))
    if meta["versions"] and session.method.asynchronous:
        assert isinstance(session.weights_holder, Servers)
        session.weights_holder.set_versions({bucket.id: of_bucket(session, bucket, meta["versions"])
                                             for bucket in session.buckets})


def check_worker(saved: Saved) -> None:
    """ConfigError unless this has the form of a `worker_state`."""
    meta = _meta(saved)
    names: Any = meta.get("arrays")
    local = meta.get("optimizer_local")
    if not ({"store", "optimizer_local", "versions"} <= set(meta)
            and _are_numbers(meta.get("lr"), meta.get("lr_local"))
            and all(isinstance(meta.get(name, []), list) and _are_numbers(*meta.get(name, []))
                    for name in ("counted", "sampled"))
            and _are_counts(meta.get("iteration"), meta.get("left_out", 0)) and _are_numbers(meta.get("since", 0))
            and _by_bucket(meta.get("facts"), lambda one: isinstance(one, dict))
            and _by_bucket(names, _are_names) and set(names) == set(meta["facts"])
            and (not local or _by_bucket(local, _is_progress))
            and (not meta.get("versions") or _by_bucket(meta["versions"], _are_counts))):
        raise ConfigError("the saved state is not one of a worker, as `worker_state` makes it; it is damaged, or of "
                          "another version of odsgd")


def check_servers(saved: Saved, file: str = "") -> None:
    """ConfigError unless this has the form of a `server_state`. `file`: what `save_optimizer_states` has written."""
    names: Any = _meta(saved).get("arrays")
    facts = {label: one for label, one in _meta(saved).items() if label != "arrays"}
    if not (_by_bucket(facts, lambda one: isinstance(one, dict) and _is_progress(one.get("optimizer"))
                       and isinstance(one.get("rule", {}), (dict, type(None))))
            and len({"rule" in one for one in facts.values()}) == 1
            and _by_bucket(names, _are_names) and set(names) == set(facts)):
        raise ConfigError(f"`{shown(file)}` holds no state of servers, as `save_optimizer_states` writes it" if file
                          else "the servers' part of the saved state is not as `server_state` makes it; it is damaged, "
                          "or of another version of odsgd")


def _meta(saved: Saved) -> Dict[str, Any]:
    return saved[1] if isinstance(saved[1], dict) else {}  # JSON that somebody else may have written


def _by_bucket(value: Any, check: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and bool(value) and all(map(check, value.values()))


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(one, (int, float)) for one in values)


def _are_counts(*values: Any) -> bool:
    return all(isinstance(one, int) and 0 <= one < MOST_COUNTED for one in values)


def _is_progress(value: Any) -> bool:
    """Whether it has the form of what an optimizer remembers (`Applied.facts`)."""
    return isinstance(value, dict) and _are_counts(value.get("count")) and isinstance(value.get("settings"), dict) \
        and isinstance(value.get("class", ""), str)


def weights_of(saved: Saved, prefix: str, context: Any) -> Callable[[Bucket], NDArray]:
    """Function from a bucket to its saved weights, ``global/`` or ``local/``."""
    return lambda bucket: engine.array(layout.join(bucket, saved[0], prefix), context)


def server_state(session: Session, exported: State) -> Saved:
    """What the holder of the global weights has exported, by parameter name."""
    arrays: Dict[str, np.ndarray] = {}
    meta: Dict[str, Any] = {"arrays": {}}
    for bucket in session.buckets:
        flats, meta[bucket.label] = exported[bucket.id]
        meta["arrays"][bucket.label] = list(flats)
        for name, flat in flats.items():
            layout.split(bucket, flat, arrays, name + "/")
    return arrays, meta


def send(session: Session, state: Optional[State], updates: int) -> int:
    """Send what `for_servers` has made on one worker, or on none, to where the global optimizer lives. Collective.

    Returns that worker's `updates` on every worker.
    """
    session.weights_holder.import_state(state, session.buckets)
    return int(session.transport.total(np.array([updates]))[0])


def for_servers(session: Session, saved: Saved) -> Tuple[State, int]:
    """A `server_state` by the buckets of this session, and how many updates its optimizer had done; ConfigError if it
    does not go with them.
    """
    arrays, facts, names = saved[0], *_facts_and_names(saved)
    if not session.method.update_decays:  # its workers do, whatever saved this
        facts = {label: _without_decay(one) for label, one in facts.items()}
    whose = "a global optimizer" if session.outer is None else "an outer optimizer"
    for label, one in facts.items():
        _check_fits(session.global_optimizer, one, names[label], whose)
    alike = {label: [one.get("rule"), names[label]] for label, one in facts.items()}
    first = next(iter(facts.values()))
    anew = "rule" not in first  # `optimizer_alone`
    state: State = {}
    for bucket in session.buckets:
        label = bucket.label if anew and bucket.label in facts else _label(session, bucket, alike, anew)
        state[bucket.id] = {name: layout.join(bucket, arrays, name + "/") for name in names[label]}, facts[label]
    return state, first["optimizer"]["count"] - session.global_optimizer.begin_num_update


def _facts_and_names(saved: Saved) -> Tuple[Dict[str, Any], Dict[str, List[str]]]:
    """Of a `server_state`: the facts and the arrays' names, by bucket."""
    return {label: one for label, one in saved[1].items() if label != "arrays"}, saved[1]["arrays"]


def _without_decay(facts: Dict[str, Any]) -> Dict[str, Any]:
    settings = {name: value for name, value in facts["optimizer"]["settings"].items() if name != "wd"}
    return {**facts, "optimizer": {**facts["optimizer"], "settings": settings}}


def _check_fits(optimizer: described.Optimizer, facts: Dict[str, Any], arrays: List[str], whose: str) -> None:
    """ConfigError if the state is of an optimizer of another kind, with other arrays or, as far as its ways are known,
    with other settings: the trainer and local steps would go on with theirs.
    """
    if facts.get("rule", {}) is None and not facts["optimizer"].get("began"):
        return  # that optimizer had not begun
    its = sorted(name for name in arrays if name.startswith("optimizer/"))
    mine = [f"optimizer/{name}" for name in described.state_names(optimizer)]
    kind = described.kind_of(described.describe(optimizer)["class"])
    saved = described.kind_of(facts["optimizer"].get("class", kind))
    if saved != kind or its != mine:
        def said(kind: str, arrays: List[str]) -> str:
            return f"{kind if its == mine else kind.rpartition(':')[2]} with {', '.join(arrays) or 'no arrays'}"

        raise ConfigError(f"the saved state is of {said(saved, its)}, the global optimizer is {said(kind, mine)}; make "
                          "it as it was when the state was saved")
    if described.known(optimizer):  # one of the user's own may change them itself
        described.check_settings(optimizer, facts["optimizer"]["settings"], whose)


def optimizer_alone(saved: Saved) -> Saved:
    """The part of the servers' state that does not depend on which workers there are: rules begin anew."""
    facts, names = _facts_and_names(saved)
    theirs = {label: [name for name in mine if name.startswith("optimizer/")] for label, mine in names.items()}
    arrays = {name: array for name, array in saved[0].items() if name.startswith("optimizer/")}
    return arrays, {**{label: {"optimizer": one["optimizer"]} for label, one in facts.items()}, "arrays": theirs}


def of_bucket(session: Session, bucket: Bucket, saved: Any) -> Any:
    """What was saved of a bucket; ConfigError if nothing can serve as that."""
    if not saved:
        raise ConfigError(f"the saved state has nothing of {bucket}; it belongs to another version or other options")
    return saved[_label(session, bucket, saved)]


def _label(session: Session, bucket: Bucket, saved: Dict[str, Any], anew: bool = False) -> str:
    """The label under which a saved state has this bucket's part: its own, or any, if buckets were cut anew and all
    saved parts are alike. In an asynchronous job, where each bucket had other gradients, only if rules begin `anew`.
    """
    if set(saved) == {each.label for each in session.buckets}:
        return bucket.label
    first = next(iter(saved))
    if (session.method.asynchronous and not anew) or any(one != saved[first] for one in saved.values()):
        raise ConfigError(f"the saved state has {len(saved)} buckets that begin elsewhere than the "
                          f"{len(session.buckets)} of this run, and each has something of its own; go on with the "
                          "`bucket_nbytes` it was saved with")
    return first
