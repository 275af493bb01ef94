"""The systems that can be measured, by name, and how a job of each is launched.

    NAME[:OPTION=VALUE...][@SERVERS]      odsgd@auto   odsgd:transport=ring   pipesgd:codec=quantize   mxnet/p3@1

Names are our stores', with their options (but `warmup` is 0 unless given), and the others below. In front of a store's
name `torch+` means PyTorch, and `sockets+` sockets in the place of ps-lite. SERVERS is how many parameter servers there
are, each on a host of its own (on loopback all are on one machine); `auto`, the default, puts one beside every worker.
A system on a ring, or whose workers own parts, has none.
"""
import dataclasses
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple

from kvstore.errors import ConfigError, unknown
from kvstore.methods import METHODS, fit
from kvstore.methods.contract import Method
from kvstore.methods.sync import SSGD
from odsgd.config.train_options import keyword_value

STOCK = {"mxnet/dist_sync": {}, "mxnet/dist_async": {}, "mxnet/p3": {"DMLC_PS_VAN_TYPE": "p3"}}
"""Stock MXNet: name -> variables of all its processes. p3 is dist_sync with another van."""

ON_TORCH, ON_SOCKETS = "torch+", "sockets+"
DDP, HOROVOD = "torch/ddp", "horovod/mxnet"
FOREIGN = {DDP: "torch_worker.py", HOROVOD: "hvd.py"}
"""Systems whose workers have a Python of their own, and a file here that it runs. They have no servers."""

FOLDER = Path(__file__).parent
AUTO = "auto"

OURS = {name: method for name, method in METHODS.items() if method.transports != ("process",)}

OPTIONS: Dict[str, List[str]] = {
    **{name: [*method.option_names(), *(["transport"] if len(method.transports) > 1 else [])]
       for name, method in OURS.items()},
    **{name: [] for name in STOCK}, DDP: ["bucket_cap_mb"], HOROVOD: []}


@dataclass(frozen=True)
class System:
    """One way to train, as a user would start it."""

    label: str
    name: str
    options: Mapping[str, Any]
    servers: Optional[str]  # A number, `auto`, or None where there are none
    wire: str = "ps-lite"
    on_torch: bool = False

    def __str__(self) -> str:
        return self.label

    def _method(self, workers: int) -> Method:
        """The method as it is measured; systems that are not ours send as SSGD does, in every iteration."""
        method = OURS.get(self.name, SSGD)
        options = {key: value for key, value in self.options.items() if key in method.option_names()}
        return method(method.Options(**options), workers)

    def intervals(self, workers: int) -> Tuple[int, int]:
        """Iterations per push and per fetch."""
        method = self._method(workers)
        return method.intervals(method.options)

    def codecs(self, workers: int) -> Tuple[str, str]:
        """The codecs on the way to the servers, and on the way back; on a ring both are one."""
        traffic = self._method(workers).traffic(whole=False)
        return traffic.codec, traffic.codec if self.servers is None else traffic.codec_weights

    @property
    def stock(self) -> bool:
        return self.name in STOCK

    def extra_hosts(self) -> int:
        """Hosts it needs beside the workers'."""
        return 0 if self.servers is None or self.servers == AUTO else int(self.servers)

    def num_servers(self, workers: int) -> int:
        return workers if self.servers == AUTO else self.extra_hosts()

    @property
    def server_command(self) -> List[str]:
        return [sys.executable, str(FOLDER / "server.py"), "mxnet" if self.stock else "kvstore.weights.servers"]

    def worker_command(self, python: Optional[str]) -> List[str]:
        """Every worker's command, without the name of the file that says what to measure; `python`: a foreign one's."""
        if self.name in FOREIGN:
            return [str(python), str(FOLDER / FOREIGN[self.name])]
        if self.on_torch:
            return [sys.executable, str(FOLDER / "torch_worker.py")]
        return [sys.executable, "-m", "odsgd.lab.bench.worker"]


def parse(text: str) -> System:
    """The system that `text` names.

    >>> parse("odsgd:lr_local=0.5:warmup=3@1").options, parse("odsgd@1").servers, parse("ssgd").servers
    ({'warmup': 3, 'lr_local': 0.5}, '1', 'auto')
    """
    if text.startswith((ON_TORCH, ON_SOCKETS)):
        return _on_torch(text) if text.startswith(ON_TORCH) else _on_sockets(text)
    words, at, servers = text.partition("@")
    name, given = fit.split(words)
    if f"torch/{name}" in OPTIONS:
        raise ConfigError(f"unknown system `{name}`; did you mean `torch/{name}`?")
    if name not in OPTIONS:
        raise unknown("system", name, OPTIONS)
    # A delayed method is measured as it runs after its warm-up, whose iterations are SSGD's.
    options = {"warmup": 0} if "warmup" in OPTIONS[name] else {}
    options.update((option, keyword_value(value)) for option, value in given.items())
    for option in options:
        if option not in OPTIONS[name]:
            raise unknown(f"option of {name}", option, OPTIONS[name])
    ours = OURS.get(name)
    if name in FOREIGN or (ours and options.get("transport", ours.transports[0]) != "server"):
        if at:
            raise ConfigError(f"`{text}`: it has no servers; leave out @{servers}")
        return System(text, name, options, None)
    servers = servers if at else AUTO
    if servers != AUTO and not (servers.isdigit() and int(servers)):
        raise ConfigError(f"`{text}`: expected a number of servers or `{AUTO}` after @, got `{servers}`")
    return System(text, name, options, servers)


def _on_torch(text: str) -> System:
    system = parse(text[len(ON_TORCH):])
    if system.name not in OURS:
        raise ConfigError(f"`{text}`: {ON_TORCH} goes before a store of odsgd: {', '.join(OURS)}")
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(f"`{text}` needs PyTorch beside MXNet, in this Python: scripts/setup torch, or pip install "
                          "'.[cpu,torch]' in a clone of odsgd")
    return dataclasses.replace(system, label=text, on_torch=True)


def _on_sockets(text: str) -> System:
    system = parse(text[len(ON_SOCKETS):])
    if system.name not in OURS or system.servers is None:
        raise ConfigError(f"`{text}`: {ON_SOCKETS} goes before a store of odsgd that has servers")
    return dataclasses.replace(system, label=text, wire="sockets")
