"""Small training runs that take any store on any transport, and what they leave behind.

The model has a few parameters of awkward sizes and a loss whose gradient has a closed form,

    loss_m,t(w) = 1/2 sum c_m,t (w - a_m,t)^2        gradient = c_m,t (w - a_m,t)

with c and a drawn from (worker, iteration) alone, so that every process and the NumPy transliteration see the same.
"""
import contextlib
import dataclasses
import functools
import os
import tempfile
import traceback
from dataclasses import asdict, dataclass, field
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import numpy as np

SHAPES: Dict[str, Tuple[int, ...]] = {"w10": (3, 7), "w2": (5,), "bias": (2, 3, 2), "z": (1,)}
SIZE = sum(int(np.prod(shape)) for shape in SHAPES.values())


@dataclass(frozen=True)
class Scenario:
    """One run. `store` None means plain Gluon, without a store."""

    store: Optional[str]
    options: Dict[str, Any] = field(default_factory=dict)
    optimizer: str = "sgd"
    optimizer_params: Dict[str, Any] = field(default_factory=lambda: {"learning_rate": 0.1})
    iterations: int = 8
    devices: int = 1
    batch: int = 4
    """Trainer.step divides by it, the losses are multiplied by it; a power of two leaves no rounding."""
    lr_at: Dict[str, float] = field(default_factory=dict)
    """Iteration (as text) -> rate set with trainer.set_learning_rate before that iteration's step."""
    lr_local_at: Dict[str, float] = field(default_factory=dict)
    multipliers: Dict[str, Tuple[float, float]] = field(default_factory=dict)
    """Parameter -> (lr_mult, wd_mult)."""
    schedule: Optional[Tuple[int, float]] = None
    """(step, factor) of an MXNet FactorScheduler."""
    optimizer_at: Dict[str, Tuple[str, Dict[str, Any]]] = field(default_factory=dict)
    """Iteration (of a scripted order: turn) -> the optimizer, and its arguments, set before it."""
    states_at: Optional[Tuple[int, int]] = None
    """The iterations before which the optimizer's state is saved, and that state loaded."""
    order: Tuple[int, ...] = ()
    """Asynchronous stores: whose turn it is, one iteration each; ranks the job does not have are skipped."""

    def to_json(self) -> Dict[str, Any]:
        return asdict(self)


def target(m: int, t: int) -> Tuple[np.ndarray, np.ndarray]:
    """c and a of worker m's loss in iteration t."""
    random = np.random.RandomState(1000 * m + t)
    return (random.uniform(0.5, 1.5, SIZE).astype(np.float32), random.normal(size=SIZE).astype(np.float32))


def gradient(m: int, t: int, w: np.ndarray) -> np.ndarray:
    c, a = target(m, t)
    return c * (w - a)


def initial() -> np.ndarray:
    return np.random.RandomState(7).normal(size=SIZE).astype(np.float32)


