"""From an optimizer of PyTorch to the one that servers, or workers, apply in its place.

Its formulas are `kvstore.optimizers.torch_formulas`; plain SGD has MXNet's bits. Parameter groups may differ in
learning rate and weight decay: the optimizer has the first group's, and the other groups have multipliers.
"""
from typing import Any, Callable, Dict, List, Tuple, Type

import torch

from kvstore.errors import ConfigError
from kvstore.optimizers import torch_formulas
from kvstore.optimizers.formulas import SGD, Formula

Group = Dict[str, Any]
Make = Callable[[Group, Dict[str, float]], Formula]
"""Makes the optimizer of a group's settings, and of those for rate and decay."""

OF_A_GROUP = ("lr", "weight_decay")


def _sgd(group: Group, common: Dict[str, float]) -> Formula:
    if group["dampening"]:
        raise ConfigError(f"torch.optim.SGD has dampening {group['dampening']:g}, which the stores cannot apply; "
                          "expected 0")
    if not group["momentum"]:
        return SGD(**common)
    return torch_formulas.HeavyBall(momentum=group["momentum"], nesterov=group["nesterov"], **common)


def _adam(group: Group, common: Dict[str, float]) -> Formula:
    kind = torch_formulas.AdamW if group.get("decoupled_weight_decay") else torch_formulas.Adam
    return kind(float(group["betas"][0]), float(group["betas"][1]), group["eps"], **common)


KINDS: Dict[Type[torch.optim.Optimizer], Make] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: lambda group, common: _adam({**group, "decoupled_weight_decay": True}, common),
    torch.optim.RMSprop: lambda group, common: torch_formulas.RMSprop(
        group["alpha"], group["eps"], group["momentum"], group["centered"], **common),
    torch.optim.Adagrad: lambda group, common: torch_formulas.Adagrad(
        group["lr_decay"], group["eps"], group["initial_accumulator_value"], **common),
    torch.optim.Adadelta: lambda group, common: torch_formulas.Adadelta(group["rho"], group["eps"], **common)}


def translated(optimizer: torch.optim.Optimizer) -> Formula:
    """What is applied in place of `optimizer`, at the first group's rate and decay."""
    name, known = type(optimizer).__name__, ", ".join(kind.__name__ for kind in KINDS)
    if type(optimizer) not in KINDS:
        inner = getattr(optimizer, "optimizer", None)
        hint = f"; give its `.optimizer`, a {type(inner).__name__}" if type(inner) in KINDS else ""
        raise ConfigError(f"the optimizer is a {name}, and the store applies it, without PyTorch; expected one of "
                          f"torch.optim's {known}, or a store that sends weights (`diloco` and its kind), which takes "
                          f"any{hint}")
    if any(float(state.get("step", 1)) for state in optimizer.state.values()):
        raise ConfigError(f"this {name} has a state already, which would be lost; give a new one, and load a state by "
                          "odsgd.torch.Optimizer.load_state_dict")
    groups = optimizer.param_groups
    for setting in ("amsgrad", "maximize"):
        if groups[0].get(setting):
            raise ConfigError(f"{name} has {setting}=True, which the stores cannot apply; leave it out")
    for setting in set(optimizer.defaults) - {*OF_A_GROUP}:
        if any(group[setting] != groups[0][setting] for group in groups):
            raise ConfigError(f"parameter groups of {name} differ in {setting}; on a store they may differ in "
                              f"{' and '.join(OF_A_GROUP)} only")
    common = {"learning_rate": first(groups, initial), "wd": first(groups, decay)}
    return KINDS[type(optimizer)](groups[0], common)


def initial(group: Group) -> float:
    """A group's learning rate before any schedule."""
    return float(group["initial_lr"] if "initial_lr" in group else group["lr"])


def decay(group: Group) -> float:
    return float(group.get("weight_decay", 0.0))


def first(groups: List[Group], of: Callable[[Group], float]) -> float:
    """The first group's value that is not 0."""
    return next((value for value in map(of, groups) if value), 0.0)


def multipliers(groups: List[Group]) -> List[Tuple[float, float]]:
    """(lr_mult, wd_mult) of each group. A rate that begins at 0 has no multiplier: its buckets get it as it is."""
    lr, wd = first(groups, initial), first(groups, decay)
    return [(initial(group) / lr if initial(group) else 1.0, decay(group) / wd if wd else 1.0) for group in groups]


def fixed(groups: List[Group]) -> List[Any]:
    """What may not change once the store has it, in a form that can be compared."""
    return [{"number of parameters": len(group["params"]), **{
        name: value for name, value in group.items()
        if isinstance(value, (bool, int, float, tuple)) and name in NOT_SCHEDULED}} for group in groups]


def check_fixed(began: List[Any], groups: List[Group], where: str) -> None:
    """ConfigError if groups have other settings than the store `began` with, beside the rate."""
    theirs = fixed(groups)
    if theirs == began:
        return
    if len(theirs) != len(began):
        raise ConfigError(f"the optimizer had {len(began)} parameter group{'s' * (len(began) != 1)} when od.Optimizer "
                          f"was made, and has {len(theirs)} {where}; make a new store and a new optimizer")
    for was, now in zip(began, theirs):
        for name in sorted({*was, *now}):
            if was.get(name) != now.get(name):
                cycled = name in ("momentum", "betas")
                raise ConfigError(f"{name} of the optimizer was {was.get(name)} when od.Optimizer was made, and is "
                                  f"{now.get(name)} {where}; of parameter groups only the learning rate may change"
                                  f"{' (OneCycleLR and CyclicLR: cycle_momentum=False)' * cycled}")


NOT_SCHEDULED = {"weight_decay", "momentum", "dampening", "nesterov", "betas", "eps", "alpha", "centered", "lr_decay",
                 "rho", "maximize", "amsgrad"}
