"""The documentation says what the code does: its links lead somewhere, its tables and examples are the code's."""
from __future__ import annotations

import ast
import doctest
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Iterator, List, Set, Tuple

import pytest

import kvstore
from kvstore.methods import METHODS
from odsgd.lab.advise import knowledge
from odsgd.lab.bench.report import CHANGED
from scripts.maintain import docs_tables, scale, validate_virtual
from scripts.reproduction.measures import MEASURES
from scripts.reproduction.results import read
from tests.jobs import ROOT, environment

FOLDER = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(FOLDER.rglob("*.md"))]
TEXT = {page: page.read_text(encoding="utf-8") for page in PAGES}
README = TEXT[ROOT / "README.md"]
DOCS = {page.relative_to(FOLDER).with_suffix("").as_posix(): text for page, text in TEXT.items()
        if FOLDER in page.parents}
HEADINGS = {"tutorial": "Tutorial", "how-to": "How-to guides", "reference": "Reference", "explanation": "Explanation",
            "results": "Results", "design": "For contributors", "contributing": "For contributors"}
"""Of the index, docs/README.md: the heading for a folder; the two pages that are in none are for contributors."""
WHOLE_TRAININGS = [
    ("MobileNet", "accuracy", ("table-1-paper", "ssgd"), ("table-1-paper", "odsgd")),
    ("ResNet18", "accuracy5", ("table-2-paper", "ssgd-4"), ("table-2-paper", "odsgd-4")),
    ("ResNet-20", "accuracy", ("table-6-medium", "ssgd"), ("gap-resnet20-medium", "sgd-100")),
    ("the same, 10 epochs", "accuracy", ("gap-resnet20-medium", "ssgd-25"), ("gap-resnet20-medium", "sgd-25"))]
"""Rows of the README: their measure, file and cell of SSGD and of OD-SGD."""
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def prose(text: str) -> str:
    """Without code, where brackets mean something else."""
    return re.sub(r"^    .*$", "", FENCED.sub("", text), flags=re.MULTILINE)


def anchors(text: str) -> Set[str]:
    """What GitHub makes of headings."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def python_blocks() -> Iterator[Tuple[str, str]]:
    for page, text in TEXT.items():
        for number, (language, code) in enumerate(FENCED.findall(text)):
            if language == "python":
                yield f"{short(page)} block {number}", code


def short(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def section(text: str, heading: str) -> str:
    """From a heading of the second level to the next one."""
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def table_rows(text: str) -> List[List[str]]:
    """The cells of every row of every table."""
    return [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in text.splitlines()
            if line.startswith("| ")]


# --- links and files --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("page", PAGES, ids=short)
def test_every_link_leads_to_a_file_and_a_heading_of_it(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(TEXT[page])):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{short(page)}: no {target}"
        if anchor:
            assert anchor in anchors(path.read_text(encoding="utf-8")), f"{short(page)}: no heading for {target}"


def test_the_readme_leads_to_the_index_and_is_short() -> None:
    assert "(docs/README.md)" in README
    assert len(README.splitlines()) <= 120


def test_the_index_lists_every_page_under_its_heading() -> None:
    missing = [name for name in DOCS if name != "README"
               and f"({name}.md)" not in section(DOCS["README"], HEADINGS[name.split("/")[0]])]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_files_named_in_the_text_exist(page: Path) -> None:
    # What made a page is of the commit that it names.
    text = re.sub(r"odsgd bench --config \S+|\b[0-9a-f]{8}:scripts/\S+", "", TEXT[page])
    named = re.findall(r"\b((?:scripts|configs|tests|kvstore|odsgd)/[\w/]+\.(?:py|yaml)|scripts/\w+)", text)
    missing = [name for name in set(named) if not any((ROOT / (name + end)).exists() for end in ("", ".py"))
               and not name.endswith("NAME.py")]
    assert not missing


def test_every_preset_is_in_the_table_of_experiments() -> None:
    missing = [path.name for path in (ROOT / "configs").glob("*.yaml") if path.name not in DOCS["how-to/reproduce"]]
    assert not missing


# --- tables -----------------------------------------------------------------------------------------------------------

def test_the_lists_of_options_are_the_codes() -> None:
    """To write them anew: scripts/maintain/docs_tables.py."""
    page = DOCS["reference/configuration"]
    assert docs_tables.written(page) == page
    named = set(re.findall(r"^- `(\w+)`", section(page, "Options of the methods"), re.MULTILINE))
    for method in METHODS.values():
        assert set(method.option_names()) <= named, method.name


def test_the_keys_of_a_virtual_cluster_are_the_codes() -> None:
    page = DOCS["how-to/virtual"]
    assert docs_tables.described(page) == page


def test_what_is_said_of_virtual_clusters_against_real_jobs_is_the_results() -> None:
    """To write it anew: scripts/maintain/validate_virtual.py page."""
    assert validate_virtual.described(DOCS["how-to/virtual"]) == DOCS["how-to/virtual"]
    kept = validate_virtual.RESULTS.read_text(encoding="utf-8")
    results = json.loads(kept)
    assert docs_tables.by_line(results) == kept
    assert validate_virtual.table(results) == DOCS[f"results/benchmarks/{validate_virtual.TABLE.stem}"]


def test_the_page_of_scale_is_its_results_and_these_are_the_models() -> None:
    """To write it anew: scripts/maintain/scale.py page; to compute: without its results, `scale.py run`."""
    found, crossed = scale.results(scale.Kept(computes=False))
    assert scale.written(DOCS["results/scale"], found, crossed) == DOCS["results/scale"]
    for point in (scale.Point("25M", "1gbit", "lognormal:0.3", 16, store) for store in scale.STORES):
        assert scale.computed(point) == found[point], point


def test_the_launchers_options_are_documented() -> None:
    assert docs_tables.launch_list() in DOCS["reference/configuration"]


VARIABLE = re.compile(r"\b(?:(?:DMLC|ODSGD|MXNET|OMP|OMPI|PMI|PMIX|SLURM|MPI|PS)_[A-Z][A-Z_]*[A-Z]"
                      r"|PYTHON[A-Z]+|NO_COLOR)\b")
NOT_READ = {"PYTHONHOME", "PYTHONHASHSEED"}  # taken away, and said so; set for a simulation that starts itself anew


def variables_of(path: Path) -> Set[str]:
    """Environment variables that a Python file names, in strings that are no docstrings and as keywords."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    prose_nodes = {id(node.value) for node in ast.walk(tree)
                   if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    found: Set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose_nodes:
            found |= set(VARIABLE.findall(node.value))
        if isinstance(node, ast.keyword) and node.arg:
            found |= set(VARIABLE.findall(node.arg))
        if is_environ_access(node):
            found |= {name.value for name in ast.walk(node) if isinstance(name, ast.Constant)
                      and isinstance(name.value, str) and re.fullmatch(r"[A-Z][A-Z_]*[A-Z]", name.value)}
    return found