def train(scenario: Scenario, worker_rank: int, transport: Any = None) -> Dict[str, np.ndarray]:
    """Run `scenario` as worker `worker_rank`: `path` (iterations + 1, SIZE) of w_t^m; `final`, the global weights."""
    import kvstore
    from kvstore.engine._mxnet import mx

    autograd, gluon = mx.autograd, mx.gluon
    options = dict(scenario.options)
    asked = options.pop("transport", None)
    store: Any = None if scenario.store is None else kvstore.create(scenario.store, transport or asked, **options)
    contexts = [mx.cpu(i) for i in range(scenario.devices)]
    parameters = gluon.ParameterDict("net_")
    start = 0
    for name, shape in SHAPES.items():
        stop = start + int(np.prod(shape))
        value = mx.nd.array(initial()[start:stop].reshape(shape))
        parameters.get(name, shape=shape, init=mx.init.Constant(value))
        lr_mult, wd_mult = scenario.multipliers.get(name, (1.0, 1.0))
        parameters.get(name).lr_mult, parameters.get(name).wd_mult = lr_mult, wd_mult
        start = stop
    parameters.initialize(ctx=contexts)
    params = dict(scenario.optimizer_params)
    if scenario.schedule:
        step, factor = scenario.schedule
        params["lr_scheduler"] = mx.lr_scheduler.FactorScheduler(step, factor, base_lr=params["learning_rate"])
    trainer = gluon.Trainer(parameters, scenario.optimizer, params, kvstore=store)

    if scenario.order:  # the first step of any worker needs all of them
        trainer._init_kvstore()
        trainer._init_params()
        store.begin()
    path = [flat(parameters)]
    between = functools.partial(between_turns, scenario, trainer, store)
    for t in turns(scenario, worker_rank, store, between):
        if str(t) in scenario.lr_at:
            trainer.set_learning_rate(scenario.lr_at[str(t)])
        if str(t) in scenario.lr_local_at:
            store.lr_local = scenario.lr_local_at[str(t)]
        losses = []
        with autograd.record():
            for context in contexts:
                losses.append(loss(parameters, context, worker_rank, t) * (scenario.batch / scenario.devices))
        autograd.backward(losses)
        trainer.step(scenario.batch)
        path.append(flat(parameters))
    result = {"path": np.array(path), "final": path[-1]}
    if store is not None:
        with store.global_weights():
            result["final"] = flat(parameters)
        np.testing.assert_array_equal(flat(parameters), path[-1])  # its own are back
        store.close()
    return result


def turns(scenario: Scenario, worker_rank: int, store: Any, between: Callable[[int], None]) -> Iterator[int]:
    """This worker's iterations; in a scripted order, no other worker has anything under way meanwhile. All workers call
    `between` before every iteration, or turn.
    """
    if not scenario.order:
        for t in range(scenario.iterations):
            between(t)
            yield t
        return
    t = 0
    for turn, rank in enumerate(rank for rank in scenario.order if rank < store.num_workers):
        between(turn)
        if rank == worker_rank:
            yield t
            t += 1
        store.barrier()


def between_turns(scenario: Scenario, trainer: Any, store: Any, turn: int) -> None:
    """What changes before this one."""
    from kvstore.engine._mxnet import mx
    if str(turn) in scenario.optimizer_at:
        name, params = scenario.optimizer_at[str(turn)]
        optimizer = mx.optimizer.create(name, **params)
        if store is not None:
            store.set_optimizer(optimizer)
        else:
            optimizer.param_dict, trainer._optimizer = trainer._optimizer.param_dict, optimizer
            trainer._updaters = [mx.optimizer.get_updater(optimizer) for _ in trainer._updaters]
    saved, loaded = scenario.states_at or (None, None)
    file = os.path.join(tempfile.gettempdir(), f"odsgd-states-{os.getpid()}")
    if turn == saved and (store is None or store.rank == 0 or store.state_is_shared):
        trainer.save_states(file)
    if turn == saved and scenario.order:
        store.barrier()  # nobody's turn is before that
    if turn == loaded:
        trainer.load_states(file)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file)


def loss(parameters: Any, context: Any, m: int, t: int) -> Any:
    from kvstore.engine._mxnet import mx
    c, a = (mx.nd.array(part, ctx=context) for part in target(m, t))
    w = mx.nd.concat(*[parameters.get(name).data(context).reshape(-1) for name in SHAPES], dim=0)
    return (c * (w - a) ** 2).sum() / 2


def flat(parameters: Any) -> np.ndarray:
    return np.concatenate([parameters.get(name).data(parameters.get(name).list_ctx()[0]).asnumpy().reshape(-1)
                           for name in SHAPES])


PLAIN = {"learning_rate": 0.1}
MOMENTUM = {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}
LOCAL = {"warmup": 3, "lr_local": 0.05}
#: From MOMENTUM to another kind of optimizer, and back to the first kind with other numbers.
CHANGES = {"3": ("adam", {"learning_rate": 0.05, "wd": 0.02}),
           "6": ("sgd", {"learning_rate": 0.2, "momentum": 0.5, "wd": 0.03})}

