"""A job's status for its user: the line at the bottom of the screen, and the facts that `odsgd watch` shows.

Beats in, text and numbers out; no process, pipe, clock or terminal here. Rates and shares are means over the last
`WINDOW_S`, or the last `ENOUGH` iterations where those took longer.
"""
import bisect
import collections
import math
import statistics
from typing import Any, Deque, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from tqdm import tqdm

from odsgd.launch.policy.liveness import FRESH_S, number

WINDOW_S, ENOUGH = 10.0, 10
TRAINS = ("", "training")
"""Activities in which a worker's time is an iteration's; a script that tells none has `""`."""
UNSURE_S = 0.25
"""Beats arrive up to this late on a busy machine: a worker that is behind by less is not said to be behind."""
SAME_S = 0.3
"""Beats that are less than this apart are the same beat, passed on twice."""
SLOW, SLOW_OF_ALL = 1.25, 0.1
"""A slow worker computes `SLOW` times as long as the median worker, and longer by `SLOW_OF_ALL` of its iteration."""
MOST_TEXT, LONGEST_PATH = 200, 4096
FORMS = ("{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]",
         "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
         "{desc}: {percentage:.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]")
"""Forms of the line in tqdm's words, the longest first."""

Facts = Dict[str, Any]


class _Sample(NamedTuple):
    """What one beat said, and its time."""

    at_s: float
    progress: int  # a worker's iteration, a server's messages
    waited_s: float
    nbytes: float
    stale: Dict[str, Tuple[float, float]]
    """Gradients that a server of an asynchronous job has got, and the sum of their staleness: by the name of the worker
    that sent them, and of all workers by the server's own name."""
    trained: int = 0  # of the iterations, those from one beat in training to the next
    own_s: float = 0.0  # what these took, without what was waited


NO_BEAT = _Sample(0.0, 0, 0.0, 0.0, {})


