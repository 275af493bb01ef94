"""What the papers show, and how it is run here: every table and figure, read from ``papers/PAPER.yaml``.

    title: …                                    the paper
    items:
      table-2:                                  one table or figure
        caption: …                              what it shows
        state: run                              of STATES; `note` says more, `preset` names a file in configs/
        measures: [accuracy]                  columns of its table here
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
                                                `as: table-1/paper/ssgd`: the runs of that cell, and none of its own
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

A claim is told by the largest scale whose plan is full for all of its cells, by the seeds of that plan; without such a
plan by what there is. A claim without `tests` says in `why` what keeps it from being told here; one with `scale: paper`
is told by runs at the paper's scale only, and one with `from_seed: {small: 3}` at that scale
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
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from kvstore.errors import ConfigError, unknown
from odsgd.config import methods
from odsgd.config.files import read_yaml_file
from odsgd.lab.reproduce.measures import MEASURES, TIMES

FOLDER = Path(__file__).resolve().parent / "papers"

PAPERS = ("od-sgd", "sasgd", "pipe-sgd", "delayed-update", "staleness-aware-asgd")

BEYOND = "beyond"
"""What no paper shows, declared likewise."""

SOURCES = (*PAPERS, BEYOND)

STATES = {
    "run": "runs here",
    "preset": "needs ImageNet or GPUs; a preset is ready",
    "none": "cannot be had",
    "own": "in none of the papers",
    "drawing": "a drawing or a table without results",
}

SCALES = ("paper", "medium", "small")

ABOUT = ("learning", "times")

AXES = ("epoch", "seconds", "hours")
"""Of curves; seconds and hours are virtual."""

FIXED: Dict[str, Any] = {"on_nan": "continue", "log_interval": 10 ** 9, "keep_checkpoints": 2}
"""Options of every run: a run that diverges is a result, and only epochs are kept of its metrics."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One curve, bar or number of an item: how it is trained, and the paper's numbers of it by measure.

    `real`: as a job of real processes on this machine; `cluster` has their numbers. `alike`: item, scale and cell whose
    runs are shown, for there are none of its own.
    """

    name: str
    label: str
    options: Mapping[str, Any]
    cluster: Mapping[str, Any]
    paper: Mapping[str, float]
    real: bool = False
    alike: Optional[Tuple[str, str, str]] = None


@dataclasses.dataclass(frozen=True)
class Scale:
    """The size at which an item's cells are run. `plan`: turns, each with the pattern of its cells, their number of
    seeds, and how many of these were there before the plan.
    """

    name: str
    options: Mapping[str, Any]
    times: Mapping[str, float]
    cluster: Mapping[str, Any]
    differs: Tuple[str, ...]
    plan: Tuple[Tuple[float, str, int, int], ...]

    def seeds(self, cell: str) -> int:
        """So many are planned for a cell."""
        return max((seeds for _, cells, seeds, _ in self.plan if fnmatch.fnmatchcase(cell, cells)), default=0)

    def had(self, cell: str) -> float:
        """So many of these were there before the plan; of a cell without a plan, all."""
        return max((had for _, cells, _, had in self.plan if fnmatch.fnmatchcase(cell, cells)), default=math.inf)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A number of our runs, and the open interval in which it has to lie.

    `sides`, each a cell and a measure: one alone; two, the first less the second, or, if `ratio`, divided by it; or
    four, the same of the first two less that of the others, or divided by it. `paper`: the paper's number, if it does
    not follow from those of its cells.
    """

    sides: Tuple[Tuple[str, str], ...]
    ratio: bool
    above: float
    below: float
    paper: Optional[float] = None


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a paper says of an item, and the comparisons that must all hold for it; without any, `why`.

    `scale`: the only one at which it can be told; None: at any. `from_seed`: by scale, the first seed that tells.
    `about`: times, which are those of a simulator, or learning. `certain`: it cannot fail there. `known`: in a few
    words, if it is what a reader asks first.
    """

    name: str
    says: str
    where: str
    comparisons: Tuple[Comparison, ...]
    why: str
    scale: Optional[str]
    from_seed: Mapping[str, int]
    about: str
    certain: bool
    known: str


@dataclasses.dataclass(frozen=True)
class Picture:
    """Our picture of an item. `kind`: curve, of `y` over `x` (one of AXES); histogram, of staleness; bars, of `y`, each
    as it is or divided by that of the cell `over` it; lengths: `y` less that of the cell `over` it, by iterations, a
    line for all cells whose labels are the same up to the last comma. `label` of that axis, if it is not the measure's;
    `names`, if they are not the cells' labels; `papers`: the paper's bars, if they are not of its cells; `title` of its
    panel, if it is not what the labels have in common; `ordered`: its cells are, so their colours are, too.
    """

    kind: str
    x: str
    y: str
    cells: Tuple[str, ...]
    over: Mapping[str, str]
    label: str
    names: Mapping[str, str]
    papers: Mapping[str, float]
    title: str
    ordered: bool


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
    """One table or figure of a paper. `examples` that a run of the paper was trained on, if no scale `paper` says so.
    `fitted`: cells whose numbers here were fitted to the paper's; those of the others are predictions, with errors.
    """

    paper: str
    name: str
    caption: str
    state: str
    note: str
    preset: Optional[str]
    measures: Tuple[str, ...]
    options: Mapping[str, Any]
    cluster: Mapping[str, Any]
    scales: Mapping[str, Scale]
    cells: Mapping[str, Cell]
    grid: Optional[Grid]
    cells_of: Optional[str]
    pictures: Tuple[Picture, ...]
    claims: Tuple[Claim, ...]
    examples: Optional[float]
    fitted: str

    @property
    def full_name(self) -> str:
        return f"{self.paper}/{self.name}"

    @property
    def title(self) -> str:
        """``Table 2``, or ``Figure 4, mnist-mlp``."""
        kind, number, *part = self.name.split("-", 2)
        return f"{kind.capitalize()} {number}" + "".join(f", {one}" for one in part)

    def trials(self, scale: str, seeds: int) -> Iterator[Trial]:
        """All runs of a scale, the first seed of every cell before the second of any."""
        for seed in range(seeds):
            for cell in self.cells.values():
                if not cell.alike:
                    yield Trial(self, self.scales[scale], cell, seed)


@dataclasses.dataclass(frozen=True)
class Paper:
    """One paper."""

    name: str
    title: str
    cite: str
    items: Mapping[str, Item]

    def trial(self, item: str, scale: str, cell: str, seed: int) -> Optional[Trial]:
        """By names; None if there is no such cell."""
        found = self.items.get(item)
        if found is None or scale not in found.scales or cell not in found.cells or found.cells[cell].alike:
            return None
        return Trial(found, found.scales[scale], found.cells[cell], seed)

    def planned(self) -> Iterator[Tuple[float, Trial]]:
        """All trials of the plan with their turns; in a turn the first seed of every cell before the second of any."""
        for item in self.items.values():
            for scale in item.scales.values():
                for turn, cells, seeds, _ in scale.plan:
                    for trial in item.trials(scale.name, seeds):
                        if fnmatch.fnmatchcase(trial.cell.name, cells):
                            yield turn, trial

    def runs_of(self, item: Item) -> Item:
        """The item whose cells this one shows: itself, mostly."""
        return item if item.cells_of is None else self.items[item.cells_of]


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
    def asked(self) -> Dict[str, Any]:
        """Its options, those that cells share only where its store takes them; and its virtual cluster."""
        shared = {**self.item.options, **self.scale.options}
        store = {**shared, **self.cell.options}.get("kvstore")
        goes = {key: value for key, value in shared.items() if not methods.takers(key) or store in methods.takers(key)}
        options = {key: value * self.scale.times[key] if key in self.scale.times else value
                   for key, value in {**goes, **self.cell.options}.items()}
        cluster = {**self.item.cluster, **self.scale.cluster, **self.cell.cluster, "seed": self.seed}
        if self.cell.real:
            cluster = {"real": True, "workers": cluster.get("workers", 2), "servers": cluster.get("servers", 1)}
        return {"options": {**FIXED, **options, "seed": self.seed}, "cluster": cluster}

    @property
    def folder(self) -> str:
        """Of its run, below the folder of all runs: another one for other options."""
        digest = hashlib.sha256(canonical(self.asked).encode()).hexdigest()[:8]
        return f"{self.item.full_name}/{self.scale.name}/{self.cell.name}-{self.seed}-{digest}"


def canonical(value: Any) -> str:
    """JSON of which there is one for each value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


