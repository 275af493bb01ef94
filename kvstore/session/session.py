"""One model in training: its buckets, a worker for each, and the iteration it is in. Flat arrays in, flat arrays out.

A front end (`kvstore.fronts.gluon`) knows parameters, devices and a trainer; a session does not. docs/design.md,
"Interfaces", shows its calls. In a training step no call waits for the network, except for `iterate` of `acco`, whose
trial steps do; other calls say so if they wait.
"""
import dataclasses
import functools
import json
from collections import deque
from typing import Any, Callable, Deque, Dict, Iterable, List, Optional, Sequence, Tuple, Type

import numpy as np

from kvstore import methods
from kvstore.engine.engine import NDArray
from kvstore.errors import ConfigError
from kvstore.job.deadlines import deadlines
from kvstore.job.environment import joined_at, lost_workers
from kvstore.job.pulse import pulse
from kvstore.messages.buckets import WIRE_DTYPE, Bucket, Parameter, in_fragments
from kvstore.messages.codecs import codec
from kvstore.messages.finite import finite, names, skips
from kvstore.messages.header import SUM_SIZES
from kvstore.messages.seam import GlobalWeights, Pending, Servers, Setup, Transport
from kvstore.methods import fit
from kvstore.methods.common import Options
from kvstore.methods.contract import Method, Step, Update, Worker
from kvstore.methods.local_optimizers import FORMULAS, MXNET, PLAIN, SCALED
from kvstore.optimizers import described as optimizers
from kvstore.optimizers.apply import QueuedOptimizer, formula_of
from kvstore.optimizers.described import Optimizer
from kvstore.session.staleness import Staleness
from kvstore.tracing import recorder, wraps
from kvstore.weights.on_workers import Parts, Replicas, WeightsOnWorkers

HOLDERS: Dict[str, Callable[[Any], GlobalWeights]] = {
    "server": lambda servers: servers, "ring": Replicas, "sharded": Parts}
"""What holds the global weights, by the kind of transport."""