#: Every run of the contract, by name. They are compared with the papers and with each other.
SCENARIOS: Dict[str, Scenario] = {
    "gluon": Scenario(None, optimizer_params=MOMENTUM),
    "gluon_adam": Scenario(None, optimizer="adam", optimizer_params=PLAIN),
    "gluon_lamb": Scenario(None, optimizer="lamb", optimizer_params=PLAIN),
    "gluon_schedule": Scenario(None, optimizer_params=MOMENTUM, schedule=(2, 0.5)),
    "gluon_replaced": Scenario(None, optimizer_params=MOMENTUM, optimizer_at=CHANGES),
    "gluon_states": Scenario(None, optimizer_params=MOMENTUM, states_at=(3, 6)),
    "gluon_adam_states": Scenario(None, optimizer="adam", optimizer_params=PLAIN, states_at=(3, 6)),
    "gluon_mult": Scenario(None, optimizer_params=MOMENTUM, multipliers={"w2": (0.5, 2.0), "z": (1.0, 0.0)}),
    "ssgd": Scenario("ssgd", optimizer_params=MOMENTUM),
    "ssgd_plain": Scenario("ssgd", optimizer_params=PLAIN),
    "ssgd_adam": Scenario("ssgd", optimizer="adam", optimizer_params=PLAIN),
    "ssgd_lamb": Scenario("ssgd", optimizer="lamb", optimizer_params=PLAIN),
    "gluon_batch": Scenario(None, optimizer_params=MOMENTUM, batch=5),
    "ssgd_batch": Scenario("ssgd", optimizer_params=MOMENTUM, batch=5),
    "gluon_dcasgd_c": Scenario(None, optimizer="dcasgd_c", optimizer_params=PLAIN),
    "ssgd_dcasgd_c": Scenario("ssgd", optimizer="dcasgd_c", optimizer_params=PLAIN),
    "gluon_dcasgd": Scenario(None, optimizer="dcasgd", optimizer_params=PLAIN),
    "ssgd_dcasgd": Scenario("ssgd", optimizer="dcasgd", optimizer_params=PLAIN),
    "ssgd_schedule": Scenario("ssgd", optimizer_params=MOMENTUM, schedule=(2, 0.5)),
    "ssgd_lr_at": Scenario("ssgd", optimizer_params=MOMENTUM, lr_at={"3": 0.02, "5": 0.2}),
    "ssgd_mult": Scenario("ssgd", optimizer_params=MOMENTUM, multipliers={"w2": (0.5, 2.0), "z": (1.0, 0.0)}),
    "ssgd_replaced": Scenario("ssgd", optimizer_params=MOMENTUM, optimizer_at=CHANGES),
    "ssgd_states": Scenario("ssgd", {"bucket_nbytes": 16}, optimizer_params=MOMENTUM, states_at=(3, 6)),
    "ssgd_adam_states": Scenario("ssgd", optimizer="adam", optimizer_params=PLAIN, states_at=(3, 6)),
    "odsgd_replaced": Scenario("odsgd", {"warmup": 1}, optimizer_params=MOMENTUM, optimizer_at=CHANGES),
    "odsgd_states": Scenario("odsgd", {"warmup": 1}, optimizer_params=MOMENTUM, states_at=(3, 6)),
    "ssgd_tiny": Scenario("ssgd", {"bucket_nbytes": 16}, optimizer_params=MOMENTUM),
    "ssgd_sum": Scenario("ssgd", {"reduction": "sum"}, optimizer_params=MOMENTUM),
    "ssgd_two_devices": Scenario("ssgd", optimizer_params=MOMENTUM, devices=2),
    "odsgd": Scenario("odsgd", LOCAL, optimizer_params=MOMENTUM),
    "odsgd_tiny": Scenario("odsgd", {**LOCAL, "bucket_nbytes": 16}, optimizer_params=MOMENTUM),
    "odsgd_two_devices": Scenario("odsgd", LOCAL, optimizer_params=MOMENTUM, devices=2),
    "odsgd_all_warmup": Scenario("odsgd", {"warmup": 8, "lr_local": 0.05}, optimizer_params=MOMENTUM),
    "odsgd_no_warmup": Scenario("odsgd", {"warmup": 0, "lr_local": 0.05}, optimizer_params=MOMENTUM),
    "odsgd_follow": Scenario("odsgd", {"warmup": 0}, optimizer_params=MOMENTUM, lr_at={"4": 0.03}),
    "odsgd_local_schedule": Scenario("odsgd", LOCAL, optimizer_params=MOMENTUM, lr_local_at={"5": 0.01}),
    "odsgd_mult": Scenario("odsgd", LOCAL, optimizer_params=MOMENTUM, multipliers={"w2": (0.5, 2.0), "z": (1.0, 0.0)}),
    "odsgd_schedule": Scenario("odsgd", {"warmup": 0}, optimizer_params=MOMENTUM, schedule=(2, 0.5)),
    "odsgd_momentum": Scenario("odsgd", {**LOCAL, "momentum_local": 0.5, "wd_local": 0.0}, optimizer_params=MOMENTUM),
    "odsgd_adam": Scenario("odsgd", {**LOCAL, "optimizer_local": "adam"}, optimizer_params=MOMENTUM),
    "odsgd_sum": Scenario("odsgd", {**LOCAL, "reduction": "sum"}, optimizer_params=MOMENTUM),
    "odsgd_none": Scenario("odsgd", {"warmup": 0, "optimizer_local": "none"}, optimizer_params=MOMENTUM),
    "delayed": Scenario("delayed", optimizer_params=MOMENTUM),
    "odsgd_c": Scenario("odsgd", {**LOCAL, "optimizer_local": "dcasgd_c", "lamda": 0.5}, optimizer_params=MOMENTUM),
    "odsgd_a": Scenario("odsgd", {**LOCAL, "optimizer_local": "dcasgd_a", "lamda": 0.5}, optimizer_params=MOMENTUM),
    "odsgd_c_momentum": Scenario("odsgd", {**LOCAL, "optimizer_local": "dcasgd_c", "momentum_local": 0.5},
                                 optimizer_params=MOMENTUM),
    "odsgd_c_zero": Scenario("odsgd", {**LOCAL, "optimizer_local": "dcasgd_c", "lamda": 0.0},
                             optimizer_params=MOMENTUM),
    "odsgd_a_zero": Scenario("odsgd", {**LOCAL, "optimizer_local": "dcasgd_a", "lamda": 0.0},
                             optimizer_params=MOMENTUM),
}


