"""What the papers show, and how it is run here: every table and figure, read from ``papers/PAPER.yaml``.

    title: …                                    the paper
    items:
      table-2:                                  one table or figure
        caption: …                              what it shows
        state: run                              of STATES; `note` says more, `preset` names a file in configs/
        measures: [accuracy]                    columns of its table here
        options: {model: resnet18_v2, …}        of `odsgd train`, for all cells …
        cluster: {…}                            … and the virtual cluster that they run on
        scales:
          small: {options: {…}, differs: […]}   further options of a scale, and what makes it another than the paper's
                                                `times: {lr: 0.125}`: factors of options; and the plan of seeds, from
                                                before the runs: `plan: [{turn: 2, cells: "ssgd*", seeds: 3}]`, whose
                                                turns are an order of all runs of all papers; `had: 1`:
                                                so many of the seeds were there before
        cells:                                  or the name of an item that has the same
          ssgd-4: {label: …, options: {…}, cluster: {…}, paper: {accuracy: 80.482}}
                                                `real: true`: a job of processes on this machine, not virtual
                                                `same_as: table-1/paper/ssgd`: that cell's runs, none of its own
        grid: {lr: [0.1, 0.2]}                  each cell once with each value, called ssgd-4-1, ssgd-4-2 …; then the
                                                only measure is accuracy
        pictures:                               or the name of an item that has the same
          - {kind: curve, x: epoch, y: accuracy}
          - {kind: bars, y: speed, over: {ssgd-4: [asgd-4, odsgd-4]}}     how many times those of another cell
        claims:                                 or the name of an item that has the same
          close: {says: …, where: section 4.3, tests: [{of: odsgd-4.accuracy, minus: ssgd-4.accuracy, above: -0.5}]}
                                                `than: {of: …, minus: …}` beside `minus`: the difference less another;
                                                `paper: 1.3`: the paper's number of it
      figure-11: {cells_of: table-2, …}         other pictures and claims of the same runs
    known: {times: […]}                         what a reader asks first and no claim says: learning, times or open

A text may have numbers of ours, which are worked out: `{od-sgd/table-1/paper: odsgd.accuracy - ssgd.accuracy}`.

The largest scale whose plan is full for all cells of a claim decides it, by the seeds of that plan; without such a plan
what there is decides. A claim without `tests` says in `why` what keeps it from being decided here. Only runs at the
paper's scale decide one with `scale: paper`; and one with `from_seed: {small: 3}` is decided at that scale
by other seeds than those that suggested it.
"""
from __future__ import annotations

import dataclasses
import fnmatch
import functools
import hashlib
import json
import math
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Type, TypeVar

from kvstore.errors import ConfigError, shown, unknown
from odsgd.config import methods
from odsgd.config.files import read_yaml_file
from scripts.reproduction import results
from scripts.reproduction.measures import TIMES
from scripts.reproduction.results import Key, Result

FOLDER = Path(__file__).resolve().parent / "papers"

PAPERS = ("od-sgd", "sasgd", "pipe-sgd", "delayed-update", "staleness-aware-asgd")

BEYOND = "beyond"
"""What no paper shows, declared likewise."""

SOURCES = (*PAPERS, BEYOND)

STATES = {
    "run": "runs here",
    "preset": "needs ImageNet or GPUs; a preset is ready",
    "none": "cannot be run here",
    "own": "in none of the papers",
    "drawing": "a drawing or a table without results",
}

SCALES = ("paper", "medium", "small")

ABOUT = ("learning", "times")

AXES = ("epoch", "seconds")
"""Of curves; seconds are virtual."""

EXAMPLES = {"mnist": 60_000, "cifar10": 50_000}
"""Of the whole data set, for training."""

FIXED: Dict[str, Any] = {"on_nan": "continue", "log_interval": 10 ** 9, "keep_checkpoints": 2}
"""Options of every run: a run that diverges is a result, and only epochs are kept of its metrics."""

Made = TypeVar("Made")


