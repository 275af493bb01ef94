"""What only observes may not end what it observes."""
import contextlib
import sys
from typing import Callable, Iterator, Set

_told: Set[str] = set()


def tell(line: str) -> None:
    """On standard error, which may be gone or full itself."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def guarded(what: str, say: Callable[[str], None] = tell) -> Iterator[None]:
    """An error of `what` in here goes no further; the first one of this process is said."""
    try:
        yield
    except Exception as error:
        if what not in _told:
            _told.add(what)
            say(f"warning: {what} failed, and the job goes on without: {type(error).__name__}: {error}")
