"""Checks that a method runs here with these options, and that its file has what the contract asks for. The file is
checked when it is loaded: a mistake is one line, and no traceback in the middle of a job. What a method may use is in
tables of docs/contributing.md.
"""
import dataclasses
import difflib
import inspect
from typing import Any, Dict, Iterable, Iterator, Mapping, Optional, Tuple, Type

from kvstore.errors import ConfigError, shown, unknown
from kvstore.messages.codecs import WITHOUT_RESIDUAL
from kvstore.messages.seam import KINDS, Transport
from kvstore.methods.common import CodedOptions, Options
from kvstore.methods.contract import Method, Rule, Worker

TRANSPORTS = {*KINDS, "process"}
SERVED = {"server", "process"}
"""Transports on which a rule applies what workers push."""
NOT_FINITE = ("none", "float16", "bfloat16", "truncate")
"""Codecs that pass NaN and infinity through unchanged."""


def split(text: str) -> Tuple[str, Dict[str, Any]]:
    """The name and the options (for `options_of`) of a store written in one word.

    >>> split("odsgd:warmup=200:lr-local=0.05")
    ('odsgd', {'warmup': '200', 'lr_local': '0.05'})
    """
    name, *items = text.split(":")
    options: Dict[str, Any] = {}
    for item in items:
        option, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"expected :OPTION=VALUE behind the store's name, got `:{shown(item)}`")
        options[option.strip().replace("-", "_")] = {"true": True, "false": False}.get(value, value)
    return name, options


def options_of(method: Type[Method], given: Mapping[str, Any], also: Iterable[str] = ()) -> Options:
    """The method's options as a user gave them, with lengths in iterations. `also`: names that errors list as well."""
    check_names(method, given, also)
    try:
        return method.Options(**given).in_iterations()
    except ConfigError as error:
        raise ConfigError(f"store {method.name}: {error}") from None


def check_names(method: Type[Method], given: Iterable[str], also: Iterable[str] = ()) -> None:
    """ConfigError unless the method has options of these names."""
    known = [*also, *method.option_names()]
    for name in given:
        if name not in known:
            raise unknown(f"option of store {method.name}", name, known)


def transport_of(method: Type[Method], asked: Optional[str]) -> str:
    """The kind of transport that was asked for, or the method's first; ConfigError unless the method runs on it."""
    kind = asked or method.transports[0]
    if kind in method.transports:
        return kind
    if kind not in KINDS:
        raise unknown(f"transport of store {method.name}", kind, method.transports)
    raise ConfigError(f"store {method.name} runs on transport {' or '.join(method.transports)}, not on `{kind}`")


def check_on(transport: Transport, method: Type[Method], options: Any) -> None:
    """ConfigError unless the method runs on this transport with these options."""
    kind = transport.kind
    if kind not in KINDS:
        raise ConfigError(f"store {method.name}: the transport given is a {type(transport).__name__}, expected "
                          "servers, a ring or workers with parts (kvstore.messages.seam)")
    if method.transports != ("process",):
        transport_of(method, kind)
    check(method, options, kind)


def check(method: Type[Method], options: Any, kind: str) -> None:
    """ConfigError for options that do not go with the method and its transport: `server`, `ring` or `sharded`."""
    if not method.reduces:
        options.refuse(["reduction"], f"in store {method.name}, whose every gradient is an update by itself; leave it "
                       "out")
    if method.asynchronous:
        options.refuse(["uneven"], f"in store {method.name}, whose workers wait for nobody; leave it out")
    codec = getattr(options, "codec", "none")
    if options.on_nan == "skip" and (kind == "sharded" or codec not in NOT_FINITE):
        where = "on transport `sharded`, whose workers each see a part" if kind == "sharded" else \
            f"with codec `{codec}`, which knows finite numbers alone (others: {', '.join(NOT_FINITE)})"
        raise ConfigError(f"on_nan `skip` does not go {where}; take `stop`")
    if options.on_nan == "skip" and kind in SERVED and method.rule.skip is Rule.skip:
        raise ConfigError(f"on_nan `skip`: {method.rule.__name__} does not say what a push that is left out does; "
                          "write its `skip` (a `receive` of its own needs one), or take another on_nan")
    if kind == "ring" and codec not in WITHOUT_RESIDUAL:
        raise ConfigError(f"codec `{codec}` needs servers: a ring encodes sums anew at every hop, and nobody keeps "
                          f"what is left; codecs of a ring are {', '.join(WITHOUT_RESIDUAL)}")
    if isinstance(options, CodedOptions) and kind == "sharded":
        options.refuse(["codec", "codec_threshold", "codec_weights"], "on transport `sharded`, which sends floats as "
                       "they are")
    if isinstance(options, CodedOptions) and kind == "ring":
        options.refuse(["codec_weights"], "on a ring, where no weights travel")


def check_file(method: Type[Method], where: str) -> None:
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
    """Names in the class that are nearly names of the contract."""
    known = [name for one in base.__mro__ for name in (*vars(one), *vars(one).get("__annotations__", ()))
             if not name.startswith("_")]
    for name in vars(mine):
        near = [] if name in known or name.startswith("_") else difflib.get_close_matches(name, known, 1, 0.85)
        if near:
            yield f"{mine.__name__} has `{name}`, which nothing reads; did you mean `{near[0]}`?"
