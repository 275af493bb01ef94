"""How this process ends: it dies, saying why, or leaves its job; and, for what runs at exit, how its script has ended.

An error leaves `sys.last_type`. SystemExit leaves nothing, so three things are kept: the frame in which the script
runs, which stands at a return if it came to its end; what `sys.exit` was given last, and in which error's handler; and
whether Python has printed the text of a SystemExit.
"""
import atexit
import builtins
import contextlib
import functools
import io
import opcode
import os
import sys
import threading
import traceback
import types
from typing import Any, Callable, Optional

from kvstore.errors import EXIT_DEADLINE, EXIT_FAILURE, EXIT_INTERRUPTED, ConfigError, DivergedError, KVStoreError
from kvstore.job.environment import who
from kvstore.job.report import report

DEAD_WITHIN_S = 5.0
"""A process that dies waits no longer for the reader of its output, which may be stopped."""
MOST_SHOWN = 1000
"""Characters of an error that the launcher gets; the whole error is printed."""
_script: Optional[types.FrameType] = None
_status: Any = None
_handled = ""
_has_last_words = False


def die(message: str, status: int, consequence: bool = False) -> None:
    """End this process at once, saying why; `consequence`: another process is to blame, if one fails as well.

    Not sys.exit: ps-lite waits for every other process in its destructors, and would wait for ever.
    """
    name = "" if message.startswith((f"{who()}, ", f"{who()}: ")) else f"{who()}: "  # errors may say it themselves
    with contextlib.suppress(RuntimeError):  # no thread begins once Python is ending
        last = threading.Timer(DEAD_WITHIN_S, os._exit, [status])
        last.daemon = True
        last.start()
    try:
        print(f"{name}{message}", file=sys.stderr, flush=True)
        lines = message.strip().splitlines()
        said = lines[-1] if "Traceback" in lines[0] else lines[0]
        report("failed", error=said[:MOST_SHOWN], consequence=consequence or status == EXIT_DEADLINE)
        sys.stdout.flush()
    finally:  # the reader of our output may be gone
        os._exit(status)


def check_or_die(check: Optional[Callable[[Any], None]], floats: Any) -> None:
    """Check, and end the process if the floats have diverged; for threads on which nobody could catch the error."""
    try:
        if check is not None:
            check(floats)
    except DivergedError as error:
        die(str(error), EXIT_FAILURE)


def die_of_errors() -> None:
    """Let an error that nobody catches end this process at once, saying why. A second call does nothing."""
    previous = sys.excepthook
    if hasattr(previous, "dies_in"):
        previous.dies_in = os.getpid()
        return

    def hook(kind: Any, error: BaseException, trace: Any) -> None:
        if os.getpid() != hook.dies_in:  # type: ignore[attr-defined]
            previous(kind, error, trace)  # a child of this process, whose failure is its parent's affair
            sys.stdout.flush()
            os._exit(1)
        if isinstance(sys.stderr, io.StringIO):  # of torch.distributed's hook; nobody would read it
            sys.stderr = sys.__stderr__ or sys.stderr
        ours = issubclass(kind, (ConfigError, KVStoreError))
        if previous is not sys.__excepthook__ and not (ours and str(previous.__module__).startswith("torch.")):
            previous(kind, error, trace)  # PyTorch's own prints the traceback
        if issubclass(kind, KeyboardInterrupt):
            die("interrupted", EXIT_INTERRUPTED)
        if ours:
            die(_with_place(str(error), trace), kind.exit_code)
        die("".join(traceback.format_exception(kind, error, trace)), EXIT_FAILURE,
            consequence="Connection closed by peer" in str(error))  # gloo's, of a call of the script's own

    hook.dies_in = os.getpid()  # type: ignore[attr-defined]
    sys.excepthook = hook


def end_well(leave: Callable[[], None], waits: Optional[Callable[[], bool]] = None) -> None:
    """However this process ends, it must neither wait for others for ever nor let them wait for it.

    It leaves its job by `leave` if all is well, and otherwise dies, saying why. `waits`: whether it cannot leave
    before all others do; then it dies of an exit status, too.
    """
    die_of_errors()
    if waits is not None:
        follow()

    here, hook = os.getpid(), sys.excepthook

    def end() -> None:
        if os.getpid() != here:  # a child of this process, whose parent leaves the job
            return
        if hasattr(sys, "last_type") and not hasattr(sys, "ps1"):
            die(f"ended by {sys.last_type}", EXIT_FAILURE)  # another excepthook has printed the error
        if waits is not None and exit_status() and waits():
            die(f"ended with exit status {exit_status()}{_handled}", exit_status())
        try:
            leave()
        except BaseException as error:  # Python itself would print it and end well
            hook(type(error), error, error.__traceback__)

    atexit.register(end)


def _with_place(message: str, trace: Any) -> str:
    """The message with the script's own line: an error of ours says what to do, and needs no more of a traceback."""
    others = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep, os.path.dirname(os.__file__) + os.sep
    script = [at for at in traceback.extract_tb(trace) if "site-packages" not in at.filename
              and not os.path.abspath(at.filename).startswith(others)]  # gluon.Trainer, too, stands between them
    first, *rest = message.split("\n", 1)
    place = f" ({os.path.basename(script[-1].filename)}, line {script[-1].lineno})" if script else ""
    return "\n".join([first + place, *rest])


def handled() -> str:
    """The error that the script handles now, which may be about to end it, with its place; empty: there is none."""
    error = sys.exc_info()[1]
    if not isinstance(error, Exception) or isinstance(error, StopIteration):
        return ""
    return _with_place(f"{type(error).__name__}: {error}", error.__traceback__)


def follow() -> None:
    """Let `failed` know what happens from now on. A second call does nothing."""
    global _script
    if _script is None:
        _script = sys._current_frames()[threading.main_thread().ident or 0]
        while _script.f_back:
            _script = _script.f_back
        sys.exit = _noting(sys.exit)
        for name in {"exit", "quit"} & set(vars(builtins)):
            setattr(builtins, name, _noting(getattr(builtins, name)))
        if sys.stderr:
            sys.stderr.write = _noting_last_words(sys.stderr.write)  # type: ignore[method-assign]


def _noting(leave: Any) -> Any:
    @functools.wraps(leave)
    def exit(*status: Any) -> None:
        global _status, _handled
        before, _status, error = _status, status[0] if status else None, sys.exc_info()[1]
        if error is not None and not isinstance(error, SystemExit):
            _handled = f", after {type(error).__name__}: {error}"
        elif _status != before:
            _handled = ""
        leave(*status)

    return exit


def _noting_last_words(write: Callable[[str], int]) -> Callable[[str], int]:
    def noted(text: str) -> int:
        global _has_last_words
        if sys._getframe().f_back is None:  # Python itself writes: the text of the SystemExit that ends the script
            _has_last_words = True
        return write(text)

    return noted


def failed() -> bool:
    """Whether the script ended by an error, or by an exit status other than 0."""
    return hasattr(sys, "last_type") or exit_status() != 0


def exit_status() -> int:
    """The exit status of a script that has ended without an error.

    Python does not tell the number of a SystemExit that the script itself has raised, as in `raise
    SystemExit(main())`. It counts as 0: a worker that has done its part must not look as if it had failed.
    """
    assert _script is not None
    at = opcode.opname[_script.f_code.co_code[_script.f_lasti]]
    left_by_call = at not in ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS")
    status = (_status or 0) if left_by_call else 0
    return status if isinstance(status, int) and not _has_last_words else 1  # Python's own, if it has printed a text