def _empty() -> Any:
    """The default of a field: an empty table."""
    return dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One curve, bar or number of an item: how it is trained, and the paper's numbers of it by measure.

    `real`: as a job of real processes on this machine; `cluster` has their numbers. `same_as`: ITEM/SCALE/CELL whose
    runs are shown, for there are none of its own.
    """

    name: str
    label: str
    options: Mapping[str, Any] = _empty()
    cluster: Mapping[str, Any] = _empty()
    paper: Mapping[str, float] = _empty()
    real: bool = False
    same_as: str = ""


@dataclasses.dataclass(frozen=True)
class Turn:
    """A part of the plan: seeds of the cells that a pattern names, and how many of them were there before the plan."""

    turn: float
    cells: str
    seeds: int
    had: int = 0


@dataclasses.dataclass(frozen=True)
class Scale:
    """The size at which an item's cells are run."""

    name: str
    options: Mapping[str, Any] = _empty()
    times: Mapping[str, float] = _empty()
    differs: Tuple[str, ...] = ()
    plan: Tuple[Turn, ...] = ()

    def seeds(self, cell: str) -> int:
        """So many are planned for a cell."""
        return max((one.seeds for one in self.plan if fnmatch.fnmatchcase(cell, one.cells)), default=0)

    def had(self, cell: str) -> float:
        """So many of these were there before the plan; of a cell without a plan, all."""
        return max((one.had for one in self.plan if fnmatch.fnmatchcase(cell, one.cells)), default=math.inf)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A number of our runs, and the open interval in which it has to lie. `of`, `minus` and `over` are CELL.MEASURE;
    `than` has `of` and the same word again. `paper`: the paper's number, if it does not follow from those of its cells.
    """

    of: str
    minus: str = ""
    over: str = ""
    than: Mapping[str, str] = _empty()
    above: float = -math.inf
    below: float = math.inf
    paper: Optional[float] = None

    @property
    def sides(self) -> Sequence[Tuple[str, str]]:
        """Cell and measure of one side, two, or four: the first two against the others."""
        named = (self.of, self.minus, self.over, *(self.than.get(key, "") for key in ("of", "minus", "over")))
        return [(cell, measure) for cell, dot, measure in (one.rpartition(".") for one in named) if dot]


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a paper says of an item, and the tests that must all hold for it; without any, `why`.

    `scale`: the only one that decides it; None: any. `from_seed`: by scale, the first seed that counts.
    `about`: times, which are those of a simulator, or learning. `certain`: it cannot fail there. `known`: in a few
    words, if it is what a reader asks first.
    """

    name: str
    says: str
    where: str
    tests: Tuple[Comparison, ...] = ()
    why: str = ""
    scale: Optional[str] = None
    from_seed: Mapping[str, int] = _empty()
    about: str = ""
    certain: bool = False
    known: str = ""


@dataclasses.dataclass(frozen=True)
class Picture:
    """Our picture of an item. `kind`: curve, of `y` over `x` (one of AXES); histogram, of staleness; bars, of `y`, each
    as it is or divided by that of the cell `over` it; lengths: `y` less that of the cell `over` it, by iterations, a
    line for all cells whose labels are the same up to the last comma. `label` of that axis, if it is not the measure's;
    `names`, if they are not the cells' labels; `papers`: the paper's bars, if they are not of its cells; `title` of its
    panel, if it is not what the labels have in common; `ordered`: so many of its lines are, the first, so their colours
    are, too.
    """

    kind: str
    x: str = "epoch"
    y: str = "accuracy"
    cells: Tuple[str, ...] = ()
    over: Mapping[str, str] = _empty()  # by cell; in the file by the cell that is `over` others
    label: str = ""
    names: Mapping[str, str] = _empty()
    papers: Mapping[str, Any] = _empty()
    title: str = ""
    ordered: int = 0


@dataclasses.dataclass(frozen=True)
class Grid:
    """Cells of which each is run once with each value of an option."""

    option: str
    values: Tuple[Any, ...]
    rows: Mapping[str, Cell]

    def name(self, row: str, value: Any) -> str:
        """Of the cell that one of `rows` with a value is."""
        return f"{row}-{self.values.index(value) + 1}"

    def cells(self) -> Dict[str, Cell]:
        made = [dataclasses.replace(cell, name=self.name(row, value), label=f"{cell.label}, {self.option} {value}",
                                    options={**cell.options, self.option: value})
                for row, cell in self.rows.items() for value in self.values]
        return {cell.name: cell for cell in made}


@dataclasses.dataclass(frozen=True)
class Item:
    """One table or figure of a paper. `examples` that a run of the paper was trained on, if no scale `paper` says so;
    `guessed`: the length of that training, where the paper gives none.
    `fitted`: cells whose numbers here were fitted to the paper's; those of the others are predictions, with errors.
    """

    paper: str
    name: str
    caption: str
    state: str
    note: str = ""
    preset: Optional[str] = None
    measures: Tuple[str, ...] = ()
    options: Mapping[str, Any] = _empty()
    cluster: Mapping[str, Any] = _empty()
    scales: Mapping[str, Scale] = _empty()
    cells: Mapping[str, Cell] = _empty()
    grid: Optional[Grid] = None
    cells_of: Optional[str] = None
    pictures: Tuple[Picture, ...] = ()
    claims: Tuple[Claim, ...] = ()
    examples: Optional[float] = None
    guessed: str = ""
    fitted: str = ""

    @property
    def full_name(self) -> str:
        return f"{self.paper}/{self.name}"

    @property
    def title(self) -> str:
        """``Table 2``, or ``Figure 4, mnist-mlp``."""
        kind, number, *part = self.name.split("-", 2)
        return f"{kind.capitalize()} {number}" + "".join(f", {one}" for one in part)

    def share(self, result: Result) -> float:
        """How much of the paper's training a run is, by examples; NaN where that is not known."""
        full = self.scales.get("paper")
        options = {**self.options, **full.options} if full else {}
        whole = self.examples or options.get("epochs", math.nan) * EXAMPLES.get(options.get("dataset", ""), math.nan)
        workers = result.asked["cluster"].get("workers", 1)
        return float(result.column("iteration")[-1] * result.config["batch_size"] * workers / whole)

    def trials(self, scale: str, seeds: int) -> Iterator[Trial]:
        """All runs of a scale, the first seed of every cell before the second of any."""
        for seed in range(seeds):
            for cell in self.cells.values():
                if not cell.same_as:
                    yield Trial(self, self.scales[scale], cell, seed)


