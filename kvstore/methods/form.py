"""Whether a method's file has what the contract asks for, looked at when it is loaded: a mistake is one line, and no
traceback in the middle of a job. What a method may use is a table in docs/contributing.md.
"""
import dataclasses
import difflib
import inspect
from typing import Any, Iterator, Mapping, Type

from kvstore.errors import ConfigError, shown
from kvstore.methods.common import Options
from kvstore.methods.contract import Method, Rule, Worker

TRANSPORTS = {"server", "ring", "sharded", "process"}
SERVED = {"server", "process"}
"""Those on which a rule applies what workers push."""


def check(method: Type[Method], where: str) -> None:
    """ConfigError for the first mistake that can be seen without a run. `where`: the method's place."""
    for mistake in _mistakes(method):
        raise ConfigError(f"{where}: {mistake} (docs/contributing.md, `A method of your own`)")


def _mistakes(method: Type[Method]) -> Iterator[str]:
    if not isinstance(getattr(method, "name", None), str) or not method.name:
        yield "the method has no name; write `name = ...` in the class"
    yield from _misspelled(method, Method)
    options: Any = method.Options
    if not (isinstance(options, type) and issubclass(options, Options) and dataclasses.is_dataclass(options)):
        yield "Options is not a dataclass of options; write `@dataclass(frozen=True) class Options(common.Options)`"
    for field in dataclasses.fields(options):
        if "kind" not in field.metadata:
            yield f"option `{field.name}` has no kind and help; write `{field.name}: ... = option(DEFAULT, KIND, HELP)`"
    transports: Any = method.transports
    if not isinstance(transports, tuple) or not transports or not set(transports) <= TRANSPORTS:
        yield (f"transports are {shown(transports)}; expected a tuple of some of server, ring, sharded, as "
               "`transports = (\"server\",)`")
    yield from _side(method, "worker", Worker, "iterate")
    if SERVED & set(transports):
        yield from _side(method, "rule", Rule, "receive")
    returned = method.worker.returned
    if returned and returned not in method.worker.arrays:
        yield f"{method.worker.__name__} returns `{returned}`, which is not one of its `arrays`"
    if method.takes not in ("gradients", "weights"):
        yield f"takes is {shown(method.takes)}; expected gradients or weights"
    own = method.outer_sgd(method.Options())
    if (method.takes == "weights") is (own is None):
        yield ("takes = \"weights\" and `outer_sgd` go together: the trainer's optimizer is the inner one then, and "
               "`outer_sgd` returns the rate and momentum of the outer one")


def _side(method: Type[Method], what: str, base: Any, function: str) -> Iterator[str]:
    """Mistakes of the worker, or of the rule, which needs this function."""
    side: Any = getattr(method, what, None)
    if not (isinstance(side, type) and issubclass(side, base)):
        needed = "" if what == "worker" else ", which servers need; without servers write `transports = (\"ring\",)`"
        yield f"{what} is {shown(side)}, expected a subclass of kvstore.methods.contract.{base.__name__}{needed}"
        return
    yield from _misspelled(side, base)
    for name, default in inspect.getmembers(base, inspect.isfunction):
        own, arguments = getattr(side, name), list(inspect.signature(default).parameters)
        expected = f"({', '.join(arguments)})"
        if name == function and own is default:
            yield f"{side.__name__} has no `{name}{expected}`"
        elif not name.startswith("_") and own is not default:
            try:
                inspect.signature(own).bind(*arguments)
            except TypeError:
                yield f"{side.__name__}.{name} takes {inspect.signature(own)}, expected {expected}"
    arrays, facts = getattr(side, "arrays", None), getattr(side, "facts", None)
    if not isinstance(arrays, Mapping):
        yield (f"arrays of {side.__name__} are {shown(arrays)}, expected names with meanings, as "
               "{\"v\": \"momentum\"}")
    if not isinstance(facts, (tuple, list)):
        yield f"facts of {side.__name__} are {shown(facts)}, expected a tuple of names, as (\"count\",)"


def _misspelled(mine: type, base: type) -> Iterator[str]:
    """What stands in the class under a name that is nearly one of the contract's."""
    known = [name for one in base.__mro__ for name in (*vars(one), *vars(one).get("__annotations__", ()))
             if not name.startswith("_")]
    for name in vars(mine):
        near = [] if name in known or name.startswith("_") else difflib.get_close_matches(name, known, 1, 0.85)
        if near:
            yield f"{mine.__name__} has `{name}`, which nothing reads; did you mean `{near[0]}`?"