def is_environ_access(node: ast.AST) -> bool:
    """``os.environ[…]``, ``os.environ.get(…)``, ``os.getenv(…)``."""
    target = node.value if isinstance(node, ast.Subscript) else node.func if isinstance(node, ast.Call) else None
    return isinstance(target, ast.Attribute) and any(word in ast.dump(target) for word in ("'environ'", "'getenv'"))


def test_every_environment_variable_of_the_code_is_in_the_table() -> None:
    files = [path for folder in ("kvstore", "odsgd", "scripts") for path in (ROOT / folder).rglob("*.py")]
    named = set().union(*map(variables_of, files)) - NOT_READ
    for script in (path for path in (ROOT / "scripts").iterdir() if path.is_file() and not path.suffix):
        text = script.read_text(encoding="utf-8")
        named |= set(re.findall(r"\$\{([A-Z][A-Z_]+)", text)) - {"HOME", "PATH"}
    items = re.findall(r"^- (`.*?)(?:: | \(set by )", DOCS["reference/environment"], re.MULTILINE)
    documented = {name for names in items for name in re.findall(r"`([A-Z_]+)`", names)}
    assert {"DMLC_ROLE", "ODSGD_SECRET", "OMP_NUM_THREADS", "NO_COLOR", "PYTHON"} <= named  # the search finds something
    assert sorted(named - documented) == []


# --- the library ------------------------------------------------------------------------------------------------------

def test_every_public_name_of_the_library_is_documented() -> None:
    missing = [name for name in kvstore.__all__ if not re.search(rf"\b{name}\b", DOCS["reference/library"])]
    assert not missing


def test_every_public_call_of_a_store_is_documented() -> None:
    from kvstore.fronts.base import FrontEnd
    from kvstore.fronts.gluon.legacy import LegacyStore
    from kvstore.fronts.gluon.store import Store
    known = {**vars(FrontEnd), **vars(Store), **vars(LegacyStore)}
    calls = [name for name in known if not name.startswith("_")] + ["lr_local", "options"]
    code = " ".join(re.findall("`([^`\n]+)`", DOCS["reference/library"]))
    missing = [name for name in calls if not re.search(rf"\b{name}\b", code)]
    assert not missing


def test_functions_and_tests_named_beside_the_paper_exist() -> None:
    code = {path: path.read_text(encoding="utf-8") for folder in ("kvstore", "odsgd", "tests") for path in
            (ROOT / folder).rglob("*.py")}
    for name in re.findall(r"\b(test_\w+)", DOCS["reference/algorithms"]):
        assert any(f"def {name}(" in text for text in code.values()) or (ROOT / "tests" / f"{name}.py").exists() \
            or (ROOT / "tests" / "contract" / f"{name}.py").exists(), name
    pages = DOCS["reference/algorithms"] + DOCS["design"]
    for owner, member in re.findall(r"`(?:kvstore\.\w+\.)?([A-Z]\w+)\.(\w+)`", pages):
        if owner not in ("RoundTimeoutError",):
            assert any(re.search(rf"^class {owner}\b", text, re.MULTILINE) and re.search(rf"\b{member}\b", text)
                       for text in code.values()) or owner in ("Store", "Meter"), f"{owner}.{member}"
    from tests.scenarios import SCENARIOS
    for name in re.findall(r"`((?:ssgd|odsgd)_\w+)`", DOCS["reference/algorithms"]):
        assert name in SCENARIOS, name