@dataclasses.dataclass(frozen=True)
class Paper:
    name: str
    title: str
    cite: str
    items: Mapping[str, Item]
    known: Mapping[str, Sequence[str]] = _empty()

    def trial(self, item: str, scale: str, cell: str, seed: int) -> Optional[Trial]:
        """By names; None if there is no such cell."""
        found = self.items.get(item)
        if found is None or scale not in found.scales or cell not in found.cells or found.cells[cell].same_as:
            return None
        return Trial(found, found.scales[scale], found.cells[cell], seed)

    def planned(self) -> List[Tuple[float, Trial]]:
        """All trials of the plan by their turns, each at its first; in a turn the first seed of every cell before the
        second of any.
        """
        found = [(one.turn, self._shown(item, scale, cell, seed)) for item in self.items.values()
                 for scale in item.scales.values() for one in scale.plan for seed in range(one.seeds)
                 for cell in item.cells.values() if fnmatch.fnmatchcase(cell.name, one.cells)]
        firsts: Dict[str, Tuple[float, Trial]] = {}
        for turn, trial in sorted(found, key=lambda one: one[0]):
            firsts.setdefault(str(trial), (turn, trial))
        return list(firsts.values())

    def _shown(self, item: Item, scale: Scale, cell: Cell, seed: int) -> Trial:
        """The trial of a cell, or of the one whose runs it shows."""
        if cell.same_as:
            of, at, name = cell.same_as.split("/")
            item, scale, cell = self.items[of], self.items[of].scales[at], self.items[of].cells[name]
        return Trial(item, scale, cell, seed)

    def runs_of(self, item: Item) -> Item:
        """The item whose cells this one shows: itself, mostly."""
        return self.items[item.cells_of or item.name]


