"""The algorithms, by the names `kvstore.create` knows them by. A new one is a file here and a line below."""
from typing import Dict, Type

from .delayed import ODSGD, Delayed
from .program import Program
from .sync import SSGD

STORES: Dict[str, Type[Program]] = {
    "ssgd": SSGD,
    "odsgd": ODSGD,
    "delayed": Delayed,
}