#: Worker 2 is slow, worker 0 fast; no two neighbouring rounds have the same order.
ORDER = (0, 1, 0, 2, 1, 0, 0, 1, 1, 0, 2, 0, 1, 0, 1, 2, 0, 0, 1, 2, 0, 1, 0, 2)
DECAY = {"learning_rate": 0.1, "wd": 0.01}
BARE = {"learning_rate": 0.1, "momentum": 0.9}
MULT = {"w2": (0.5, 2.0), "z": (1.0, 0.0)}

#: Of methods that take weights: in eight iterations two exchanges, and two steps after them.
OUTER = {"H": 3, "lr_outer": 0.7, "momentum_outer": 0.9}
AVERAGE = {"H": 3, "lr_outer": 1.0, "momentum_outer": 0.0}
STREAMING = {"H": 4, "fragments": 2, "delay": 2, "lr_outer": 0.7, "momentum_outer": 0.9}
#: The parameters of `SHAPES` in two fragments: the largest, and the others.
FRAGMENTS = [slice(0, 21), slice(21, SIZE)]
WEIGHTS: Dict[str, Scenario] = {
    "diloco": Scenario("diloco", OUTER, optimizer_params=MOMENTUM),
    "diloco_tiny": Scenario("diloco", {**OUTER, "bucket_nbytes": 16}, optimizer_params=MOMENTUM),
    "diloco_rates": Scenario("diloco", OUTER, optimizer_params=DECAY, multipliers=MULT, lr_at={"4": 0.02}),
    "diloco_replaced": Scenario("diloco", OUTER, optimizer_params=MOMENTUM, optimizer_at=CHANGES),
    "diloco_adamw": Scenario("diloco", OUTER, optimizer="adamw", optimizer_params=DECAY),
    "diloco_two_devices": Scenario("diloco", OUTER, optimizer_params=MOMENTUM, devices=2),
    "diloco_average": Scenario("diloco", AVERAGE, optimizer_params=DECAY),
    "diloco_1": Scenario("diloco", {**OUTER, "H": 1}, optimizer_params=PLAIN),
    "diloco_no_momentum": Scenario("diloco", {"H": 2}, optimizer_params=PLAIN),
    "streaming": Scenario("diloco", STREAMING, optimizer_params=MOMENTUM, iterations=11),
    "streaming_tiny": Scenario("diloco", {**STREAMING, "bucket_nbytes": 16}, optimizer_params=MOMENTUM, iterations=11),
    "streaming_fragments": Scenario("diloco", {**OUTER, "H": 2, "fragments": 2}, optimizer_params=MOMENTUM),
    "streaming_over": Scenario("diloco", {**OUTER, "delay": 2, "mix": 0.0}, optimizer_params=PLAIN),
    "streaming_plain": Scenario("diloco", {**OUTER, "fragments": 1, "delay": 0, "mix": 0.0}, optimizer_params=MOMENTUM),
    "streaming_alone": Scenario("diloco", {**OUTER, "fragments": 2, "delay": 1, "mix": 1.0}, optimizer_params=PLAIN),
    "eager": Scenario("eager", OUTER, optimizer_params=MOMENTUM),
    "eager_tiny": Scenario("eager", {**OUTER, "bucket_nbytes": 16}, optimizer_params=MOMENTUM),
    "eager_naive": Scenario("eager", {**OUTER, "local_scale": 0.0}, optimizer_params=MOMENTUM),
    "eager_1": Scenario("eager", {"H": 1, "lr_outer": 0.1, "local_scale": 0.5}, optimizer_params={
        "learning_rate": 1.0}),
}
SCENARIOS.update(WEIGHTS)
SCENARIOS.update({
    "ssgd_nag": Scenario("ssgd", optimizer="nag", optimizer_params={"learning_rate": 0.07, "momentum": 0.9}),
    "odsgd_half": Scenario("odsgd", {"warmup": 0, "lr_local": 0.05}, optimizer_params=PLAIN)})

