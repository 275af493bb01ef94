"""`odsgd.torch.Optimizer`: an optimizer of PyTorch's whose steps a store takes.

    loss.backward()     each gradient is noted as it appears; the buckets that are whole leave, in their order, the same
                        on all workers: that in which gradients appeared in the first iteration
    optimizer.step()    what is left of them leaves; from here on the parameters are out of date
    model(x)            a module waits, before it computes, for its own weights, and then they are in place
"""
import contextlib
import functools
import itertools
import sys
import traceback
import weakref
from typing import Any, Callable, Dict, Iterator, List, NoReturn, Optional, Set

import numpy as np
import torch

from kvstore.errors import ConfigError, ProtocolError, shown
from kvstore.fronts.base import warn_of_own, warn_once
from kvstore.fronts.torch import models, translation
from kvstore.fronts.torch.lanes import Arrivals, TensorLane, held
from kvstore.fronts.torch.store import DTYPES, TorchStore, has_store
from kvstore.messages.buckets import Parameter

_Scaler = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler  # its place until PyTorch 2.2
LOOKED_EVERY = 16
"""Every so many iterations `_check_trained` looks through the whole model."""


class Optimizer(torch.optim.Optimizer):
    """Train `model` by `store`, whose global optimizer is `optimizer`.

    Schedulers, `zero_grad` and parameter groups are as with `optimizer`, in whose place this is used. Making it is
    collective and waits; so is the first `step`.

    Parameters
    ----------
    optimizer
        SGD, Adam, AdamW, RMSprop, Adagrad or Adadelta of torch.optim, new, on parameters of `model`
    model
        its weights and buffers become worker 0's here; it may also be what ``torch.compile`` has returned, or be in
        DistributedDataParallel, which then exchanges nothing from here on
    store
        made by `odsgd.torch.create`, one for each model; where its method takes weights (`diloco`), `optimizer` may be
        any of PyTorch's, and it takes the steps itself (`stepping.Stepping`)
    """

    _step_supports_amp_scaling = True  # a scaler of PyTorch's leaves unscaling and skipping to `step`, which refuses

    def __new__(cls, optimizer: torch.optim.Optimizer, model: torch.nn.Module, store: TorchStore) -> "Optimizer":
        """The kind that the store's method needs."""
        if cls is Optimizer and isinstance(store, TorchStore) and store.takes_weights:
            from kvstore.fronts.torch.stepping import Stepping
            return super().__new__(Stepping)
        return super().__new__(cls)

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, store: TorchStore) -> None:
        if not isinstance(store, TorchStore):
            raise ConfigError(f"the store is a {type(store).__name__}; expected one made by odsgd.torch.create")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"the optimizer is a {type(optimizer).__name__}; expected one of torch.optim's, then the "
                              "model, then the store")
        if isinstance(optimizer, Optimizer):
            raise ConfigError("the optimizer is an od.Optimizer, which trains by a store already; give the one of "
                              "torch.optim that it was made of, new (a Trainer of Hugging Face's trains once)")
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"the model is a {type(model).__name__}; expected the torch.nn.Module whose parameters "
                              "the optimizer has")
        self._wrapper = model if isinstance(model, torch.nn.parallel.DistributedDataParallel) else None
        if self._wrapper is not None:
            if self._wrapper.static_graph:
                raise ConfigError("the model is in DistributedDataParallel with static_graph=True, which exchanges "
                                  "gradients in any case; leave static_graph out")
            model = self._wrapper.module
        models.refuse_wrapped(model)
        translated = self._translated(optimizer)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        optimizer._opt_called = True  # for a scheduler that was made of it: the steps are taken here
        self.store, self._model, self._given = store, model, optimizer
        self._names = {id(tensor): models.plain(name) for name, tensor in model.named_parameters()}
        self._multipliers = [(1.0, 1.0)] * len(self.param_groups) if translated is None \
            else translation.multipliers(self.param_groups)
        self._fixed = translation.fixed(self.param_groups)
        self._syncing = True
        self._order: Dict[str, None] = {}  # as gradients appeared first
        self._arrivals: Optional[Arrivals] = None
        self._rates: List[float] = []  # of the groups, in the iteration that has begun
        self._alone: Dict[str, int] = {}  # PyTorch's count of writes to parameters that no store trains
        self._own = [(self._names.get(id(tensor), ""), tensor, not tensor.requires_grad)  # frozen ones as well
                     for group in self.param_groups for tensor in group["params"]]
        self._ran: Set[torch.nn.Module] = set()
        self._awaits: Dict[torch.nn.Module, List[TensorLane]] = {}
        self._at_step: List[TensorLane] = []
        self._sharded = list(models.those_in(model, "FSDPModule"))
        self._at_once = hasattr(model, "_orig_mod") or bool(self._sharded)  # modules have no hooks of their own then
        self._hooks: List[Any] = []  # handles of what was put into the model and the given optimizer
        self._steps_given = False  # whether this optimizer calls the given one
        store.session.own_step = self._own_step()
        store.take(functools.partial(models.tensors, model), self._described(), translated)
        store.optimizer = self
        self._let_wrapper_exchange(False)
        self._watch()
        self._watch_given()

    # -- what a script calls -----------------------------------------------------------------------------------

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """End the iteration: buckets that have not left yet leave. Returns at once, but in the first iteration, with
        ``uneven="join"``, or if no module waits for some weights. A parameter without a gradient takes part with zeros.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_settings()
        arrivals = self._arrivals or self._begin()
        for lane in arrivals.rest():
            self._send(lane)
        self.store.end_step()
        arrivals.begin()
        self.store.show(self._at_step)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As PyTorch's. If an error ended a backward pass before any bucket left, the iteration begins anew."""
        super().zero_grad(set_to_none)
        if self._arrivals is not None and not self._arrivals.left:
            self._arrivals.begin()
            self.store.let_change()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes add up gradients and send nothing; the next one outside, or `step`, sends the sum."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def synchronize_grads(self) -> None:
        """Let every ``.grad`` hold its mean over the workers, to be clipped before `step`. Collective; waits.

        For gradients of a backward pass under `no_sync`. It is one more exchange, beside the one of `step`.
        """
        if self._arrivals is not None and self._arrivals.left:
            raise ConfigError("synchronize_grads when gradients have left already; run the backward pass under "
                              "`with optimizer.no_sync():`")
        self.store.mean_gradients()

    def synchronize(self) -> None:
        """Wait for the weights of the next iteration, and have them in the parameters.

        For a script that reads parameters elsewhere than in their modules, right after `step`.
        """
        self.store.show(self.store.lanes)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError("an od.Optimizer cannot be copied or saved whole; save optimizer.state_dict(), on all "
                          "workers (docs/how-to/pytorch.md). Nor can the model that it trains: save or return "
                          "model.state_dict(), or close the store before")

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        if hasattr(self, "store"):
            raise ConfigError("add_param_group: a store trains the parameters that its optimizer began with; make a "
                              "new store and a new optimizer")
        super().add_param_group(param_group)

    def state_dict(self) -> Dict[str, Any]:
        """Parameter groups, and what this worker, and on worker 0 the servers, know. Collective; waits.

        Each worker saves its own.
        """
        saved = super().state_dict()
        if self.store.has_state:
            saved["store"] = {part: None if state is None else {"arrays": {
                name: torch.from_numpy(array) for name, array in state[0].items()}, "facts": state[1]}
                for part, state in self.store.state().items()}
        return saved

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Go on from what `state_dict` gave on this worker, before the first step. The model's weights come with it."""
        if self.store.lanes:
            raise ConfigError("load_state_dict after the first step, when the store has its weights; to go back, make "
                              "a new store and a new Optimizer, and load into that")
        if not {"state", "param_groups"} <= {*state_dict}:
            raise ConfigError(f"this is no state of an optimizer: it has {shown(', '.join(state_dict))}; give what "
                              "od.Optimizer.state_dict returned, and the model's to model.load_state_dict")
        saved = state_dict.get("store")
        if saved is None and state_dict["state"]:
            raise ConfigError("the state is one of torch.optim's alone; a store goes on from what "
                              "odsgd.torch.Optimizer.state_dict gave")
        self._load_own({name: part for name, part in state_dict.items() if name != "store"})
        if saved is not None:
            self.store.load_state(*(None if saved[part] is None else (
                {name: tensor.cpu().numpy() for name, tensor in saved[part]["arrays"].items()}, saved[part]["facts"])
                for part in ("worker", "servers")))  # type: ignore[arg-type]

    # -- an iteration ------------------------------------------------------------------------------------------

    def _appeared(self, name: str) -> None:
        """The gradient of a parameter is in its ``.grad``."""
        if self._arrivals is None:
            self._order.setdefault(name)
            return
        if any(lane.due is not None for lane in self._arrivals.lanes_of[name]):
            raise ProtocolError(f"the gradient of {name} was taken at weights of an earlier iteration: its module, or "
                                "the model, was called in the first iteration and not in this one; call "
                                "optimizer.synchronize() after step()")
        if self._syncing:
            self.store._check_may_step("; for gradients alone run backward() under `with optimizer.no_sync():`")
        self.store.appeared(name, self._syncing)
        for lane in self._arrivals.note(name) if self._syncing else ():
            self._send(lane)

    def _send(self, lane: TensorLane) -> None:
        if not self.store.under_way:
            self._rates = self._rates_now()
            self.store.begin_iteration([rate / lr_mult for rate, (lr_mult, _) in zip(self._rates, self._multipliers)])
        self.store.send(lane)

    def _rates_now(self) -> List[float]:
        return [float(group["lr"]) for group in self.param_groups]

    def _check_settings(self) -> None:
        """ConfigError for what was changed and may not be."""
        if self.store.under_way and self._rates != self._rates_now():
            raise ConfigError("the learning rate was changed between backward() and step(), when gradients had left "
                              "with the old one; change it before the backward pass")
        translation.check_fixed(self._fixed, self.param_groups, "now")
        if any(self.state.values()):
            raise ConfigError("the state of an od.Optimizer was set by the script, and it is the store that has it: "
                              "set nothing there, and load what od.Optimizer.state_dict gave")
        self._check_trained()
        if hasattr(self, "found_inf"):
            raise ConfigError("torch.amp.GradScaler knows the overflows of this worker alone; take "
                              "odsgd.torch.GradScaler in its place, with the same arguments")

    def _check_trained(self) -> None:
        """ConfigError if the trained parameters have changed, or another od.Optimizer has the model now."""
        if _called_by("_init_optim_state"):
            raise ConfigError("torch.distributed.checkpoint.state_dict takes a step to make an optimizer's state, and "
                              "a step of a store is an iteration of all workers: save and load the store itself, "
                              'dcp.save({"store": store}, ...), beside the model')
        self.store._check_may_step()
        if not self._hooks:
            raise ConfigError("step of an od.Optimizer that has left its model: another od.Optimizer has been made of "
                              "the same parameters since")
        looks = self.store.iteration % LOOKED_EVERY == 0 or self.store.iteration <= 2 or not self.store.lanes
        if looks and not self._sharded:  # FSDP puts other tensors in their place
            there = {id(tensor) for tensor in self._model.parameters()}
            for name, tensor, _ in self._own:
                if id(tensor) not in there:
                    raise ConfigError(f"{name} is another tensor than when od.Optimizer was made, which would train "
                                      "the one that is gone: replace layers, and call load_state_dict(assign=True), "
                                      "before the optimizer is made, or go on with a new store and a new optimizer")
            self._tell_alone()
        if len(self._given.param_groups) != len(self._fixed):
            translation.check_fixed(self._fixed, self._given.param_groups, "now")
        for name, tensor, frozen in self._own:
            if frozen == tensor.requires_grad:
                was, now = ("frozen", "no longer") if frozen else ("trained", "frozen now")
                raise ConfigError(f"{name} was {was} when od.Optimizer was made, and is {now}: a store trains what it "
                                  "began with. Leave requires_grad as it is, and let a parameter group have the rate 0 "
                                  "while it stands still (docs/how-to/pytorch.md)")

    def _tell_alone(self) -> None:
        """Warn of parameters that the script changes and no store trains."""
        changed = [models.plain(name) for name, one in self._model.named_parameters()
                   if one.grad is not None and not has_store(one)  # an average of weights has none
                   and self._alone.setdefault(name, one._version) != one._version]
        if changed and self.store.num_workers > 1 and self.store.rank == 0:
            warn_once(f"{shown(', '.join(changed))} of the model: the script changes it, and no store has it, so that "
                      "each worker trains its own; make an od.Optimizer of the optimizer that has it, with a store of "
                      "its own")

    # -- before the first step ---------------------------------------------------------------------------------

    def _tell_absent(self) -> None:
        """Warn of parameters without a gradient, which may be a mistake."""
        absent = [name for name, one in self.store._trained.items() if one.gradient() is None]
        if len(absent) == len(self.store._trained):
            self.store._warn("no parameter has a gradient at the first step(); was backward() called?")
        elif absent:
            self.store._warn(f"no gradient at the first step() for {shown(', '.join(absent))} on this worker: the "
                             "store takes zeros for it, so that weight decay and momentum still move these weights")

    def _described(self) -> List[Parameter]:
        """The parameters to train, in the model's order."""
        groups = {id(parameter): number for number, group in enumerate(self.param_groups)
                  for parameter in group["params"]}
        for name, tensor, _ in self._own:
            if not name:
                raise ConfigError(f"a parameter of shape {tuple(tensor.shape)} is the optimizer's and not the model's; "
                                  "make the optimizer of model.parameters()")
        described = []
        for tensor in self._model.parameters():
            if id(tensor) in groups and tensor.requires_grad and held(tensor).numel():
                name = self._names[id(tensor)]
                if tensor.dtype not in DTYPES:
                    raise ConfigError(f"parameter {name} is {tensor.dtype}, and what can be trained is "
                                      f"{', '.join(map(str, DTYPES))}")
                group = groups[id(tensor)]
                described.append(Parameter(name, name, tuple(held(tensor).shape), DTYPES[tensor.dtype],
                                           *self._multipliers[group], group))
        if not described:
            raise ConfigError("the optimizer has no parameter that requires a gradient, so there is nothing to train")
        return described

    @staticmethod
    def _translated(optimizer: torch.optim.Optimizer) -> Any:
        """The optimizer that the store applies in place of `optimizer`; None: it applies none."""
        return translation.translated(optimizer)

    def _own_step(self) -> Dict[str, Any]:
        """What must be the same on all workers about the given optimizer's steps; empty: it takes none."""
        return {}

    def _load_own(self, saved: Dict[str, Any]) -> None:
        """Parameter groups, and the optimizer's own state where it has one."""
        translation.check_fixed(self._fixed, saved["param_groups"], "in the state to load")
        super().load_state_dict(saved)
        self._given.param_groups = self.param_groups  # a scheduler may have been made of it

    def _let_wrapper_exchange(self, again: bool) -> None:
        """While the store trains, DistributedDataParallel behaves as under its own `no_sync`; its `no_sync` is ours."""
        if self._wrapper is not None:
            self._wrapper.require_backward_grad_sync = self._wrapper.require_forward_param_sync = again
            if again:
                del self._wrapper.no_sync, self._wrapper.join
            else:
                self._wrapper.no_sync, self._wrapper.join = self.no_sync, models.refuse_join

    def _watch(self) -> None:
        """Hook into what a script does and the store must know of."""
        self._watch_gradients()
        self._watch_modules()
        self._watch_saving()
        self._watch_shards()

    def _watch_given(self) -> None:
        """Refuse steps of the given optimizer, which would train this worker alone, and loads, which would be lost."""
        def refuse(what: str, *_: Any) -> None:
            if not self._steps_given:
                raise ConfigError(f"{what} of the optimizer that od.Optimizer was made of, which is this worker's "
                                  f"alone; call {what} of what od.Optimizer returned")

        if hasattr(self._given, "_optimizer_step_pre_hooks"):  # else it wraps another, as Accelerate's
            self._hooks += [self._given.register_step_pre_hook(functools.partial(refuse, "step")),
                            self._given.register_load_state_dict_pre_hook(functools.partial(refuse, "load_state_dict"))]

    def leave_model(self) -> None:
        """Remove all hooks: the store has no more to do with the model."""
        self._let_wrapper_exchange(True)
        self._wrapper = None
        while self._hooks:
            self._hooks.pop().remove()
        if self.store._closed:  # breaks a cycle of references, so that its arrays go at once
            self.store.optimizer = None

    def _watch_shards(self) -> None:
        """Let an FSDP model gather its weights anew in each forward pass, since its root may still hold older weights.
        """
        def reshard(*_: Any) -> None:
            for module in self._sharded:
                module.reshard()

        if self._sharded:
            self._hooks.append(self._model.register_forward_pre_hook(reshard, prepend=True))

    def _watch_saving(self) -> None:
        """Before a state_dict the parameters get this worker's newest weights; warn if they are not the global ones."""
        root = getattr(self._model, "_orig_mod", self._model)
        own = {*models.with_hooks(module for module in root.modules() if module is root or (
            not self.store.takes_weights and any(True for _ in module.parameters())))}  # copies share the hook

        def saved(module: torch.nn.Module, *_: Any) -> None:
            self.synchronize()
            if module in own and self.store.shows_own:
                warn_of_own(self.store.name)

        self._hooks += [module.register_state_dict_pre_hook(saved) for module in own]

    def _watch_gradients(self) -> None:
        me = weakref.ref(self)

        def appeared(name: str, _: torch.Tensor) -> None:
            optimizer = me()  # PyTorch keeps this function where no garbage collector looks
            if optimizer is not None:
                optimizer._appeared(name)

        for name, one in self.store._trained.items():
            self._hooks.append(one.parameter.register_post_accumulate_grad_hook(functools.partial(appeared, name)))

    def _watch_modules(self) -> None:
        """Let each module wait for its weights before its forward pass. The hook is a function, not a method: a deep
        copy of the model then shares it, and it does nothing for the copy's modules."""
        def before(module: torch.nn.Module, _: Any) -> None:
            if self._arrivals is None:
                self._ran.add(module)
            self.store.show(self._awaits.get(module, ()))

        # Where nothing has been compiled yet, asking for it would import the compiler, which takes seconds.
        wait = torch.compiler.disable(before) if "torch._dynamo" in sys.modules else before
        modules = models.with_hooks([self._model] if self._at_once else self._model.modules())
        self._before = {module: module.register_forward_pre_hook(wait, prepend=True) for module in modules}
        self._hooks += self._before.values()

    def _begin(self) -> Arrivals:
        """End the first iteration, which has shown in what order gradients appear, and which modules compute."""
        self._tell_absent()
        self.store.begin(self._order)
        self._arrivals = arrivals = Arrivals(self.store.lanes)
        lanes = arrivals.lanes_of
        awaited: Set[str] = set()
        for module in self._before:
            own = list(lanes) if self._at_once else [
                self._names.get(id(one), "") for one in module.parameters(recurse=False)]
            self._awaits[module] = list(dict.fromkeys(lane for name in own for lane in lanes.get(name, [])))
            awaited.update(own if module in self._ran else ())
        # Weights that are used outside their module's forward pass (as in MultiheadAttention): the whole model waits.
        others = list(dict.fromkeys(lane for name in lanes if name not in awaited for lane in lanes[name]))
        if self._model in self._ran:
            self._awaits[self._model] += others
        else:
            self._at_step = others
        for module, handle in self._before.items():
            if not self._awaits.get(module):
                handle.remove()
        self._ran.clear()  # copies of the model may be in it
        return arrivals


