"""The parts of a timeline: bars, a track of them per process, and the tracks of a job."""
import dataclasses
from typing import Any, Dict, List


@dataclasses.dataclass
class Bar:
    """A stretch of time in which a process was busy with one stage of an iteration: `compute`, `exchange` ..."""

    stage: str
    name: str
    start_s: float
    end_s: float
    args: Dict[str, Any]


@dataclasses.dataclass
class Track:
    """The bars of one process. `about`: its role, rank, host, job and clock, as its recorder wrote them."""

    about: Dict[str, Any]
    bars: List[Bar]

    @property
    def name(self) -> str:
        return f"{self.about['role']} {self.about['rank']}"

    def of(self, stage: str) -> List[Bar]:
        """The bars of one stage, in order."""
        return sorted((bar for bar in self.bars if bar.stage == stage), key=lambda bar: bar.start_s)

    def shift(self, seconds: float) -> None:
        for bar in self.bars:
            bar.start_s += seconds
            bar.end_s += seconds


@dataclasses.dataclass
class Timeline:
    """The tracks of a job on one clock, workers first; `remarks`: how well the clocks agree."""

    name: str
    tracks: List[Track]
    remarks: List[str]

    @property
    def workers(self) -> List[Track]:
        return [track for track in self.tracks if track.about["role"] == "worker"]
