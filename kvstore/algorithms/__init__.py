"""The algorithms, by the names `kvstore.create` knows them by. A new one is a file here and a line below."""
from typing import Dict, Type

from kvstore.algorithms.asynchronous import ASGD, DCASGDA, DCASGDC, SoftsyncProgram
from kvstore.algorithms.delayed import ODSGD, Delayed
from kvstore.algorithms.downpour import Downpour
from kvstore.algorithms.elastic import EAMSGD, EASGD
from kvstore.algorithms.pipelined import DSync, PipeSGD
from kvstore.algorithms.program import Program
from kvstore.algorithms.sparse import SASGD
from kvstore.algorithms.sync import SSGD

STORES: Dict[str, Type[Program]] = {
    "ssgd": SSGD,
    "odsgd": ODSGD,
    "delayed": Delayed,
    "asgd": ASGD,
    "dcasgd_c": DCASGDC,
    "dcasgd_a": DCASGDA,
    "softsync": SoftsyncProgram,
    "downpour": Downpour,
    "easgd": EASGD,
    "eamsgd": EAMSGD,
    "sasgd": SASGD,
    "dsync": DSync,
    "pipesgd": PipeSGD,
}