class GradScaler(_Scaler):  # type: ignore[misc, valid-type]
    """``torch.amp.GradScaler`` for an `Optimizer`. If gradients overflow on one worker, all workers skip the step, and
    their scales stay equal. With an asynchronous store each worker skips its own steps, and so it does where weights
    travel, unless it calls `unscale_`. The backward pass runs under `no_sync`, since gradients leave unscaled.
    """

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """As PyTorch's; collective, unless each worker skips its own steps."""
        if self.is_enabled() and isinstance(optimizer, Optimizer):
            optimizer._step_supports_amp_scaling = optimizer.store.takes_weights  # else this one skips
        return super().step(optimizer, *args, **kwargs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """As PyTorch's; collective, and waits, but in an asynchronous job. `step` does it, too, where gradients travel.
        """
        super().unscale_(optimizer)
        if not (self.is_enabled() and isinstance(optimizer, Optimizer)):
            return
        if optimizer._arrivals is not None and optimizer._arrivals.left:
            raise ConfigError("with a GradScaler gradients must not leave before they are unscaled; run the backward "
                              "pass under `with optimizer.no_sync():`")
        optimizer.store.let_change()
        if not optimizer.store.session.method.asynchronous:
            found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
            total, = optimizer.store.sum_within(np.array([sum(one.item() for one in found)]))
            for one in found:
                one.fill_(float(total))


def _called_by(name: str) -> bool:
    """Whether the call that is under way comes from a function of this name, a few calls up."""
    callers = itertools.islice(traceback.walk_stack(sys._getframe(2)), 6)
    return any(frame.f_code.co_name == name for frame, _ in callers)