@dataclasses.dataclass(frozen=True)
class Trial:
    """One training run: a cell at a scale, with a seed."""

    item: Item
    scale: Scale
    cell: Cell
    seed: int

    def __str__(self) -> str:
        return f"{self.item.full_name} {self.cell.name}, {self.scale.name}, seed {self.seed}"

    @property
    def file(self) -> str:
        """Of the results of its item at its scale, below the folder of all results."""
        return f"data/{self.item.full_name}-{self.scale.name}.jsonl"

    @property
    def key(self) -> Key:
        """Of its result in that file."""
        return self.item.name, self.scale.name, self.cell.name, self.seed

    @property
    def asked(self) -> Dict[str, Any]:
        """Its options, those that cells share only where its store takes them; and its virtual cluster."""
        shared = {**self.item.options, **self.scale.options}
        store = {**shared, **self.cell.options}.get("kvstore")
        goes = {key: value for key, value in shared.items() if not methods.takers(key) or store in methods.takers(key)}
        options = {key: value * self.scale.times[key] if key in self.scale.times else value
                   for key, value in {**goes, **self.cell.options}.items()}
        cluster = {**self.item.cluster, **self.cell.cluster, "seed": self.seed}
        if self.cell.real:
            cluster = {"real": True, "workers": cluster.get("workers", 2), "servers": cluster.get("servers", 1)}
        return {"options": {**FIXED, **options, "seed": self.seed}, "cluster": cluster}

    @property
    def folder(self) -> str:
        """Of its run, below the folder of all runs: another one for other options."""
        text = json.dumps(self.asked, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return f"{self.item.full_name}/{self.scale.name}/{self.cell.name}-{self.seed}-{digest}"

    def result(self, folder: Path) -> Optional[Result]:
        """What it came to, in the folder of all results; None if it has not run as it is declared now."""
        return self.among(results.read(folder / self.file))

    def among(self, found: Mapping[Key, Result]) -> Optional[Result]:
        """The same, from the results of its file, which have been read."""
        result = found.get(self.key)
        return result if result and not self.otherwise(result) else None

    def otherwise(self, result: Result) -> str:
        """A sentence on the first option whose value in the result is not the one declared now; empty if there is none.
        """
        asked = self.asked
        for part in ("options", "cluster"):
            for key in sorted({*asked[part], *result.asked[part]}):
                then, now = (one[part].get(key, "nothing") for one in (result.asked, asked))
                if then != now:
                    return (f"{self}: was made with {key}: {shown(then)}, and declared is {shown(now)}; run its "
                            "cell again, or remove its line")
        return ""


# --- reading ----------------------------------------------------------------------------------------------------------

@functools.lru_cache(maxsize=None)
def paper_called(name: str) -> Paper:
    """The declarations of one paper; what is wrong with them names the file and the place."""
    return read_paper(FOLDER / f"{name}.yaml")


def papers() -> List[Paper]:
    """All five, and what is beyond them."""
    return [paper_called(name) for name in SOURCES]


def named(names: Sequence[str]) -> List[Item]:
    """The items that a user names, as PAPER/ITEM, or as PAPER for all of a paper that have cells of their own."""
    known = {item.full_name: paper.runs_of(item) for paper in papers() for item in paper.items.values()}
    found: List[Item] = []
    for name in names:
        if name not in known and name not in SOURCES:
            raise unknown("table or figure", name, [*known, *SOURCES], listed="`scripts/reproduce --list` lists all")
        found += [known[name]] if name in known else [
            item for item in paper_called(name).items.values() if item.scales]
    return list({item.full_name: item for item in found}.values())


def read_paper(path: Path) -> Paper:
    """The declarations in any file. tests/test_reproduce.py checks that whatever they name exists."""
    paper = _made(Paper, read_yaml_file(str(path)), f"`{path}`", name=path.stem)
    written: Mapping[str, Any] = paper.items
    for key, value in written.items():
        for part in ("cells", "pictures", "claims"):
            if isinstance(value, dict) and isinstance(value.get(part), str):  # another item's, as it is written there
                if value[part] not in written:
                    raise unknown("item", value[part], written, where=f" after {part} of {key} in `{path}`")
                value[part] = written[value[part]].get(part, {})
    return dataclasses.replace(paper, items={
        key: _item(path.stem, key, value, f"`{path}`: {key}") for key, value in written.items()})


def _item(paper: str, name: str, value: Any, where: str) -> Item:
    item = _made(Item, value, where, paper=paper, name=name)
    cells = {key: _made(Cell, one, f"{where}, cell {key}", name=key) for key, one in item.cells.items()}
    grid = None
    if item.grid:
        (option, values), = value["grid"].items()
        grid = Grid(option, tuple(values), cells)
    return dataclasses.replace(
        item, cells=grid.cells() if grid else cells, grid=grid,
        scales={key: _scale(key, one, f"{where}, scale {key}") for key, one in item.scales.items()},
        pictures=tuple(_picture(one, f"{where}, a picture") for one in item.pictures),
        claims=tuple(_claim(key, one, f"{where}, claim {key}") for key, one in value.get("claims", {}).items()))


def _scale(name: str, value: Any, where: str) -> Scale:
    scale = _made(Scale, value, where, name=name)
    return dataclasses.replace(scale, plan=tuple(_made(Turn, one, f"{where}, plan") for one in scale.plan))


def _picture(value: Any, where: str) -> Picture:
    picture = _made(Picture, value, where)
    over = {cell: base for base, cells in picture.over.items() for cell in cells}
    return dataclasses.replace(picture, over=over, cells=picture.cells or tuple(over))


def _claim(name: str, value: Any, where: str) -> Claim:
    claim = _made(Claim, value, where, name=name)
    tests = tuple(_made(Comparison, one, f"{where}, a test") for one in value.get("tests", ()))
    measures = {measure for one in tests for _, measure in one.sides}
    about = claim.about or ("times" if measures and measures <= TIMES else "learning")
    return dataclasses.replace(claim, tests=tests, about=about)


def _made(kind: Type[Made], value: Any, where: str, **known: Any) -> Made:
    """An object whose other fields are the keys of a table, as they stand there; lists as tuples."""
    fields = [one for one in dataclasses.fields(kind) if one.name not in known]  # type: ignore[arg-type]
    needed = [one.name for one in fields if one.default is one.default_factory is dataclasses.MISSING]
    if not isinstance(value, dict) or not {*needed} <= {*value}:
        raise ConfigError(f"{where}: expected {', '.join(needed) or 'a table'}, got {value!r}")
    for key in value:
        if key not in [one.name for one in fields]:
            raise unknown("key", key, [one.name for one in fields], where=f" in {where}")
    return kind(**known, **{key: tuple(one) if isinstance(one, list) else one for key, one in value.items()})
