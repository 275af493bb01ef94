"""What can go wrong. Each message says which, got, expected, and what to do next."""
import difflib
from typing import Iterable

EXIT_USAGE, EXIT_FAILURE, EXIT_DEADLINE, EXIT_INTERRUPTED = 64, 70, 75, 130

MOST_QUOTED, MOST_SAID = 120, 390


class ConfigError(ValueError):
    """An option, a file or an environment cannot work; nothing has started yet. Its message is one line of at most
    `MOST_SAID` characters, whatever it quotes.
    """

    exit_code = EXIT_USAGE
    """Of the command or script that it ends."""

    def __init__(self, message: object) -> None:
        super().__init__(shortened(printable(str(message)), MOST_SAID))


class LacksError(ConfigError, ModuleNotFoundError):
    """What the options need is not on this host, which another may have."""

    exit_code = EXIT_FAILURE


class KVStoreError(RuntimeError):
    """Base class of all that happens once a job runs."""

    exit_code = EXIT_FAILURE


class RoundTimeoutError(KVStoreError):
    """An answer of another process, or of a disk, did not come within its deadline."""


class WorkerLostError(KVStoreError):
    """A process of the job died."""


class StoreClosedError(KVStoreError):
    """The store is used after ``close()``."""


class DivergedError(KVStoreError):
    """A gradient, or the loss, is infinite or not a number."""


class ProtocolError(KVStoreError):
    """A message breaks the rules: wrong signature, wrong round, wrong shape."""


def shown(value: object) -> str:
    """An input as messages quote it: without control characters, and short.

    >>> shown("a\\x1b[2J"), shown(10 ** 9), len(shown("x" * 10 ** 6))
    ('a\\\\x1b[2J', '1000000000', 120)
    """
    try:
        text = value if isinstance(value, str) else repr(value) if isinstance(value, bytes) else str(value)
    except (ValueError, RecursionError):  # Python writes no number of more than 4300 digits
        text = f"a very long {type(value).__name__}"
    return shortened(printable(text[:10 * MOST_QUOTED]), MOST_QUOTED)


def printable(text: str) -> str:
    """`text` with its control characters, and what else cannot be printed, as escapes."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape", "surrogatepass").decode() for one in text)


def shortened(text: str, most: int) -> str:
    """`text`, or its beginning and its end."""
    return text if len(text) <= most else f"{text[:most * 2 // 3 - 5]} ... {text[-(most // 3):]}"


def unknown(what: str, got: str, allowed: Iterable[str], where: str = "", listed: str = "") -> ConfigError:
    """The error for a name that is not among `allowed`, with the nearest one suggested.

    `where` the name stands, e.g. `` in `run.yaml` ``; `listed`: where to read all names, if they are too many to list.

    >>> print(unknown("store", "odsdg", ["ssgd", "odsgd"]))
    unknown store `odsdg`; did you mean `odsgd`? Known: odsgd, ssgd
    """
    allowed, got = sorted(allowed), shown(got)
    near = difflib.get_close_matches(got, allowed, n=1)
    hint = f"; did you mean `{near[0]}`?" if near else "."
    return ConfigError(f"unknown {what} `{got}`{where}{hint} {listed or 'Known: ' + ', '.join(allowed)}")