# --- reading ----------------------------------------------------------------------------------------------------------

@functools.lru_cache(maxsize=None)
def paper_called(name: str) -> Paper:
    """The declarations of one paper; what is wrong with them names the file and the place."""
    return read_paper(FOLDER / f"{name}.yaml")


def read_paper(path: Path) -> Paper:
    """The same from any file."""
    values = _table(read_yaml_file(str(path)), f"`{path}`", {"title", "cite", "items"})
    for key, value in values["items"].items():
        for part in ("cells", "pictures", "claims"):
            if isinstance(value, dict) and isinstance(value.get(part), str):
                value[part] = _shared(values["items"], value[part], part, f" after {part} of {key} in `{path}`")
    items = {key: _item(path.stem, key, value, f"`{path}`: {key}") for key, value in values["items"].items()}
    for item in items.values():
        if item.cells_of is not None and item.cells_of not in items:
            raise unknown("item", item.cells_of, items, where=f" after cells_of of {item.name} in `{path}`")
        _check_names(item, items[item.cells_of or item.name], f"`{path}`: {item.name}")
    paper = Paper(path.stem, values["title"], values["cite"], items)
    for item in items.values():
        for cell in item.cells.values():
            if cell.alike and paper.trial(*cell.alike, 0) is None:
                raise ConfigError(f"`{path}`: {item.name}, cell {cell.name}: no cell `{'/'.join(cell.alike)}` to be as")
    return paper


