"""What can go wrong, as a tree.

    ConfigError(ValueError)        an option, a file or an environment that cannot work; nothing has started yet
    KVStoreError(RuntimeError)
    ├── RoundTimeoutError          an answer did not come within its deadline
    ├── WorkerLostError            a process of the job died
    ├── StoreClosedError           the store is used after close()
    └── ProtocolError              a message that breaks the rules: wrong signature, wrong round, wrong shape

Each message says which, got, expected, and what to do next.
"""
import difflib
from typing import Iterable

EXIT_USAGE, EXIT_FAILURE, EXIT_DEADLINE, EXIT_INTERRUPTED = 64, 70, 75, 130


class ConfigError(ValueError):
    """A setting cannot work."""


class KVStoreError(RuntimeError):
    """Base class of all that happens once a job runs."""


class RoundTimeoutError(KVStoreError):
    """An answer did not come within its deadline."""


class WorkerLostError(KVStoreError):
    """A process of the job died."""


class StoreClosedError(KVStoreError):
    """The store is used after ``close()``."""


class ProtocolError(KVStoreError):
    """A message breaks the rules."""


def unknown(what: str, got: str, allowed: Iterable[str], where: str = "", listed: str = "") -> ConfigError:
    """The error for a name that is not among `allowed`, with the nearest one suggested.

    `where` the name stands, e.g. `` in `run.yaml` ``; `listed`: where to read all names, if they are too many to list.

    >>> print(unknown("store", "odsdg", ["ssgd", "odsgd"]))
    unknown store `odsdg`; did you mean `odsgd`? Known: odsgd, ssgd
    """
    allowed = sorted(allowed)
    near = difflib.get_close_matches(str(got), allowed, n=1)
    hint = f"; did you mean `{near[0]}`?" if near else "."
    return ConfigError(f"unknown {what} `{got}`{where}{hint} {listed or 'Known: ' + ', '.join(allowed)}")