ASYNC: Dict[str, Scenario] = {
    "asgd": Scenario("asgd", optimizer_params=MOMENTUM, order=ORDER),
    "asgd_tiny": Scenario("asgd", {"bucket_nbytes": 16}, optimizer_params=MOMENTUM, order=ORDER),
    "asgd_replaced": Scenario("asgd", optimizer_params=MOMENTUM, optimizer_at=CHANGES, order=ORDER),
    "asgd_states": Scenario("asgd", optimizer_params=MOMENTUM, states_at=(3, 6), order=ORDER),
    "asgd_two_devices": Scenario("asgd", optimizer_params=MOMENTUM, order=ORDER, devices=2),
    "asgd_lr_at": Scenario("asgd", optimizer_params=MOMENTUM, order=ORDER, lr_at={"3": 0.02}),
    "dcasgd_c": Scenario("dcasgd_c", {"lamda": 0.5}, optimizer_params=MOMENTUM, order=ORDER),
    "dcasgd_a": Scenario("dcasgd_a", {"lamda": 0.5, "m": 0.9}, optimizer_params=MOMENTUM, order=ORDER),
    "dcasgd_c_zero": Scenario("dcasgd_c", {"lamda": 0.0}, optimizer_params=MOMENTUM, order=ORDER),
    "dcasgd_a_zero": Scenario("dcasgd_a", {"lamda": 0.0}, optimizer_params=MOMENTUM, order=ORDER),
    "softsync": Scenario("softsync", optimizer_params=MOMENTUM, order=ORDER),
    "softsync_1": Scenario("softsync", {"n": 1}, optimizer_params=MOMENTUM, order=ORDER),
    "softsync_sum": Scenario("softsync", {"n": 1, "reduction": "sum"}, optimizer_params=MOMENTUM, order=ORDER),
    "softsync_off": Scenario("softsync", {"modulate": False}, optimizer_params=MOMENTUM, order=ORDER),
    "asgd_bare": Scenario("asgd", optimizer_params=BARE, order=ORDER),
    "downpour_bare": Scenario("downpour", optimizer_params=BARE, order=ORDER),
    "downpour_decay": Scenario("downpour", {"T": 3}, optimizer_params=DECAY, order=ORDER),
    "downpour": Scenario("downpour", optimizer_params=MOMENTUM, order=ORDER),
    "downpour_2": Scenario("downpour", {"T": 2, "lr_local": 0.05}, optimizer_params=MOMENTUM, order=ORDER),
    "downpour_apart": Scenario("downpour", {"push_every": 2, "fetch_every": 3}, optimizer_params=MOMENTUM, order=ORDER),
    "easgd": Scenario("easgd", {"T": 2}, optimizer_params=DECAY, order=ORDER),
    "easgd_alone": Scenario("easgd", {"T": 2, "alpha": 0.0}, optimizer_params=DECAY, order=ORDER),
    "easgd_rates": Scenario("easgd", {"T": 2}, optimizer_params=DECAY, order=ORDER, lr_at={"3": 0.02},
                            multipliers=MULT),
    "downpour_rates": Scenario("downpour", {"T": 2}, optimizer_params=MOMENTUM, order=ORDER, lr_at={"3": 0.02},
                               multipliers=MULT),
    "downpour_local": Scenario("downpour", {"T": 3, "lr_local": 0.05}, optimizer_params=MOMENTUM, order=ORDER,
                               lr_local_at={"2": 0.01}),
    "async_diloco": Scenario("async_diloco", {"H": 2, "momentum_outer": 0.9}, optimizer_params=MOMENTUM, order=ORDER),
    "async_diloco_tiny": Scenario("async_diloco", {"H": 2, "momentum_outer": 0.9, "bucket_nbytes": 16},
                                  optimizer_params=MOMENTUM, order=ORDER),
    "async_diloco_c": Scenario("async_diloco", {"H": 2, "momentum_outer": 0.9, "N": 3, "c": 0.25},
                               optimizer_params=DECAY, order=ORDER, lr_at={"3": 0.02}, multipliers=MULT),
    "async_diloco_dylu": Scenario("async_diloco", {"H": 3, "dylu": [0.5, 1.0, 0.75]}, optimizer_params=PLAIN,
                                  order=ORDER),
    "async_diloco_1": Scenario("async_diloco", {"H": 1, "lr_outer": 0.1, "N": 1}, optimizer_params={
        "learning_rate": 1.0}, order=ORDER),
    "decoupled": Scenario("decoupled", {**STREAMING, "H": 3}, optimizer_params=MOMENTUM, order=ORDER),
    "decoupled_mean": Scenario("decoupled", {**STREAMING, "H": 3, "merge": "mean", "grace": 2, "mix": 0.0},
                               optimizer_params=DECAY, order=ORDER, lr_at={"3": 0.02}, multipliers=MULT),
    "decoupled_1": Scenario("decoupled", {"H": 1, "fragments": 1, "delay": 0, "lr_outer": 0.1}, optimizer_params={
        "learning_rate": 1.0}, order=ORDER),
    "asgd_plain": Scenario("asgd", optimizer_params=PLAIN, order=ORDER),
    "eamsgd": Scenario("eamsgd", {"T": 2, "delta": 0.5}, optimizer_params=DECAY, order=ORDER),
    "gluon_momentum": Scenario(None, optimizer_params=MOMENTUM, iterations=ORDER.count(0)),
    "gluon_decay": Scenario(None, optimizer_params=DECAY, iterations=ORDER.count(0)),
}
THIRDS = {"T": 3}
RING: Dict[str, Scenario] = {
    "gluon": Scenario(None, optimizer_params=MOMENTUM),
    "gluon_plain": Scenario(None, optimizer_params=PLAIN),
    "gluon_adam": Scenario(None, optimizer="adam", optimizer_params=PLAIN),
    "dsync": Scenario("dsync", optimizer_params=MOMENTUM),
    "dsync_plain": Scenario("dsync", optimizer_params=PLAIN),
    "dsync_sum": Scenario("dsync", {"reduction": "sum"}, optimizer_params=MOMENTUM),
    "dsync_adam": Scenario("dsync", optimizer="adam", optimizer_params=PLAIN),
    "dsync_lamb": Scenario("dsync", optimizer="lamb", optimizer_params=PLAIN),
    "dsync_schedule": Scenario("dsync", optimizer_params=MOMENTUM, schedule=(2, 0.5)),
    "dsync_mult": Scenario("dsync", optimizer_params=MOMENTUM, multipliers=MULT),
    "dsync_tiny": Scenario("dsync", {"bucket_nbytes": 16}, optimizer_params=MOMENTUM),
    "dsync_two_devices": Scenario("dsync", optimizer_params=MOMENTUM, devices=2),
    "pipesgd_1": Scenario("pipesgd", {"K": 1}, optimizer_params=MOMENTUM),
    "pipesgd": Scenario("pipesgd", optimizer_params=MOMENTUM),
    "pipesgd_plain": Scenario("pipesgd", optimizer_params=PLAIN),
    "pipesgd_lr_at": Scenario("pipesgd", optimizer_params=MOMENTUM, lr_at={"3": 0.02, "5": 0.2}),
    "dsync_replaced": Scenario("dsync", optimizer_params=MOMENTUM, optimizer_at=CHANGES),
    "dsync_states": Scenario("dsync", optimizer_params=MOMENTUM, states_at=(3, 6)),
    "pipesgd_replaced": Scenario("pipesgd", optimizer_params=MOMENTUM, optimizer_at=CHANGES),
    "pipesgd_states": Scenario("pipesgd", optimizer_params=MOMENTUM, states_at=(3, 6)),
    "pipesgd_3": Scenario("pipesgd", {"K": 3, "bucket_nbytes": 16}, optimizer_params=MOMENTUM),
    "pipesgd_warmup": Scenario("pipesgd", {"K": 3, "warmup": 3}, optimizer_params=MOMENTUM),
    "pipesgd_all_warmup": Scenario("pipesgd", {"warmup": 8}, optimizer_params=MOMENTUM),
    "acco": Scenario("acco", optimizer_params=MOMENTUM),
    "acco_sum": Scenario("acco", {"reduction": "sum"}, optimizer_params=PLAIN),
    "acco_tiny": Scenario("acco", {"bucket_nbytes": 16}, optimizer_params=MOMENTUM),
    "acco_lr_at": Scenario("acco", optimizer_params=MOMENTUM, lr_at={"3": 0.02, "5": 0.2}, multipliers=MULT),
    "sasgd": Scenario("sasgd", optimizer_params=PLAIN),
    "sasgd_decay": Scenario("sasgd", optimizer_params=DECAY),
    "sasgd_3": Scenario("sasgd", THIRDS, optimizer_params=DECAY),
    "sasgd_tiny": Scenario("sasgd", {**THIRDS, "bucket_nbytes": 16}, optimizer_params=DECAY),
    "sasgd_rates": Scenario("sasgd", {**THIRDS, "gamma_p": 0.03}, optimizer_params=DECAY, lr_at={"3": 0.02},
                            multipliers=MULT),
    "sasgd_local": Scenario("sasgd", {**THIRDS, "lr_local": 0.05}, optimizer_params=DECAY, lr_local_at={"4": 0.2}),
    "delayed": Scenario("delayed", {"transport": "ring"}, optimizer_params=MOMENTUM),
    "delayed_plain": Scenario("delayed", {"transport": "ring"}, optimizer_params=PLAIN),
    "delayed_lr_at": Scenario("delayed", {"transport": "ring"}, optimizer_params=MOMENTUM,
                              lr_at={"3": 0.02, "5": 0.2}),
    **{name: dataclasses.replace(SCENARIOS[name], options={**SCENARIOS[name].options, "transport": "ring"})
       for name in ("odsgd", "odsgd_sum", "odsgd_none", "odsgd_schedule", "odsgd_a", "odsgd_mult", "odsgd_tiny",
                    "odsgd_replaced", "odsgd_states", *WEIGHTS)},
}
CODED: Dict[str, Scenario] = {
    f"{name}_{codec}": Scenario(store, {**options, "codec": codec}, optimizer_params=MOMENTUM)
    for name, store, options in (("pipesgd", "pipesgd", {}), ("pipesgd_1", "pipesgd", {"K": 1}), ("dsync", "dsync", {}))
    for codec in ("truncate", "quantize")}
