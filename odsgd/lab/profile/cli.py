"""``odsgd profile``."""
import os
import shlex
import sys
from pathlib import Path
from typing import Any, Dict, List

import yaml

from kvstore.errors import ConfigError
from odsgd.config.flags import Parser
from odsgd.config.train import TrainConfig
from odsgd.virtual import description

DEFAULT = "cluster.yaml"
USAGE = f"""usage: odsgd profile [--write FILE] [options of odsgd train]

Measure this machine for a virtual cluster, and write its description to FILE
(default: {DEFAULT}): how long the layers of a network take, forward and
backward, and how much that varies; how long the processor takes for buckets,
as a worker and as a server. In a job it also measures the links, and the
cost of a message:

  odsgd profile --model resnet18_v2 --dataset cifar10 --data-dir DIR
  odsgd launch -n 2 -s 1 -H hosts odsgd profile --model resnet18_v2 \\
    --dataset cifar10 --data-dir DIR

then

  odsgd train --cluster {DEFAULT} --workers 8 --kvstore odsgd
"""


def main(argv: List[str]) -> int:
    if argv[:1] in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    parser = Parser("; `odsgd profile --help` says how", prog="odsgd profile", add_help=False)
    parser.add_argument("--write", default=DEFAULT)
    own, rest = parser.parse_known_args(argv)
    config, path = TrainConfig.from_flags(rest), Path(own.write)
    if config.cluster is not None:
        raise ConfigError("cluster: there is nothing to measure on a cluster in virtual time; leave it out")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"--write {path}: expected a file in a folder that is there")
    try:
        found = _measured(config)
        if found:
            path.write_text(text(found, argv), encoding="utf-8")
            print(f"wrote {path}; `odsgd train --cluster {path}` trains on it, docs/how-to/virtual.md says what it has")
    except ConfigError as error:
        if not os.environ.get("DMLC_ROLE"):
            raise
        from kvstore.job import ending
        ending.die(str(error), error.exit_code)
    return 0


def _measured(config: TrainConfig) -> Dict[str, Any]:
    """The description; empty on a worker that only took part. MXNet is imported here."""
    from odsgd.lab.profile import passes, processor, wire
    transport = wire.join(config.options.timeout_s) if os.environ.get("DMLC_ROLE") else None
    found: Dict[str, Any] = {}
    if transport is None or transport.worker_rank == 0:
        _say("what a bucket costs a worker")
        worker = processor.of_worker(config)
        _say("what it costs a server, by the store")
        rules = processor.of_server(config)
        _say("the lines of stores that send weights, and the codecs")
        lines, codecs = _megabytes(processor.of_lines()), _megabytes(processor.of_codecs())
        _say(f"{config.model}, forward and backward")
        found = {"compute": passes.measure(config), "worker": {**_megabytes(worker), "stores": lines},
                 "server": {"update": rules["ssgd"].megabyte, "rules": _megabytes(rules)}, "codecs": codecs}
        if transport is not None:
            _say("the links, and what a message costs")
    if transport is None:
        return found
    import numpy as np
    transport.total(np.zeros(1))  # the others wait here
    goodput, exchanges = wire.goodput_nbytes(transport), wire.exchanges(transport)
    if found:
        found.update(workers=max(transport.num_workers, 2))
        if exchanges:
            in_job = wire.described(exchanges, goodput, [worker["gather"], worker["scatter"]], rules[wire.STORE])
            found = {**found, "links": in_job["links"], "worker": {**found["worker"], **in_job["worker"]},
                     "server": {**in_job["server"], **found["server"]}}
        elif goodput:
            found["links"] = {"goodput": goodput}
    return found


def _say(what: str) -> None:
    print(f"measuring {what}", file=sys.stderr, flush=True)


def _megabytes(prices: Dict[str, Any]) -> Dict[str, float]:
    return {what: price.megabyte for what, price in prices.items()}


def text(found: Dict[str, Any], argv: List[str]) -> str:
    """The description as YAML, with units; it can be read."""
    units = _united(found)
    description.of(units)
    missing = "" if "links" in found else ("# Links and messages were not measured: they are the defaults. `odsgd "
                                           "launch -n 2 -s 1 odsgd profile ...` measures them.\n")
    order = ["workers", "compute", "links", "worker", "server", "codecs"]
    return (f"# Measured by: {shlex.join(['odsgd', 'profile', *argv])}\n{missing}"
            + yaml.safe_dump({key: units[key] for key in order if key in units}, sort_keys=False, width=120))


def _united(found: Any, key: str = "") -> Any:
    if isinstance(found, dict):
        return {name: _united(value, name) for name, value in found.items()}
    if isinstance(found, list):
        return [_united(value) for value in found]
    if not isinstance(found, float):
        return found
    if key == "goodput":
        return f"{8 * found / 1e6:.1f}mbit"
    return f"{found:.6g}s" if found > 0.9 else f"{1e6 * found:.6g}us"
