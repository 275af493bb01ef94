"""What a user sees of a run: one line on a terminal that is redrawn, plain lines in a log. One worker speaks, the
others do not.

In a job the terminal is the launcher's. It draws the line by the beats of this process (`odsgd.launch.view.overview`),
and says by ODSGD_LIVE that it does.
"""
import os
import sys
from typing import Any, Dict, Optional

from tqdm import tqdm

from kvstore.job import environment
from kvstore.job.aside import guarded
from kvstore.job.pulse import pulse


class Progress:
    """Lines on standard output; on a terminal also a bar over the iterations.

    `out`: where the run lies, for those who ask the launcher for it.
    """

    def __init__(self, total: int, done: int, silent: bool, epochs: int = 0, out: str = "") -> None:
        self._total, self._epochs, self._out, self.silent = total, epochs, os.path.abspath(out), silent
        self._live = environment.launched() and bool(os.environ.get("ODSGD_LIVE"))
        bar = not silent and sys.stderr.isatty()
        self._bar: Optional[Any] = tqdm(total=total, initial=done, unit="it", dynamic_ncols=True) if bar else None
        self._show({})

    def _show(self, record: Dict[str, Any]) -> None:
        """On the line that is redrawn: the epoch, and numbers of the last iterations."""
        if self.silent:
            return
        head = tail = ""
        if record:
            head = f"epoch {record['epoch']}/{self._epochs}"
            tail = f"{learned(record, 'loss {:.4f}')}, {record['samples_per_s']:.0f} samples/s"
        if "staleness_mean" in record:
            tail += f", staleness {record['staleness_mean']:.2f}"
        if "train_loss" in record:
            tail += learned(record, ", accuracy {1:.2%}")
        if self._bar is not None:
            self._bar.set_description_str(head, refresh=False)
            self._bar.set_postfix_str(tail)
        told = {"total": self._total, "head": head, "tail": tail, "out": self._out}
        pulse.more["run"] = lambda: told

    def say(self, line: str) -> None:
        """One line (or several). Where they cannot be written the training goes on."""
        with guarded("standard output"):
            if self._bar is not None:
                self._bar.write(line)
            elif not self.silent:
                _print(line)

    def advance(self) -> None:
        """One more iteration has been queued."""
        if self._bar is not None:
            self._bar.update()

    def interval(self, record: Dict[str, Any]) -> None:
        """Numbers of the last iterations: into the bar, or as a line."""
        self._show(record)
        if self._bar is None and not self._live:
            self.say(f"iteration {record['iteration']}/{self._total}: {measured(record)}")

    def epoch(self, record: Dict[str, Any]) -> None:
        """Numbers of an epoch."""
        tested = ""
        if "test_accuracy" in record:
            tested = f"; test: loss {record['test_loss']:.4f}, accuracy {record['test_accuracy']:.2%}"
        self.say(f"epoch {record['epoch']}/{self._epochs}: {measured(record)}{tested}")

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()


def _print(line: str) -> None:
    try:
        print(line, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  else Python tries again at its end, and exits with 120
        raise


def learned(record: Dict[str, Any], words: str) -> str:
    """Loss and accuracy of a record, where it has them."""
    if "train_loss" not in record:
        return "emulated compute"
    return words.format(record["train_loss"], record["train_accuracy"])


def measured(record: Dict[str, Any]) -> str:
    """Loss, accuracy, speed, learning rates, staleness and virtual time of a record, for a line."""
    line = (f"{learned(record, 'loss {:.4f}, accuracy {:.2%}')}, {record['samples_per_s']:.0f} samples/s, "
            f"{record['iteration_ms']:.2f} ms, lr {record['lr']:g}")
    if record.get("lr_local") is not None:
        line += f", lr_local {record['lr_local']:g}"
    if "staleness_mean" in record:
        line += f", staleness {record['staleness_mean']:.2f}, {record['updates_per_s']:.0f} updates/s"
    if "virtual_seconds" in record:
        line += f"; virtual: {record['virtual_seconds']:.4g} s, {record['virtual_iteration_ms']:.4g} ms per iteration"
    return line