LONG: Dict[str, Scenario] = {
    f"long_{codec}": Scenario("pipesgd", {"codec": codec}, optimizer_params=PLAIN, iterations=200)
    for codec in ("none", "truncate", "quantize")}
SHARDED: Dict[str, Scenario] = {
    name: dataclasses.replace(scenario, options={**scenario.options, "transport": "sharded"}) if scenario.store
    else scenario for name, scenario in SCENARIOS.items()}
#: Codecs there, and there and back; with servers. Those of a few bits at a gradient's size.
WAYS: Dict[str, Dict[str, Any]] = {
    "float16": {"codec": "float16"}, "truncate": {"codec": "truncate"}, "quantize": {"codec": "quantize"},
    "2bit": {"codec": "2bit", "codec_threshold": 0.25}, "1bit": {"codec": "1bit", "codec_threshold": 0.125},
    "back": {"codec_weights": "quantize"}, "both": {"codec": "quantize", "codec_weights": "float16"},
    "both_2bit": {"codec": "2bit", "codec_weights": "truncate"}}
ONE = {"bucket_nbytes": 4096}  # one bucket, whatever the number of servers: `quantize` has a scale per bucket
CODED_SYNC: Dict[str, Scenario] = {
    **{f"{store}_{way}": Scenario(store, {**SCENARIOS[store].options, **ONE, **options}, optimizer_params=PLAIN)
       for store in ("ssgd", "odsgd", "delayed") for way, options in WAYS.items()},
    "ssgd_2bit_tiny": Scenario("ssgd", {**WAYS["2bit"], "bucket_nbytes": 16}, optimizer_params=PLAIN),
    "odsgd_float16_tiny": Scenario("odsgd", {**LOCAL, **WAYS["float16"], "bucket_nbytes": 16}, optimizer_params=PLAIN),
    "sparseloco": Scenario("sparseloco", {**ONE, "H": 2, "k": 5, "codec_weights": "bfloat16"},
                           optimizer_params=MOMENTUM),
    "ssgd_both_adam": Scenario("ssgd", {**ONE, **WAYS["both"]}, optimizer="adam", optimizer_params=PLAIN)}