class Session:
    """One method on one transport, for one model.

    Invariants
      1. `workers` and `w_local` have an entry per bucket, from `begin` on.
      2. `step` is the iteration that was begun last; the session alone counts. Methods know of no iteration that was
         left out.
    """

    def __init__(self, method: Type[Method], options: Options, transport: Transport) -> None:
        self.transport, self.timeout_s = transport, options.timeout_s
        self._who_is_late = ("another worker or a server" if transport.kind == "server" else
                             "another worker") + " is late, stopped or unreachable"
        self.method = method(options.in_iterations(), transport.num_workers)
        self.recorder = recorder.begin("worker", transport.worker_rank, transport.num_workers)
        self.weights_holder = HOLDERS[transport.kind](transport)
        if self.recorder is not None:
            wraps.messages(self.recorder, transport, numbered=not method.asynchronous)
            wraps.iterations(self.recorder, self)
        self.step = Step(0, 0.0, 0.0)
        self.left_out = 0
        self.since = 0
        """The iteration from which on the global optimizer counts its updates."""
        self.lr_given: Optional[float] = None
        """The learning rate before any schedule; None: the optimizer's at `begin`."""
        self.buckets: List[Bucket] = []
        self.workers: Dict[int, Worker] = {}
        self.w_local: Dict[int, NDArray] = {}  # what `iterate` returned last
        self.joined = False
        """Whether this worker's data have ended, and not all others', so that it takes no step of its own."""
        self.optimizer: Optimizer = None
        self.outer: Optimizer = None  # U, if the method has one of its own
        self._stepped: Dict[int, NDArray] = {}  # what the trainer's optimizer makes of this worker's weights
        self.samples = 1.0  # examples that an iteration of this worker has, where it is known
        self.counted: Deque[float] = deque(maxlen=max(self.method.intervals(self.method.options)))
        """What the gradients of the last iterations, as many as a round has so far, were multiplied by."""
        self.sampled: Deque[float] = deque(maxlen=self.counted.maxlen)
        """Examples that these iterations had."""
        self.local_optimizer: Optional[Optimizer] = None
        self.local_steps: Dict[int, QueuedOptimizer] = {}
        self.own_step: Dict[str, Any] = {}  # what must be the same on all workers about the script's own steps
        if transport.joins and not self.method.admits(self.method.options):
            raise ConfigError(f"nobody can join a running job of `{self.method.name}` with these options: that takes "
                              "`decoupled` or `async_diloco`, without replay and codec_weights")
        if transport.joins:
            self.resume(joined_at())

    # -- before the first step -----------------------------------------------------------------------------------

    def use(self, optimizer: Optional[Optimizer]) -> None:
        """The global optimizer. Its settings travel to the servers, if there are any.

        Where the method takes weights, it is the optimizer of this worker's own steps; None: the script takes them.
        """
        outer = self.method.outer_sgd(self.method.options)
        if outer is not None:
            self.outer = optimizers.outer_sgd(*outer)
            self._check_optimizer(self.outer)
            self.optimizer = self.outer if optimizer is None else optimizer
            self._use_inner(optimizer)
            return
        self._check_optimizer(optimizer)
        self.optimizer = optimizer
        local = self.method.local_optimizer(self.method.options)
        if local is not None:
            self.local_optimizer = optimizers.create_local(local[0], {**local[1], "wd": self._wd_local()}, optimizer)
            self._check_skips(self.local_optimizer)

    def _use_inner(self, optimizer: Optional[Optimizer]) -> None:
        """A copy takes this worker's steps: the trainer goes on setting the rate and the scale of its own."""
        if optimizer is not None:
            if type(optimizer).__name__.startswith("DCASGD"):
                raise ConfigError(f"store `{self.method.name}` moves weights between two steps, and "
                                  f"`{type(optimizer).__name__.lower()}` takes that for the delay of a gradient; give "
                                  "the trainer another optimizer")
            self.local_optimizer = optimizers.build(optimizers.describe(optimizer), trusted=True)
            self._check_skips(self.local_optimizer)

    @property
    def global_optimizer(self) -> Optimizer:
        """U: the trainer's, unless the method has its own."""
        optimizer = self.outer or self.optimizer
        assert optimizer is not None
        return optimizer

    def _wd_local(self) -> float:
        """Weight decay of local steps: the trainer's, unless the method has one."""
        local = self.method.local_optimizer(self.method.options)
        own = None if local is None else local[1].get("wd")
        return float(self.optimizer.wd if own is None else own)

    def _check_optimizer(self, optimizer: Optimizer) -> None:
        """ConfigError, before anything has started, if it cannot be the global one."""
        hint, name = self.method.plain_sgd, self.method.name
        if hint and (formula_of(optimizer) is None or type(optimizer).__name__ != "SGD" or optimizer.momentum):
            raise ConfigError(f"store `{name}` takes SGD steps of its own: the optimizer must be `sgd` without "
                              f"momentum or clip_gradient (momentum: {hint})")
        if not self.method.update_decays and optimizers.decays_apart(optimizer) and optimizer.wd:
            raise ConfigError(f"store `{name}` adds weight decay to gradients, and {type(optimizer).__name__} keeps it "
                              "apart from them; set weight decay to 0, or take another optimizer, as SGD or Adam")
        optimizers.describe(optimizer)  # complains if it cannot travel
        if isinstance(self.weights_holder, WeightsOnWorkers):
            self._check_skips(optimizer)
            if type(optimizer).__name__ == "SGLD":
                raise ConfigError(f"store `{name}` takes the same steps on all workers, and SGLD draws noise on each; "
                                  "take a store of servers")

    def _check_skips(self, on_this_worker: Optimizer) -> None:
        if self.method.options.on_nan == "skip" and formula_of(on_this_worker) is None:
            raise ConfigError("on_nan `skip`: here workers take steps (local ones, or all without servers), and can "
                              "leave out only those of `sgd` without clip_gradient; take that for them, or `stop`")

    def change(self, options: Dict[str, Any]) -> None:
        """Other values for some options of the method. Before `plan`."""
        method = type(self.method)
        fit.check_names(method, options)
        changed = dataclasses.replace(self.method.options, **options)
        fit.check(method, changed, self.transport.kind)
        self.method = method(changed, self.transport.num_workers)

    def model(self) -> List[str]:
        """Lines that must be the same on all workers, beside those of the parameters."""
        options = ", ".join(f"{name}={value}" for name, value in self.method.options.plain().items())
        lines = [f"store {self.method.name}: {options}"]
        if self.optimizer is not None:
            lines.append(f"optimizer {json.dumps(optimizers.describe(self.optimizer), sort_keys=True)}")
        if self.own_step:
            lines.append(f"the script's own steps {json.dumps(self.own_step, sort_keys=True)}")
        return lines

    def plan(self, parameters: Sequence[Parameter]) -> List[Bucket]:
        """Lay out the buckets. The last parameters come first, since their gradients appear first."""
        method, M = type(self.method), self.transport.num_workers
        self.method = method(method.fitted(self.method.options, len(parameters)), M)
        self._own_options = method.of_worker(self.method.options, self.transport.worker_rank)
        parameters = in_fragments(parameters, method.fragments(self.method.options))
        used = self.global_optimizer, self.local_optimizer
        self._traffic = self.method.traffic(whole=not all(map(optimizers.elementwise, used)))
        self.buckets = self.transport.plan(parameters, self._traffic)
        if self.transport.worker_rank == 0:
            self.method.check_buckets([bucket.id for bucket in self.buckets])
        return self.buckets

    def begin(self, weights: Callable[[Bucket], NDArray],
              w_local: Optional[Callable[[Bucket], NDArray]] = None) -> None:
        """Give whatever holds the global weights its rule and W_0. Collective; waits.

        `w_local`: the weights that the first gradients are taken at; None: W_0.
        """
        method, optimizer, setup = self.method, self.optimizer, self._setup()
        stops_here = self._traffic.on_nan == "stop" and codec(self._traffic.codec).residual  # all its sums are finite
        self.transport.on_nan = "find" if stops_here else self._traffic.on_nan
        pulse.asynchronous = method.asynchronous
        first_answers = self.weights_holder.set_up(setup, weights)
        local = self.local_optimizer  # an optimizer of the user's own may write to the gradient
        self._has_room = method.worker.sends_gradient_in_place and (local is None or optimizers.known(local))
        for bucket in self.buckets:
            own = first_answers[bucket.id].result() if w_local is None else w_local(bucket)
            self.w_local[bucket.id] = own
            if self.outer is not None and self.local_optimizer is not None:
                self._stepped[bucket.id] = own.copy()
            self.workers[bucket.id] = method.worker(
                options=method.options, num_workers=method.num_workers, bucket=bucket,
                weights_holder=self.weights_holder, last_exchange=first_answers[bucket.id],
                wd=optimizer.wd * bucket.first.wd_mult,
                lr_given=self._lr_of(optimizer),
                local_optimizer=self._local_step(bucket, own), update=self._update(bucket), begun=self.step.t,
                w_local=own)

    def _setup(self) -> Setup:
        keys = {bucket.id: bucket.first.key for bucket in self.buckets}
        described = optimizers.describe(self.global_optimizer)
        whole = not optimizers.elementwise(self.global_optimizer)  # LARS looks at names
        described["names"] = optimizers.names(self.global_optimizer, keys) if whole else {}
        of_parameters = self.buckets if self.outer is None else ()
        described["lr_mult"] = {bucket.id: bucket.first.lr_mult for bucket in of_parameters}
        described["wd_mult"] = {bucket.id: bucket.first.wd_mult for bucket in of_parameters}
        if not self.method.update_decays:
            described["settings"]["wd"] = 0.0
        local = self.local_optimizer
        own = self.own_step if local is None else {"optimizer": type(local).__name__, "lr": self._lr_of(local)}
        return Setup(methods.where(type(self.method)), self.method.options.plain(), described, self.buckets,
                     self._traffic, own)

    def _lr_of(self, optimizer: Optimizer) -> float:
        """The rate before any schedule, which may stand in the scheduler alone."""
        lr = self.lr_given if self.lr_given is not None else optimizer.lr
        return float(optimizer.lr_scheduler.base_lr if lr is None else lr)

    def _local_step(self, bucket: Bucket, w: NDArray) -> Optional[Update]:
        if self.local_optimizer is None:
            return None
        multipliers = self.local_optimizer.lr_mult, self.local_optimizer.wd_mult
        multipliers[0][bucket.id], multipliers[1][bucket.id] = bucket.first.lr_mult, bucket.first.wd_mult
        if not optimizers.elementwise(self.local_optimizer):  # LARS looks at names
            self.local_optimizer.idx2name.update(optimizers.names(self.optimizer, {bucket.id: bucket.first.key}))
        step = self.local_steps[bucket.id] = QueuedOptimizer(self.local_optimizer, bucket.id, bucket.shape)
        step.start(w)
        if self.method.options.on_nan == "skip":
            step.skips = lambda grad: not finite(grad)
            step.reporting_skips = lambda: functools.partial(
                skips, f"worker {self.transport.worker_rank}, iteration {self.step.t}", names(bucket))
        return step if self.recorder is None else wraps.update(self.recorder, step, bucket, "local update")

    def _update(self, bucket: Bucket) -> Optional[Update]:
        if not isinstance(self.weights_holder, WeightsOnWorkers):
            return None
        update = self.weights_holder.updates[bucket.id]
        return update if self.recorder is None else wraps.update(self.recorder, update, bucket, "update")

    def advice(self) -> Optional[str]:
        """The method's, or a warning where local steps at the global optimizer's rate would be far smaller than its
        own; else None."""
        if self.method.advice() is not None:
            return self.method.advice()
        mine, theirs = type(self.local_optimizer).__name__.lower(), type(self.optimizer).__name__.lower()
        if mine not in PLAIN or theirs not in SCALED:
            return None
        same = theirs if theirs in {*MXNET, *FORMULAS} else "adam"
        instead = f"make the store with optimizer_local=\"{same}\", or give " if (
            "optimizer_local" in self.method.option_names()) else "give "
        return (f"`{self.method.name}` takes local steps by {mine} at the rate of {theirs}, which are far smaller than "
                f"{theirs}'s own, so that workers compute on weights that lack an update; {instead}lr_local")

    # -- between two steps ---------------------------------------------------------------------------------------

    def check_successor(self, optimizer: Optimizer) -> None:
        """ConfigError if it cannot take the place of the global optimizer in use."""
        self._check_optimizer(optimizer)
        if not (self._traffic.whole or optimizers.elementwise(optimizer)):
            raise ConfigError(f"optimizer {type(optimizer).__name__} looks at each parameter as a whole, and in "
                              f"this store several share an array, as {type(self.optimizer).__name__} allows; make a "
                              "new store for it")

    def replace(self, optimizer: Optimizer) -> None:
        """Another global optimizer from here on, which begins as a new one. Collective, with nothing in flight; waits.

        What a method takes from it (weight decay, the rate before a schedule) is the new one's. Local steps go on with
        the state they have, and rules and workers with what they hold.
        """
        self.lr_given = None  # it was that of the optimizer before
        self.optimizer = optimizer
        self.set_updates(optimizer.num_update - optimizer.begin_num_update)
        if self.outer is not None:
            self._use_inner(optimizer)
            for bucket in self.buckets:
                self.workers[bucket.id].local_optimizer = self._local_step(bucket, self.w_local[bucket.id])
            return
        servers_told = False
        while not servers_told:  # the worker that leads may be lost before it tells them
            leads = self.leads
            self.weights_holder.use(self._setup(), self.global_weights, leads)
            servers_told = bool(self.transport.total(np.array([leads], np.float32)).any())
        for bucket in self.buckets:
            worker = self.workers[bucket.id]
            worker.wd = optimizer.wd * bucket.first.wd_mult
            worker.lr_given = self._lr_of(optimizer)
            worker.replaced(optimizers.learning_rate(optimizer, optimizer.num_update + 1))
        if self.local_optimizer is not None:
            self.local_optimizer.wd = self._wd_local()

    def set_updates(self, updates: int) -> None:
        """The global optimizer has done this many updates; schedules go on from there."""
        self.since = self.step.t - updates

    # -- every step ----------------------------------------------------------------------------------------------

    @property
    def iteration(self) -> int:
        return self.step.t + self.left_out

    def next_step(self, lr: float, lr_local: Optional[float], counts: float = 1.0) -> Step:
        """The next iteration begins; `lr_local` None: as `lr`. Its gradients are multiplied by `counts`; local steps
        divide by it again, and what a round of local steps sends is multiplied by it.
        """
        self.step = Step(self.step.t + 1, lr, lr if lr_local is None else lr_local, counts, self.samples, self.joined)
        self.counted.append(counts)
        self.sampled.append(self.samples)
        for local_step in self.local_steps.values():
            local_step.factor = 1.0 / counts
        self.transport.iteration = self.step.t
        pulse.moved(self.iteration)
        return self.step

    def leave_out(self) -> None:
        """Count an iteration without gradients, in which nothing changes; in a synchronous job, on all workers."""
        self.left_out += 1
        pulse.moved(self.iteration)

    def resume(self, t: int, lr: float = 0.0, lr_local: float = 0.0, left_out: int = 0, since: int = 0) -> None:
        """Iteration `t` is done, with these rates; `left_out` and `since` as the attributes."""
        self.step, self.left_out, self.since = Step(t, lr, lr_local), left_out, since

    def room(self, bucket: Bucket) -> Optional[NDArray]:
        """Where the bucket's next gradient is best written; None: anywhere."""
        return self.weights_holder.room(bucket) if self._has_room else None

    def each(self, function: Callable[[Any], None], lanes: Iterable[Any]) -> None:
        for lane in lanes:
            function(lane)

    def iterate(self, bucket: Bucket, grad: NDArray, step: Step) -> NDArray:
        """One bucket's part of the iteration; returns the weights of the next one, at once. The session owns them."""
        if self.outer is None:
            w = self.w_local[bucket.id] = self.workers[bucket.id].iterate(grad, step)
            return w
        self._inner_step(bucket, grad, step)
        x = self.w_local[bucket.id]
        due = self.method.due(self._own_options, step.t, bucket.first.fragment)
        return self.iterate_weights(bucket, x, step) if due else x

    def _inner_step(self, bucket: Bucket, grad: NDArray, step: Step) -> None:
        """A step of the trainer's optimizer on this worker's weights; the answers of exchanges are not written to."""
        update = self.local_steps.get(bucket.id)
        if update is not None and not self.joined and not self.first_of_joiner(step.t):
            update.skips = update.skips and update.reporting_skips()  # no server sees this gradient
            self.w_local[bucket.id] = update(self.w_local[bucket.id], grad, step.lr, out=self._stepped[bucket.id])

    def first_of_joiner(self, t: int) -> bool:
        """Whether the gradient of iteration `t` was taken at weights that a worker made before it got its job's."""
        return self.transport.joins and t <= joined_at() + 1

    def due(self) -> List[int]:
        """The fragments for which `Worker.iterate` has its turn in this iteration."""
        method, own = self.method, self._own_options
        return [one for one in range(method.fragments(own)) if method.due(own, self.step.t, one)]

    @property
    def sends_at_once(self) -> bool:
        """Whether all buckets have their turns in the same iterations."""
        return self.method.fragments(self._own_options) == 1

    def unsent(self) -> Tuple[int, int]:
        """Steps of this worker since it sent last, and from one exchange to the next."""
        every = self.method.intervals(self._own_options)[0]
        if self.method.takes == "weights":
            return len(self.sampled) if self.sends_at_once else 0, every  # some fragment always lacks steps
        return self.step.t % every if self.method.asynchronous else 0, every  # sasgd adds up what is unsent

    def iterate_weights(self, bucket: Bucket, x: NDArray, step: Step) -> NDArray:
        """`iterate` where the method takes weights and has its turn: `x` are this worker's weights."""
        step = dataclasses.replace(step, counts=min(self.counted, default=1.0),
                                   samples=sum(self.sampled) / len(self.sampled))
        worker = self.workers[bucket.id]
        before = worker.last_exchange
        w = self.w_local[bucket.id] = worker.iterate(x, step)
        if worker.last_exchange is not before and self.sends_at_once and bucket is self.buckets[-1]:
            self.counted.clear()  # another round begins
            self.sampled.clear()
        return w

    # -- of all workers ------------------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether this worker does the work that one worker does for all: worker 0, or the lowest rank that the job has
        not lost. A worker that has joined later never leads."""
        mine, lost = self.transport.worker_rank, lost_workers()
        others = (rank for rank in range(self.transport.num_workers) if rank == mine or rank not in lost)
        return not self.transport.joins and mine == next(others)

    def mean(self, array: np.ndarray) -> np.ndarray:
        """The mean over the workers that take part. Waits.

        A worker may be lost between two pieces of a sum. A piece has whole blocks, and each block begins with a count
        of workers. Numbers are divided by a power of two before the sum, so that even the largest have a mean.
        """
        part, largest = 0.5 ** (self.transport.num_workers - 1).bit_length(), np.finfo(np.float32).max
        flat, block = array.reshape(-1) * np.float32(part), min(SUM_SIZES)
        counted = self.transport.total(np.insert(flat, range(0, flat.size, block - 1), 1))
        counts = np.repeat(counted[::block], block - 1)[:flat.size]
        sums = np.delete(counted, slice(None, None, block))
        with np.errstate(over="ignore"):
            means = np.asarray(sums / (counts * np.float32(part)))
        rounded = np.isfinite(sums) & np.isinf(means)
        return np.where(rounded, np.copysign(largest, means), means).reshape(array.shape)

    def statistics(self) -> Staleness:
        """What the servers of an asynchronous job have counted so far. Waits for them alone."""
        if not self.method.asynchronous or not isinstance(self.weights_holder, Servers):
            raise ConfigError("statistics are for asynchronous stores; elsewhere every gradient's staleness is known")
        counted = self.weights_holder.statistics()
        return Staleness.of([counted[bucket.id] for bucket in self.buckets])

    # -- to look at it -------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until all that this worker has asked for has arrived."""
        with self.deadline():
            for worker in self.workers.values():
                worker.wait()

    def deadline(self) -> Any:
        return deadlines.waiting_for(f"the wait for the answers of iteration {self.iteration}", self.timeout_s,
                                     self._who_is_late)

    def global_weights(self, bucket: Bucket) -> NDArray:
        """W of one bucket (`Worker.global_weights`)."""
        return self.workers[bucket.id].global_weights(self.step)

    def memory(self) -> Dict[str, int]:
        """Bytes that the method keeps on this worker, by ``NAME: MEANING``."""
        counted: Dict[str, int] = {}
        for key, worker in self.workers.items():
            for name, meaning in worker.arrays.items():
                self._count(counted, f"{name}: {meaning}", getattr(worker, name))
            self._count(counted, "local weights: what the trainer's optimizer makes of them", self._stepped.get(key))
            if self.outer is not None:
                answer = worker.last_exchange.untaken()
                self._count(counted, "theta: the global weights that the last exchange brought", answer)
                self._count(counted, "in flight: what the next one sends and brings", answer)
            if key in self.local_steps:
                self._count(counted, "state of the local optimizer", list(self.local_steps[key].arrays().values()))
            for name, array in self.weights_holder.codec_state(worker.bucket).items():
                self._count(counted, f"{name}: what the codec has left of the gradients", array)
        return counted

    @staticmethod
    def _count(counted: Dict[str, int], label: str, value: Any) -> None:
        for array in value if isinstance(value, (list, deque)) else [] if value is None else [value]:
            array = array.untaken() if isinstance(array, Pending) else array
            counted[label] = counted.get(label, 0) + array.size * WIRE_DTYPE.itemsize
