"""The algorithms, by the names `kvstore.create` knows them by. A new one is a file here and a line below."""
from typing import Dict, Type

from .asynchronous import ASGD, DCASGDA, DCASGDC, SoftsyncProgram
from .delayed import ODSGD, Delayed
from .downpour import Downpour
from .elastic import EAMSGD, EASGD
from .pipelined import DSync, PipeSGD
from .program import Program
from .sparse import SASGD
from .sync import SSGD

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
