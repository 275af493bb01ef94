"""Random numbers of a network (dropout) or an optimizer (SGLD), such that a resumed run draws what it would have drawn.

Each iteration's draws are a function of (seed, iteration, rank): MXNet's generators are reseeded before it. They have
no state that could be saved, and seeding at every checkpoint instead would let the result depend on how often one is
made. It costs about 1.4 ms, so it is left out where nothing is drawn, as in most runs.
"""
import hashlib
import json
from typing import Any, Dict

from kvstore.engine._mxnet import mx

RANDOM_PREFIXES = ("_random_", "_sample_", "_npi_", "_shuffle", "sample_", "random_")


def draws(net: Any) -> bool:
    """Whether a training pass of `net` draws random numbers; True where that cannot be seen."""
    try:
        graph = net(mx.sym.var("data"))
    except Exception:  # a network that is not a graph (no HybridBlock) may do anything
        return True
    outputs = mx.sym.Group(list(graph)) if isinstance(graph, (list, tuple)) else graph
    return any(map(_is_random, json.loads(outputs.tojson())["nodes"]))


def _is_random(node: Dict[str, Any]) -> bool:
    operator, attributes = node["op"], node.get("attrs", {})
    if operator == "Dropout":
        return float(attributes.get("p", 0.5)) > 0
    if operator == "LeakyReLU":
        return attributes.get("act_type") == "rrelu"
    return bool(operator.startswith(RANDOM_PREFIXES))


def seed_iteration(seed: int, iteration: int, worker_rank: int) -> None:
    """Seed what is drawn from now on, by iteration and worker. Queued to the engine; does not wait."""
    digest = hashlib.sha256(f"{seed} {iteration} {worker_rank}".encode()).digest()
    mx.random.seed(int.from_bytes(digest[:4], "little") >> 1)  # 31 bits: MXNet takes a C int
