"""Does this method run here, with these options? This file alone has the answer."""
from typing import Any, Dict, Iterable, Mapping, Optional, Tuple, Type

from kvstore.errors import ConfigError, shown, unknown
from kvstore.messages.codecs import WITHOUT_RESIDUAL
from kvstore.messages.seam import KINDS, Transport
from kvstore.methods.common import CodedOptions, Options
from kvstore.methods.contract import Method, Rule
from kvstore.methods.form import SERVED

NOT_FINITE = ("none", "float16", "bfloat16", "truncate")
"""Codecs that pass NaN and infinity through unchanged."""


def split(text: str) -> Tuple[str, Dict[str, Any]]:
    """A store with options, as they are written in one word, for `options_of`.

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
    """The method's options, made of what a user gave, with lengths in iterations. `also`: what is known beside them."""
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


def fitting(method: Type[Method], options: Any, transport: Transport) -> Type[Method]:
    """The method itself; ConfigError unless it runs on this transport with these options."""
    kind = transport.kind
    if not kind:
        raise ConfigError(f"store {method.name}: the transport given is a {type(transport).__name__}, expected "
                          "servers, a ring or workers with parts (kvstore.messages.seam)")
    if method.transports != ("process",):
        transport_of(method, kind)
    check(method, options, kind)
    return method


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
        raise ConfigError(f"on_nan `skip`: {method.rule.__name__} does not say what a push that is left out is to it; "
                          "write its `skip` (a `receive` of its own needs one), or take another on_nan")
    if kind == "ring" and codec not in WITHOUT_RESIDUAL:
        raise ConfigError(f"codec `{codec}` needs servers: a ring encodes sums anew at every hop, and nobody keeps "
                          f"what is left; codecs of a ring are {', '.join(WITHOUT_RESIDUAL)}")
    if isinstance(options, CodedOptions) and kind == "sharded":
        options.refuse(["codec", "codec_threshold", "codec_weights"], "on transport `sharded`, which sends floats as "
                       "they are")
    if isinstance(options, CodedOptions) and kind == "ring":
        options.refuse(["codec_weights"], "on a ring, where no weights travel")