# --- words ------------------------------------------------------------------------------------------------------------

def singular(word: str) -> str:
    """A noun as classes and variables spell it: `global weights`, `GlobalWeights` and `global_weight` are one."""
    return re.sub(r"\W|_", "", word).lower().rstrip("s")


def nouns() -> List[str]:
    """The words of the list in docs/contributing.md."""
    cells = [re.sub(r"\(.*?\)", "", row[0]) for row in table_rows(section(DOCS["contributing"], "Words"))]
    return [singular(word) for cell in cells if cell != "word" for word in cell.split(",")]


def classes() -> List[str]:
    """Every class at the top of a module, but for MXNet's twins of optimizers of ours."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for folder in ("kvstore", "odsgd")
             for path in sorted((ROOT / folder).rglob("*.py")) if path.name != "compensated.py"]
    return [node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]


def test_every_noun_is_listed_once() -> None:
    words = nouns()
    assert 30 < len(words) <= 80
    assert sorted(word for word in set(words) if words.count(word) > 1) == []


def test_no_two_classes_share_a_noun() -> None:
    named = [name for name in classes() if not name.startswith("_")]
    assert sorted(name for name in set(named) if named.count(name) > 1) == []


# --- examples ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("code", [pytest.param(code, id=where) for where, code in python_blocks()])
def test_python_in_the_documentation_compiles(code: str) -> None:
    compile(code, "documentation", "exec")


def test_the_command_in_the_words_of_mxnets_scripts_is_taken() -> None:
    from odsgd.config.train import TrainConfig
    words = re.search(r"scripts/train\.py (--model .*?)\n\n", DOCS["how-to/gpu-clusters"], re.DOTALL)
    assert words
    config = TrainConfig.from_flags(words.group(1).replace("\\\n", " ").split())
    assert (config.kvstore, config.to_dict()["optimizer_local"], config.num_gpus) == ("odsgd", "dcasgd_a", 4)


def test_the_first_screen_says_what_was_measured() -> None:
    """Its times stand on the page of the measurement, its accuracies in what the adviser knows."""
    rows = [cells for cells in table_rows(README) if cells[0].startswith(("iteration", "the same with"))]
    peers = DOCS["results/benchmarks/peers_2core_202611"].split("\n## ")
    for workers, (_, ssgd, odsgd) in zip((2, 4), rows):
        page = next(part for part in peers if re.match(rf"4\.2M .*, {workers} workers", part))
        times = {cells[0]: cells[1] for cells in table_rows(page)}
        assert (times["ssgd"], times["odsgd"]) == (ssgd.split()[0], odsgd.split()[0])
    for row, seeds in (("digits", knowledge.DIGITS), ("MNIST", knowledge.MNIST)):
        said = next(cells for cells in table_rows(README) if row in cells[0])
        for told, name in zip(said[1:], ("ssgd", "odsgd")):
            numbers = seeds[name]
            assert told == f"{min(numbers):.1f} – {max(numbers):.1f} %"
    for row, measure, *cells in WHOLE_TRAININGS:
        said = next(cells for cells in table_rows(README) if row in cells[0])
        found = [{one.seed: MEASURES[measure].of(one) for one in read(path).values() if one.cell == cell}
                 for path, cell in ((FOLDER / f"results/data/od-sgd/{file}.jsonl", cell) for file, cell in cells)]
        both = [[of[seed] for seed in set(found[0]) & set(found[1])] for of in found]
        texts = [sorted({f"{end(numbers):.1f}" for end in (min, max)}) for numbers in both]
        assert said[1:] == [" – ".join(text) + " %" for text in texts]


def test_benchmarks_of_a_changed_source_say_so() -> None:
    pages = [text for page, text in DOCS.items() if page.startswith("results/benchmarks/")]
    assert [CHANGED in text for text in pages] == ["-dirty" in text for text in pages]


@pytest.mark.slow
def test_the_script_of_the_quickstart_trains(tmp_path: Path) -> None:
    """As two workers and a server, started as the README says, to the accuracy that stands there."""
    script = tmp_path / "script.py"
    script.write_text(next(code for where, code in python_blocks() if where.startswith("docs/tutorial/quickstart.md")),
                      encoding="utf-8")
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "launch.py"), "-n", "2", "-s", "1", str(script)],
                          env=environment(), capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = re.compile(r"worker \d \| accuracy [\d.]+ after \d+ iterations")
    assert sorted(printed.findall(done.stdout)) == sorted(printed.findall(README)), done.stdout
    assert printed.findall(README) == printed.findall(DOCS["tutorial/quickstart"])


MODULES = sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for package in ("kvstore", "odsgd")
                 for path in (ROOT / package).rglob("*.py") if re.search("^ *>>> ", path.read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_come_out_as_written(name: str) -> None:
    done = doctest.testmod(importlib.import_module(name))
    assert done.attempted and not done.failed, done
