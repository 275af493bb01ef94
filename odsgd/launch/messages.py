"""The messages between the launcher and its agents: a line of JSON each, over two pipes or a socket.

    to the agent
        {"processes": [{"name", "command", "env"}, ...], "env": {...}, "drop": [names], ...}
                                                      the first line: its orders, the job's secret included
        {"do": "stop", "grace_s": 5} | {"do": "kill"} | {"do": "ping"}
        {"do": "lost", "workers": [1]}                the job goes on without these: a line each in the ODSGD_LOST file
        {"do": "end", "process": "worker 1"}          it hangs: its stacks are printed, then it is killed
        {"do": "met"}                                 all workers have met all servers: nobody else is to connect
        {"do": "answer", "process", "line"}           to a question of its MPI (`pmi.py`); null: it is cut off
        {"do": "portals", "portals": [{"socket", "at", "lasting"}, ...]}   for its tunnel: sockets of other hosts, where
                                                      their tunnel is, and whether they are of use once all have met
    from the agent
        {"event": "hello", "host", "pid"}
        {"event": "started", "process": "worker 0", "pid"} | {"event": "unstartable", "process", "error"}
        {"event": "output", "process", "stream": "stdout", "text", "progress": false}
        {"event": "report", "process", "report": {...}}    a line from its ODSGD_REPORT_FD
        {"event": "asks", "process", "line"}               its MPI asks for the others
        {"event": "beats", "beats": {"worker 0": {...}}}   every second: the last beat of each process that has a pulse,
                                                           and how many seconds ago that was ("silent_s"); a tunnel
                                                           says so to its agent, with none
        {"event": "listens", "at": "10.0.0.1:4711", "place"}   its tunnel, and what tells its sockets from those of
                                                           other hosts
        {"event": "opened"}                                its tunnel has made the portals
        {"event": "warning", "text"}                       of its tunnel
        {"event": "noise", "text"}                         last words, say that its tunnel has ended
        {"event": "told", "signal": 15}                    somebody else than the launcher ends the agent, say Slurm
        {"event": "exit", "process", "code"}               after all of its output; negative: the signal that ended it
        {"event": "ended"}                                 nothing of the job is left on this host
"""
import json
import os
from typing import Any, Dict, List

from odsgd.launch.lines import CHUNK

Message = Dict[str, Any]
MOST_NOISE = 4096


class Channel:
    """One side of it. Reading and writing never wait, so that a stop is heard at any time."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd, self.write_fd = read_fd, write_fd
        self.backlog = bytearray()
        self.partial = b""
        self.open = True
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)

    def send(self, message: Message) -> None:
        """Queue one message, and write as much as can be written."""
        if self.open:
            self.backlog += json.dumps(message).encode() + b"\n"
            self.flush()

    def flush(self) -> None:
        """Write as much as the other side takes."""
        try:
            while self.backlog:
                del self.backlog[:os.write(self.write_fd, self.backlog[:CHUNK])]
        except BlockingIOError:
            pass
        except OSError:
            self.close()

    def receive(self) -> List[Message]:
        """The messages that have come; at the end of the stream `open` becomes false."""
        data = b""
        try:
            data = os.read(self.read_fd, CHUNK)
            if not data:
                self.close()
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        *whole, self.partial = (self.partial + data).split(b"\n")
        return [_message(line) for line in whole if line.strip()]

    def close(self) -> None:
        """The other side has gone."""
        self.open = False
        self.backlog.clear()


FIELDS: Dict[str, Dict[str, type]] = {
    "hello": {"host": str}, "started": {"process": str, "pid": int}, "unstartable": {"process": str, "error": str},
    "output": {"process": str, "stream": str, "text": str, "progress": bool},
    "report": {"process": str, "report": dict}, "asks": {"process": str, "line": str}, "beats": {"beats": dict},
    "told": {"signal": int},
    "listens": {"at": str, "place": str}, "opened": {}, "warning": {"text": str}, "noise": {"text": str},
    "exit": {"process": str, "code": int}, "ended": {}}
"""What an agent's message has by its event."""


def _message(line: bytes) -> Message:
    """One message; the greetings of a login shell, which come before the agent speaks, are passed on as `noise`."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if isinstance(message, dict) and ("do" in message or "processes" in message or _is_event(message)):
        return message
    return {"event": "noise", "text": line[:MOST_NOISE].decode("utf-8", "replace")}


def _is_event(message: Message) -> bool:
    fields = FIELDS.get(message["event"]) if isinstance(message.get("event"), str) else None
    return fields is not None and all(isinstance(message.get(name), kind) for name, kind in fields.items())
