"""The store of a job in place of MXNet's, for scripts that do not know this project: `odsgd launch --store`.

    odsgd:warmup=200:lr_local=0.05            a name, then options as `kvstore.create` knows them

The launcher reads it before anything starts, and the workers where they would make MXNet's store.
"""
from dataclasses import dataclass
from typing import Any, Dict, Optional, Type

from kvstore import methods
from kvstore.errors import ConfigError
from kvstore.methods import fit
from kvstore.methods.contract import Method


@dataclass(frozen=True)
class StandIn:
    """A method, what it runs on, and the options that were given."""

    method: Type[Method]
    transport: Optional[str]
    options: Dict[str, Any]

    @property
    def kvstore(self) -> str:
        return self.method.name

    @property
    def asynchronous(self) -> bool:
        return self.method.asynchronous

    @property
    def needs_servers(self) -> bool:
        return (self.transport or self.method.transports[0]) == "server"

    @property
    def admits(self) -> bool:
        return self.method.admits(fit.options_of(self.method, self.options))

    def in_place_of(self, name: str) -> Dict[str, Any]:
        """The options where a script asks for MXNet's store `name`. Those of several workers add their gradients up."""
        adds = "dist" in name and self.method.reduces
        return {**({"reduction": "sum"} if adds else {}), **self.options}


def parse(text: str) -> StandIn:
    """The inverse of what a user writes; ConfigError for what `kvstore.create` would refuse in a worker."""
    name, options = fit.split(text)
    method = methods.find(name)
    if method.transports == ("process",):
        raise ConfigError(f"store `{name}` trains in one process alone; the stores of a job are "
                          f"{', '.join(other for other in methods.METHODS if other != name)}")
    transport = options.pop("transport", None)
    fit.check(method, fit.options_of(method, options, also=["transport"]), fit.transport_of(method, transport))
    return StandIn(method, transport, options)