class Overview:
    """The status of one job."""

    def __init__(self) -> None:
        self._samples: Dict[str, Deque[_Sample]] = {}
        self._beats: Dict[str, Facts] = {}
        self._began: Optional[Tuple[float, int]] = None  # time and number of the first iteration in a beat
        self._speaker = ""  # the worker whose beats tell how far the run is

    # Events

    def beats(self, beats: Mapping[str, Any], now: float) -> None:
        """An agent has passed on the beats of its processes."""
        for name, beat in beats.items():
            if isinstance(beat, dict):
                if isinstance(beat.get("run"), dict):
                    self._speaker = name
                silent_s = number(beat.get("silent_s"))
                if silent_s is not None and "at" in beat:
                    self._add(name, beat, now - max(silent_s, 0.0))
                self._beats[name] = beat

    def ended(self, name: str) -> None:
        """The process has ended."""
        self._beats.pop(name, None)
        self._samples.pop(name, None)

    def _add(self, name: str, beat: Facts, at_s: float) -> None:
        """Note a beat by the time at which the process sent it."""
        samples = self._samples.setdefault(name, collections.deque())
        if samples and at_s - samples[-1].at_s < SAME_S:
            return
        at, waited_s, nbytes = (number(beat.get(key)) or 0.0 for key in ("at", "waited_s", "nbytes"))
        progress = max(int(at), 0)
        if samples and progress < samples[-1].progress:
            samples.clear()  # the count began anew
        before = samples[-1] if samples else NO_BEAT
        trained, own_s = before.trained, before.own_s
        if samples and _trains(beat) and _trains(self._beats[name]):
            trained += progress - before.progress
            own_s += at_s - before.at_s - (waited_s - before.waited_s)
        if len(samples) > 1 and samples[-2].progress == before.progress:
            samples.pop()  # so that all but the last have another count than the one before
        samples.append(_Sample(at_s, progress, waited_s, nbytes, _stale(name, beat), trained, own_s))
        while at_s - samples[0].at_s > WINDOW_S and progress - samples[1].progress >= ENOUGH:
            samples.popleft()
        if self._began is None and at and name.startswith("worker"):
            self._began = at_s, int(at)

    # Results

    def status(self, now: float) -> Facts:
        """How far the job is, for `line`; empty until a worker has begun to train."""
        name = self._speaker or min((name for name in self._samples if name.startswith("worker")), default="")
        if self._began is None or name not in self._samples:
            return {}
        run, waiting = self._run(name), self._waiting(name)
        doing = _text(self._beats[name].get("activity"))
        total = max(number(run.get("total")) or 0, 0) or None
        return {"at": self._samples[name][-1].progress, "total": total, "rate": self._per_s(name, "progress"),
                "began": self._began[1], "elapsed_s": now - self._began[0],
                "head": (_text(run.get("head")) or name) + (f", {doing}" if doing not in TRAINS else ""),
                "tail": _text(run.get("tail")) or ("" if waiting is None else f"waiting for weights {waiting:.0%}")}

    def out(self) -> Optional[str]:
        """The folder of the run, if a process has told it; to compare, not to show."""
        return str(self._run(self._speaker).get("out") or "")[:LONGEST_PATH] or None

    def _run(self, name: str) -> Facts:
        """What a process has last told of its run."""
        run = self._beats.get(name, {}).get("run")
        return run if isinstance(run, dict) else {}

    def _together(self) -> Dict[str, int]:
        """The iterations of all workers at one time, although their beats are up to a second apart.

        That is the time of the oldest last beat; a worker that has fallen silent keeps its last iteration.
        """
        samples = {name: list(own) for name, own in self._samples.items() if name.startswith("worker")}
        last = [own[-1].at_s for own in samples.values()]
        at_s = min((one for one in last if max(last) - one < FRESH_S), default=0.0)
        found = {}
        for name, own in samples.items():
            after = bisect.bisect_right([one.at_s for one in own], at_s)
            before, then = own[max(after - 1, 0)], own[min(after, len(own) - 1)]
            share = (at_s - before.at_s) / (then.at_s - before.at_s) if then.at_s > before.at_s else 0.0
            found[name] = round(before.progress + share * (then.progress - before.progress))
        return found

    def table(self, hosts: Mapping[str, str]) -> List[Facts]:
        """A row of facts for each of these processes, which run on these hosts, workers first."""
        servers = [samples for name, samples in self._samples.items() if name.startswith("server")]
        names = sorted(set(hosts) - {"scheduler"}, key=lambda name: (name.startswith("server"), int(name.split()[1])))
        rows = [{**self._row(name), "host": hosts[name], "staleness": _staleness(name, servers)} for name in names]
        own = [row["own_ms"] for row in rows if row.get("own_ms") is not None]
        median = statistics.median_low(own) if len(own) > 1 else math.inf
        reached = self._together()
        fastest = max((row["rate"] or 0.0 for row in rows if row["name"] in reached), default=0.0)
        for row in rows:
            if row["name"].startswith("worker"):
                behind = max(reached.values(), default=0) - reached.get(row["name"], 0)
                row["behind"] = None if 0 < behind < fastest * UNSURE_S else behind
                longer_ms = (row["own_ms"] or 0.0) - median
                row["slow"] = self._judged(row["name"]) and longer_ms > max((SLOW - 1) * median,
                                                                            SLOW_OF_ALL * 1000 / row["rate"])
        return rows

    def _row(self, name: str) -> Facts:
        samples = self._samples.get(name)
        return {"name": name, "at": samples[-1].progress if samples else 0, "rate": self._per_s(name, "progress"),
                "waiting": self._waiting(name), "own_ms": self._own_ms(name),
                "bytes_per_s": self._per_s(name, "nbytes"), "doing": self._doing(self._beats.get(name, {}))}

    def _doing(self, beat: Facts) -> str:
        silent_s, waits_s = number(beat.get("silent_s")), number(beat.get("waits_s"))
        if not beat:
            return "starting"
        if silent_s is not None and silent_s > FRESH_S:
            return f"silent for {silent_s:.0f} s"
        if waits_s is not None and waits_s > FRESH_S:
            return f"has waited for {waits_s:.0f} s"
        return _text(beat.get("activity"))

    # Rates

    def _ends(self, name: str) -> Tuple[_Sample, _Sample, _Sample]:
        """The first beat; the one with which the iteration changed last, so that none is cut in two; and the last."""
        samples = self._samples.get(name) or [NO_BEAT]
        stands = len(samples) > 1 and samples[-2].progress == samples[-1].progress
        return samples[0], samples[-2 if stands else -1], samples[-1]

    def _per_s(self, name: str, field: str) -> Optional[float]:
        """The change of a count per second; None after fewer than two beats, and where the count began anew."""
        first, changed, last = self._ends(name)
        count, change = changed.progress - first.progress, getattr(changed, field) - getattr(first, field)
        if change < 0 or last.at_s <= first.at_s:
            return None
        # The iteration under way is not over: less than `count` + 1 iterations took place from `first` to `last`.
        lasted_s = max(changed.at_s - first.at_s, (last.at_s - first.at_s) * count / (count + 1))
        return float(change) / lasted_s if count else 0.0

    def _own_ms(self, name: str) -> Optional[float]:
        """What an iteration of a worker takes without waiting, evaluations and checkpoints."""
        first, changed, _ = self._ends(name)
        trained = changed.trained - first.trained
        if not trained or not name.startswith("worker"):
            return None
        return round(1000 * max(changed.own_s - first.own_s, 0.0) / trained, 3)

    def _judged(self, name: str) -> bool:
        """Whether a worker has trained enough to be called slow."""
        first, changed, _ = self._ends(name)
        return changed.trained - first.trained >= ENOUGH

    def _waiting(self, name: str) -> Optional[float]:
        """The share of its time that a worker waits; None for servers, and for workers without a store of odsgd."""
        if "waited_s" not in self._beats.get(name, {}):
            return None
        share = self._per_s(name, "waited_s")
        return None if share is None else min(share, 1.0)  # two samples may add up to more