def papers() -> List[Paper]:
    """All five, and what is beyond them."""
    return [paper_called(name) for name in SOURCES]


def named(names: Sequence[str]) -> List[Item]:
    """The items that a user names, as PAPER/ITEM, or as PAPER for all of a paper that have cells of their own."""
    known = {item.full_name: item for one in papers() for item in one.items.values()}
    found: List[Item] = []
    for name in names:
        if name in SOURCES:
            found += [item for item in paper_called(name).items.values() if item.scales]
        elif name in known:
            item = known[name]
            found.append(paper_called(item.paper).runs_of(item))
        else:
            raise unknown("table or figure", name, [*known, *SOURCES], listed="`odsgd reproduce --list` lists all")
    return list({item.full_name: item for item in found}.values())


def _shared(items: Mapping[str, Any], name: str, part: str, where: str) -> Any:
    """The cells, pictures or claims of another item, as they are written there."""
    if name not in items:
        raise unknown("item", name, items, where=where)
    return items[name].get(part, {})


def _item(paper: str, name: str, value: Any, where: str) -> Item:
    values = _table(value, where, {"caption", "state"}, {
        "note", "preset", "measures", "options", "cluster", "scales", "cells", "grid", "cells_of", "pictures",
        "claims", "examples", "fitted"})
    if values["state"] not in STATES:
        raise unknown("state", values["state"], STATES, where=f" of {where}")
    scales = {key: _scale(key, one, f"{where}, scale {key}") for key, one in values.get("scales", {}).items()}
    cells = {key: _cell(key, one, f"{where}, cell {key}") for key, one in values.get("cells", {}).items()}
    grid = _grid(values, cells, where) if "grid" in values else None
    if values["state"] == "run" and "cells_of" not in values and not (scales and cells):
        raise ConfigError(f"{where}: state `run` needs cells and a scale, or cells_of")
    return Item(paper, name, values["caption"], values["state"], values.get("note", ""), values.get("preset"),
                tuple(values.get("measures", ())), values.get("options", {}), values.get("cluster", {}), scales,
                grid.cells() if grid else cells, grid, values.get("cells_of"),
                tuple(_picture(one, where) for one in values.get("pictures", ())),
                tuple(_claim(key, one, f"{where}, claim {key}") for key, one in values.get("claims", {}).items()),
                values.get("examples"), values.get("fitted", ""))


def _scale(name: str, value: Any, where: str) -> Scale:
    if name not in SCALES:
        raise unknown("scale", name, SCALES, where=f" in {where}")
    values = _table(value, where, set(), {"options", "times", "cluster", "differs", "plan"})
    plan = [_table(one, f"{where}, plan", {"turn", "cells", "seeds"}, {"had"}) for one in values.get("plan", ())]
    return Scale(name, values.get("options", {}), values.get("times", {}), values.get("cluster", {}),
                 tuple(values.get("differs", ())), tuple(
                     (one["turn"], one["cells"], one["seeds"], one.get("had", 0)) for one in plan))


def _cell(name: str, value: Any, where: str) -> Cell:
    values = _table(value, where, {"label"}, {"options", "cluster", "paper", "real", "as"})
    return Cell(name, values["label"], values.get("options", {}), values.get("cluster", {}), values.get("paper", {}),
                bool(values.get("real")), _alike(values["as"], where) if "as" in values else None)


def _alike(text: str, where: str) -> Tuple[str, str, str]:
    item, scale, cell = text.split("/") if text.count("/") == 2 else ("", "", "")
    if not cell:
        raise ConfigError(f"{where}: expected ITEM/SCALE/CELL after as, got `{text}`")
    return item, scale, cell


