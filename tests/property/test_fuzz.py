"""The campaign of examples: what a reader still lacks, and its table."""
from typing import Any, Dict, List

from scripts.maintain import fuzz


def test_a_campaign_goes_on_with_the_reader_that_has_the_fewest_examples() -> None:
    results: List[Dict[str, Any]] = [{"reader": "a", "examples": 40}, {"reader": "b", "examples": 10}]
    seen = []
    for reader in fuzz.in_turn(["a", "b", "c"], 60, results):
        seen.append(reader)
        results.append({"reader": reader, "examples": 25})
    assert seen == ["c", "b", "c", "b", "a", "c"]
    assert list(fuzz.in_turn(["a"], 60, results)) == []


def test_the_table_has_a_line_for_each_reader() -> None:
    held = {"reader": "x.py::test_a_hostfile", "examples": 1000, "seconds": 1.5, "broken": ""}
    lines = fuzz.table([held, {**held, "broken": "it did not"}]).splitlines()
    assert lines[2:] == ["| a hostfile | 2000 | 1.5 | 1 |"]
