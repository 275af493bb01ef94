"""What MXNet's own stores can do beside `broadcast` and `pushpull`: older calls, the optimizer's state in a file."""
from typing import Any, Callable, List, Optional

import numpy as np

from kvstore.engine._mxnet import NDArray, mx
from kvstore.errors import ConfigError, ProtocolError
from kvstore.fronts.base import warn_once
from kvstore.fronts.gluon.lanes import Keyed
from kvstore.fronts.gluon.store import Store, as_list, each
from kvstore.job import agreement, environment
from kvstore.messages.seam import Saved
from kvstore.session import saving
from kvstore.state.npz import read_npz, write_npz

EXACT = 2 ** 24
_MORE = ("which keeps more than them (versions and backups, unfinished intervals, sums in flight, weights that "
         "travelled, workers' own optimizers); use odsgd.checkpoint.keep, or `odsgd train --resume`")


class LegacyStore(Store):
    """A `Store` for every script that knows MXNet's: what `kvstore.create` makes.

    For the older calls the store keeps the weights in arrays of its own.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.stands_for: Optional[str] = None
        """The store of MXNet's that the script has asked for, and thinks it has (`odsgd launch --store`)."""
        self._combine: Callable[[Any, NDArray, NDArray], None] = lambda key, total, weight: total.copyto(weight)

    @property
    def type(self) -> str:
        return self.stands_for or self.name

    def init(self, key: Any, value: Any) -> None:
        """The initial weights of `key`: worker 0's. Collective; waits."""
        with mx.autograd.pause():  # the first forward pass that reads row-sparse weights calls it
            values = [as_list(its)[0].tostype("default") for _, its in each(key, value)]
            keys = [one for one, _ in each(key, value)]
            super().broadcast(keys, values, out=[its.copy() for its in values])
            for one in keys:
                self._keyed[one].own = self._keyed[one].weights[0]

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        super().broadcast(key, value, out)
        if self.session.optimizer is None:  # sums go to arrays of the store's own
            for one, _ in each(key, out):
                self._keyed[one].weights = [array.copy() for array in self._keyed[one].weights]

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Hand in the gradients of `key`, one array per device. An iteration begins once all keys have theirs.

        A store without an optimizer adds arrays up, key by key: see `_aggregate`.
        """
        for one, grads in each(key, value):
            known = self._known(one)
            if self.session.optimizer is None:
                self._aggregate(known, as_list(grads))
            else:
                self.pushpull(one, grads, out=known.weights)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        if self.session.optimizer is None:
            self.push(key, value)
            self.pull(key, value if out is None else out, ignore_sparse=False)
        else:
            super().pushpull(key, value, out)

    def _set_updater(self, updater: Callable[[Any, NDArray, NDArray], None]) -> None:
        """For a store without an optimizer: ``updater(key, pushed, value)`` updates a key's value after each push.
        Every worker calls it on its own copy of the value, with the same sum.
        """
        if self.session.optimizer is not None:
            raise ConfigError("a store has an optimizer or an updater, and this one has an optimizer; make another "
                              "store for the updater (docs/how-to/mxnet-kvstore.md)")
        self._combine = updater

    def _send_command_to_servers(self, head: int, body: str) -> None:
        raise ConfigError("servers of this store take no commands from scripts, which are not signed; settings go with "
                          "kvstore.create (docs/how-to/mxnet-kvstore.md)")

    def _aggregate(self, known: Keyed, arrays: List[NDArray]) -> None:
        """The sum over devices and workers, or the mean over workers, becomes the value of the key, unless an updater
        makes something else of it. Sums are of single precision. Collective; waits.
        """
        self._check_usable()
        self._share()
        workers = self.num_workers if self.options.reduction == "mean" else 1
        mine = sum(array.tostype("default").asnumpy() for array in arrays)
        weight = known.weights[0]
        if np.issubdtype(weight.dtype, np.integer) and self.allreduce(abs(mine)).max(initial=0) >= EXACT:
            raise ConfigError(f"push of {known.parameter.name}: sums are of single precision, which holds whole "
                              f"numbers below {EXACT}, and here is a larger one; push floats if the nearest will do")
        total = self.allreduce(mine) / workers
        self._combine(known.parameter.key, mx.nd.array(total, weight.context, weight.dtype), weight)
        for array in known.weights[1:]:
            weight.copyto(array)

    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """`out`, one array or one per device, will hold the weights of `key` after the last whole iteration.

        Between the gradients of `key` and the last ones of their iteration it raises, unless `out` will hold the
        weights anyway: those that the caller expects are not there before all keys have been handed in.
        """
        self._check_usable()
        self._share()
        for one, outs in each(key, out):
            arrays = [array for array in as_list(outs) if not (ignore_sparse and array.stype != "default")]
            if one in self._handed:
                known = self._known(one)
                arrays = [array for array in arrays if not any(array is mine for mine in known.weights)]
                if arrays and known.own is None and known.row_sparse:  # whose pusher pulls into its weights at once
                    self._use(one, known.grads, as_list(outs))  # new ones: reset_ctx, a batch of another size
                    arrays = []
            self._check_updated("pull", one, arrays)
            for array in arrays:
                weight = self._weight(one, array)
                if weight is not array:
                    (weight if array.stype == weight.stype else weight.tostype(array.stype)).copyto(array)

    def row_sparse_pull(self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None) -> None:
        """Write the rows `row_ids` of `key` after the last whole iteration into `out`, row-sparse arrays."""
        if row_ids is None:
            raise ConfigError(f"row_sparse_pull of {key} without row_ids; say which rows, or use pull")
        self._check_usable()
        self._share()
        for one, outs, rows in each(key, out, row_ids):
            self._check_updated("row_sparse_pull", one, as_list(outs))
            weight, arrays, ids = self._weight(one), as_list(outs), as_list(rows)
            with mx.autograd.pause():  # as `init`
                for array, wanted in zip(arrays, ids if len(ids) == len(arrays) else ids * len(arrays)):
                    _rows(weight, np.unique(wanted.asnumpy())).copyto(array)

    def _weight(self, key: Any, out: Optional[NDArray] = None) -> NDArray:
        """What the store has for `key`, or shows now: in an array of the store's, in `out` if that fits, or in a new
        one. For a key that is trained the script's arrays are not read: they may hold something else by now.
        """
        known = self._known(key)
        first = known.weights[0]
        if first is known.own or key not in self._lanes_of:
            return first
        shape, dtype = known.parameter.shape, known.parameter.dtype
        if out is None or (out.stype, out.shape, np.dtype(out.dtype).name) != ("default", shape, dtype):
            out = mx.nd.empty(shape, first.context, dtype)
        for lane in self._lanes_of[key]:
            flat = self._shown[-1].weights[self.lanes.index(lane)] if self._shown else \
                self.session.w_local[lane.bucket.id]
            lane.show_one(flat, key, out)
        return out

    def _barrier(self) -> None:
        self.barrier()

    @property
    def num_dead_node(self) -> int:
        """How many workers the launcher has given up (``--on-worker-loss continue``); else a job ends as a whole."""
        return len(environment.lost_workers())

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write the global optimizer's state: arrays and JSON, no pickle. Waits; any one worker may call it.

        Where `state_is_shared`, all call it, and each writes its file.
        """
        self._check_begun("save_optimizer_states (trainer.save_states)")
        if not self._resumes_from_optimizer:
            warn_once(f"saved optimizer states alone will not continue this `{self.name}` run in another job, {_MORE}")
        arrays, meta = self.server_state()
        with open(fname, "wb") as file:
            write_npz(file, arrays, meta)

    def load_optimizer_states(self, fname: str) -> None:
        """Go on with what `save_optimizer_states` wrote: the global optimizer's state and its count of updates; its
        settings but for rates must be the same. Before the first step any worker may call it, and worker 0's file
        counts, if it has one. After that step every worker calls it, between the same two iterations, and waits until
        all have. Only worker 0 reads then (else the one that `leads`); if it cannot, all raise the same ConfigError.
        """
        if self.lanes and self.session.method.takes != "weights":
            self._settle("load_optimizer_states", [])
            self._load_optimizer(fname)
        elif self.lanes or not self._resumes_from_optimizer:
            raise ConfigError(f"optimizer states alone do not continue a `{self.name}` run, {_MORE}")
        else:
            self._saved_servers = _states(fname)

    @property
    def _resumes_from_optimizer(self) -> bool:
        return self.session.method.resumes_from_optimizer and getattr(self.options, "codec_weights", "none") == "none"

    def _multiply_back(self) -> None:
        """Undo the script's division of gradients by the number of workers, which is for servers that add up: methods
        expect each worker's own mean.
        """
        self._factor = float(self.num_workers)
        if self.session.method.reduces:
            self.session.change({"reduction": "mean"})

    def _load_optimizer(self, fname: str) -> None:
        """The worker that leads reads the state and sends it to where the global optimizer lives; rules and workers
        keep what they have. If it cannot, every worker hears why. Collective.
        """
        state, updates, wrong = None, 0, ""
        if self.leads:
            try:
                state, updates = saving.for_servers(self.session, saving.optimizer_alone(_states(fname)))
            except Exception as error:  # also what a file of another content leads to: the others wait for a word
                name = "" if isinstance(error, (OSError, ConfigError)) else f"{type(error).__name__}: "
                wrong = f"worker {self.rank} could not load the optimizer's state: {name}{error}"
        wrong = agreement.from_one(self.session.transport, wrong.encode()).decode()
        if wrong:
            raise ConfigError(wrong)
        updates = saving.send(self.session, state, updates)
        if not self.session.method.asynchronous:  # whose servers count the updates of all workers
            self.session.set_updates(updates)

    def _check_updated(self, call: str, key: Any, outs: List[NDArray]) -> None:
        """ProtocolError if `outs` would get weights that lack a gradient which the caller has handed in."""
        if key in self._handed and outs:
            left = len(self._lanes_of) - len(self._handed)
            others = "1 other key has" if left == 1 else f"{left} other keys have"
            raise ProtocolError(f"{call} of key {key} in the middle of iteration {self.iteration + 1}: its gradient "
                                f"was pushed, and {others} none yet; all are updated together, so push all before "
                                "you pull, or call pushpull with `out` (docs/how-to/mxnet-kvstore.md)")


def _states(fname: str) -> Saved:
    """What `save_optimizer_states` wrote."""
    saved = read_npz(fname)
    saving.check_servers(saved, fname)
    return saved


def _rows(weight: NDArray, ids: np.ndarray) -> NDArray:
    """These rows, in a row-sparse array."""
    if not ids.size:
        return mx.nd.sparse.zeros("row_sparse", weight.shape, ctx=weight.context, dtype=weight.dtype)
    rows = mx.nd.array(ids, ctx=weight.context, dtype=np.int64)
    return mx.nd.sparse.row_sparse_array((weight.take(rows), rows), weight.shape, dtype=weight.dtype)
