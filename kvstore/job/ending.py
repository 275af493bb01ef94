"""How the script of this process has ended, for what runs at exit.

An error leaves `sys.last_type`. SystemExit leaves nothing, so two things are kept: the frame in which the script runs,
which stands at a return if it came to its end, and what `sys.exit` was given last.
"""
import functools
import opcode
import sys
import threading
import types
from typing import Any, Optional

_script: Optional[types.FrameType] = None
_status: Any = "unknown"


def follow() -> None:
    """Let `failed` know what happens from now on. A second call does nothing."""
    global _script
    if _script is None:
        _script = sys._current_frames()[threading.main_thread().ident or 0]
        while _script.f_back:
            _script = _script.f_back
        sys.exit = _noting(sys.exit)


def _noting(leave: Any) -> Any:
    @functools.wraps(leave)
    def exit(*status: Any) -> None:
        global _status
        _status = status[0] if status else None
        leave(*status)

    return exit


def failed() -> bool:
    """Whether the script ended by an error, or by a SystemExit that is not known to mean success.

    A script that raises SystemExit itself, without `sys.exit`, counts as failed: its status cannot be known here.
    """
    return hasattr(sys, "last_type") or (_broken_off() and _status not in (None, 0))


def _broken_off() -> bool:
    assert _script is not None
    at = opcode.opname[_script.f_code.co_code[_script.f_lasti]]
    return at not in ("RETURN_VALUE", "RETURN_CONST")
