"""A method of a user's own: a file, what the tests find in it, and the list of methods as it was before."""
import contextlib
import textwrap
from pathlib import Path
from typing import Iterator

from kvstore import methods

HALVED = '''
    """SSGD whose worker sends a part of its gradient."""
    from dataclasses import dataclass

    from kvstore.methods.common import Options
    from kvstore.methods.contract import Step
    from kvstore.methods.sync import SSGD, Synchronous
    from kvstore.options import option, real


    class Part(Synchronous):
        arrays = {"sent": "what was pushed last"}

        def start(self, w):
            self.sent = w.zeros_like()

        def iterate(self, grad, step):
            self.sent[:] = self.options.sent_part * grad
            return super().iterate(self.sent, step)


    class Halved(SSGD):
        name = "halved"
        worker = Part

        @dataclass(frozen=True)
        class Options(Options):
            sent_part: float = option(0.5, real(above=0), "part of a gradient that is sent", tunable=True)
'''


def write(folder: Path, text: str = HALVED, name: str = "own_method.py") -> Path:
    """A file with this method."""
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


@contextlib.contextmanager
def as_they_were() -> Iterator[None]:
    """Afterwards the methods are those from before."""
    before = dict(methods.METHODS)
    yield
    methods.METHODS.clear()
    methods.METHODS.update(before)
