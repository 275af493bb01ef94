"""The output of a process, cut into lines and into the frames of a progress bar that redraws its line with CR."""
import os
import re
from typing import List, Optional, Tuple

CHUNK = 65536
MAX_LINE = 65536
Pieces = List[Tuple[str, bool]]
"""Text, and whether it is a frame of a progress bar; the next piece replaces a frame."""


class Lines:
    """Cuts a stream of bytes.

    >>> lines = Lines()
    >>> lines.feed(b"epoch 0\\n\\r 10%"), lines.feed(b"\\r 20%"), lines.feed(b"\\rdone\\n")
    ([('epoch 0', False), (' 10%', True)], [(' 20%', True)], [('done', False)])
    """

    _ENDS = re.compile(rb"\r\n|\n|\r(?!\Z)")  # a CR at the very end may still become CR LF
    _MOVES = re.compile(r"\x1b\[\d*(;\d*)?[A-HJKf]")  # cursor movements would leave the process's line

    def __init__(self) -> None:
        self.rest = b""
        self.redrawn = False

    def feed(self, data: bytes) -> Pieces:
        """The complete lines, and the newest frame."""
        found: Pieces = []
        data, start = self.rest + data, 0
        for end in self._ENDS.finditer(data):
            self.redrawn = end.group() == b"\r"
            self._add(found, data[start:end.start()], progress=self.redrawn)
            start = end.end()
        self.rest = data[start:]
        if self.redrawn and self.rest.strip():
            self._add(found, self.rest, progress=True)
        if len(self.rest) > MAX_LINE:
            self._add(found, self.rest, progress=False)
            self.rest = b""
        return found

    def flush(self) -> Pieces:
        """The last text, without an end of line, when the stream has ended."""
        rest, self.rest = self.rest.rstrip(b"\r"), b""
        found: Pieces = []
        if rest:
            self._add(found, rest, progress=False)
        return found

    def _add(self, found: Pieces, piece: bytes, progress: bool) -> None:
        text = self._MOVES.sub("", piece.rstrip(b"\r").decode("utf-8", "replace"))
        if found and found[-1][1]:
            found.pop()
        if text.strip() or not progress:
            found.append((text, progress))


class Stream:
    """A pipe from a process: stdout, stderr, reports, or requests of its MPI. Reading never waits."""

    def __init__(self, kind: str, fd: int) -> None:
        self.kind, self.fd, self.open = kind, fd, True
        self._lines = Lines()
        os.set_blocking(fd, False)

    def read(self) -> Pieces:
        """The pieces that have come since the last call; `open` becomes false at the end of the stream."""
        data = self._chunk()
        if data is None:
            return []
        self.open = bool(data)
        return self._lines.feed(data) if data else self._lines.flush()

    def drain(self) -> Pieces:
        """The pieces that have come. The stream counts as ended, though a descendant may still hold its other end, and
        write faster than we read."""
        found: Pieces = []
        nbytes, data = 0, self._chunk()
        while data:
            found += self._lines.feed(data)
            nbytes += len(data)
            data = self._chunk() if nbytes < CHUNK else None  # a pipe has room for no more
        self.open = False
        return found + self._lines.flush()

    def _chunk(self) -> Optional[bytes]:
        try:
            return os.read(self.fd, CHUNK)
        except BlockingIOError:
            return None
        except ConnectionResetError:  # the other end of a socket ended before it read an answer
            return b""