def _grid(values: Mapping[str, Any], cells: Mapping[str, Cell], where: str) -> Grid:
    if len(values["grid"]) != 1 or values.get("measures") != ["accuracy"]:
        raise ConfigError(f"{where}: expected a grid of one option, and `measures: [accuracy]`")
    (option, choices), = values["grid"].items()
    return Grid(option, tuple(choices), cells)


def _picture(value: Any, where: str) -> Picture:
    values = _table(value, f"{where}, a picture", {"kind"}, {
        "x", "y", "cells", "over", "label", "names", "papers", "title", "ordered"})
    if values["kind"] not in ("curve", "histogram", "bars", "lengths") or values.get("x", "epoch") not in AXES:
        raise ConfigError(f"{where}: expected a curve over {' or '.join(AXES)}, a histogram, bars or "
                          f"lengths; got {value}")
    x, y = values.get("x", "epoch"), values.get("y", "accuracy")
    over = {cell: base for base, cells in values.get("over", {}).items() for cell in cells}
    return Picture(values["kind"], x, y, tuple(values.get("cells", over)), over, values.get("label", ""),
                   values.get("names", {}), values.get("papers", {}), values.get("title", ""),
                   bool(values.get("ordered")))


def _claim(name: str, value: Any, where: str) -> Claim:
    values = _table(value, where, {"says", "where"}, {"tests", "why", "scale", "from_seed", "about", "certain",
                                                     "known"})
    if values.get("scale", SCALES[0]) not in SCALES:
        raise unknown("scale", values["scale"], SCALES, where=f" of {where}")
    if bool(values.get("tests")) == bool(values.get("why")):
        raise ConfigError(f"{where}: expected either tests, or the reason why there are none")
    comparisons = tuple(_comparison(one, where) for one in values.get("tests", ()))
    measures = {measure for one in comparisons for _, measure in one.sides}
    about = values.get("about", "times" if measures and measures <= TIMES else "learning")
    if about not in ABOUT:
        raise unknown("value", about, ABOUT, where=f" of about in {where}")
    return Claim(name, values["says"], values["where"], comparisons, values.get("why", ""), values.get("scale"),
                 _table(values.get("from_seed", {}), f"{where}, from_seed", set(), SCALES), about,
                 bool(values.get("certain")), values.get("known", ""))


def _comparison(value: Any, where: str) -> Comparison:
    values = _table(value, where, {"of"}, {"minus", "over", "than", "above", "below", "paper"})
    if not {"above", "below"} & set(values) or {"minus", "over"} <= set(values):
        raise ConfigError(f"{where}: expected above, below or both, and minus or over or neither; got {value}")
    by = next((key for key in ("minus", "over") if key in values), None)
    than = _table(values["than"], f"{where}, than", {"of", by}) if by and "than" in values else {}
    sides = [one[key] for one in (values, than) for key in ("of", by) if key in one]
    return Comparison(tuple(map(_split, sides)), by == "over",
                      float(values.get("above", -math.inf)), float(values.get("below", math.inf)),
                      values.get("paper"))


def _split(text: str) -> Tuple[str, str]:
    cell, _, measure = text.rpartition(".")
    return cell, measure


def _check_names(item: Item, runs: Item, where: str) -> None:
    """Cells and measures that are named exist."""
    sides = [side for claim in item.claims for one in claim.comparisons for side in one.sides]
    cells = [*(cell for cell, _ in sides),
             *(cell for picture in item.pictures for cell in (*picture.cells, *picture.over.values()))]
    for cell in cells:
        if cell not in runs.cells:
            raise unknown("cell", cell, runs.cells, where=f" in {where}")
    planned = [cells for scale in item.scales.values() for _, cells, _, _ in scale.plan]
    for pattern in planned:
        if not fnmatch.filter(item.cells, pattern):
            raise unknown("cell", pattern, item.cells, where=f" in the plan of {where}")
    named = [*item.measures, *(measure for _, measure in sides),
             *(measure for one in item.cells.values() for measure in one.paper)]
    for measure in named:
        if measure not in MEASURES:
            raise unknown("measure", measure, MEASURES, where=f" in {where}")


def _table(value: Any, where: str, needed: Any, also: Any = frozenset()) -> Dict[str, Any]:
    """A table with these keys."""
    if not isinstance(value, dict) or not needed <= set(value):
        raise ConfigError(f"{where}: expected {', '.join(sorted(needed)) or 'a table'}, got {value!r}")
    for key in value:
        if key not in {*needed, *also}:
            raise unknown("key", key, {*needed, *also}, where=f" in {where}")
    return value