CODED_ASYNC: Dict[str, Scenario] = {
    f"{store}_{way}": dataclasses.replace(ASYNC[store], options={**ASYNC[store].options, **WAYS[way]},
                                          optimizer_params=PLAIN)
    for store in ("asgd", "dcasgd_c", "softsync", "downpour_2") for way in ("quantize", "2bit", "both")}
SCENARIOS_OF = {"coded": CODED_SYNC, "coded async": CODED_ASYNC,
                "sync": SCENARIOS, "sharded": SHARDED, "async": ASYNC, "ring": {**RING, **CODED, **LONG}}


def run_all(worker_rank: int, names: List[str], kind: str = "sync") -> Dict[str, np.ndarray]:
    """Several scenarios of a kind one after the other; results as ``NAME/path`` and ``NAME/final``.

    One that fails leaves its traceback as ``NAME/error``, and the next one has its turn.
    """
    results: Dict[str, np.ndarray] = {}
    for name in names:
        try:
            for part, array in train(SCENARIOS_OF[kind][name], worker_rank).items():
                results[f"{name}/{part}"] = array
        except Exception:
            traceback.print_exc()  # the job may still die of it
            results[f"{name}/error"] = np.array(traceback.format_exc())
    return results


def run_kinds(worker_rank: int, names_of: Dict[str, List[str]]) -> Dict[str, np.ndarray]:
    """Scenarios of several kinds one after the other; results as ``KIND/NAME/path`` …"""
    return {f"{kind}/{part}": array for kind, names in names_of.items()
            for part, array in run_all(worker_rank, names, kind).items()}