def line(status: Facts, columns: int) -> str:
    """The status in one line of at most this many columns. In a short line the rate, the bar and the last words are
    left out, in this order.

    >>> status = {"at": 62, "total": 440, "rate": 20.0, "began": 2, "elapsed_s": 3.0, "head": "epoch 3/20",
    ...             "tail": "loss 0.3127, 1478 samples/s, staleness 1.98, accuracy 90.62%"}
    >>> for columns in 115, 85, 70: print(line(status, columns))
    epoch 3/20:  14%|█▉            | 62/440 [00:03<00:18, loss 0.3127, 1478 samples/s, staleness 1.98, accuracy 90.62%]
    epoch 3/20: 14% 62/440 [00:03<00:18, loss 0.3127, 1478 samples/s, staleness 1.98]
    epoch 3/20: 14% 62/440 [00:03<00:18, loss 0.3127, 1478 samples/s]
    """
    columns = max(columns, 0)  # tqdm cuts wide characters for ever where there are less
    words, total = status["tail"].split(", "), status["total"]

    def drawn(form: Optional[str], kept: int, columns: Optional[int] = None) -> str:
        return tqdm.format_meter(
            status["at"], None if total is None else int(total),  # type: ignore[arg-type]  # None: no end
            status["elapsed_s"], ncols=columns, unit="it", initial=status["began"], prefix=status["head"],
            rate=status["rate"], postfix=", ".join(words[:kept]), bar_format=None if total is None else form)

    fewer = [(FORMS[-1], kept) for kept in range(len(words) - 1, -1, -1)]
    for form, kept in [*((form, len(words)) for form in FORMS), *fewer]:
        if len(drawn(form, kept)) <= columns:
            break
    return drawn(form, kept, columns)


def _staleness(name: str, servers: Sequence[Deque[_Sample]]) -> Optional[float]:
    """The mean staleness of the gradients that a worker has sent, or a server has got."""
    pushes = taus = 0.0
    for samples in servers:
        first, last = (sample.stale.get(name, (0.0, 0.0)) for sample in (samples[0], samples[-1]))
        pushes, taus = pushes + last[0] - first[0], taus + last[1] - first[1]
    return taus / pushes if pushes > 0 else None


def _stale(name: str, beat: Facts) -> Dict[str, Tuple[float, float]]:
    """A server's counts, as in a sample."""
    told = beat.get("stale")
    found = {name: (0.0, 0.0)}
    for entry in told if isinstance(told, list) else []:
        numbers = [number(value) for value in entry] if isinstance(entry, list) and len(entry) == 3 else []
        if numbers and None not in numbers:
            rank, pushes, taus = (value or 0.0 for value in numbers)
            found[f"worker {int(rank)}"] = pushes, taus
            found[name] = found[name][0] + pushes, found[name][1] + taus
    return found


def _trains(beat: Facts) -> bool:
    return _text(beat.get("activity")) in TRAINS


def _text(value: object) -> str:
    """Text from a process, made fit for a terminal."""
    return "".join(filter(str.isprintable, str(value or "")))[:MOST_TEXT]
