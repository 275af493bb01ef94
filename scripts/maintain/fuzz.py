"""Property tests of every reader, with many examples: a value or one line, within 2 s and 200 MB (tests/property).

    scripts/maintain/fuzz --examples 100000 [-k hostfile] [--out runs/fuzz] [--markdown FILE]

Each reader gets so many examples, in pieces of PIECE with a seed each, all readers in turn. What is in
OUT/results.jsonl is not run again, so that a campaign can go on where it was stopped. The status is 0 if every
property held.
"""
import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from odsgd.tools import piped
from scripts.maintain.chaos import results_of
from scripts.maintain.docs_tables import put_into

ROOT = Path(__file__).resolve().parents[2]
PIECE = 25000
PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--timeout", "0", "-o",
          "session_timeout=1000000"]


def readers(words: str) -> List[str]:
    """The tests, one for each reader, whose names go with `words`."""
    only = ["-m", "hypothesis", *(["-k", words] if words else [])]
    listed = subprocess.run([*PYTEST, "tests/property", "--collect-only", *only], cwd=ROOT, stdout=subprocess.PIPE,
                            text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith("tests/property/")]


def piece(reader: str, seed: int, examples: int) -> Dict[str, Any]:
    """So many examples for one reader, and the example that broke its property, if there is one."""
    began = time.monotonic()
    ran = subprocess.run([*PYTEST, reader, "--examples", str(examples), "--hypothesis-seed", str(seed)], cwd=ROOT,
                         env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True)
    broken = "" if ran.returncode == 0 else ran.stdout[-4000:]
    return {"reader": reader, "seed": seed, "examples": examples, "seconds": round(time.monotonic() - began, 1),
            "broken": broken}


def examples_of(results: List[Dict[str, Any]]) -> int:
    return sum(one["examples"] for one in results)


def in_turn(readers: List[str], examples: int, results: List[Dict[str, Any]]) -> Iterator[str]:
    """The next reader, while one lacks examples in `results`: that with the fewest."""
    while True:
        lacking = {reader: examples_of([one for one in results if one["reader"] == reader]) for reader in readers}
        if not lacking or min(lacking.values()) >= examples:
            return
        yield min(lacking, key=lambda reader: lacking[reader])


def table(results: List[Dict[str, Any]]) -> str:
    """By reader, as Markdown."""
    rows = [["reader", "examples", "ms each", "pieces in which it did not hold"]]
    for reader in sorted({one["reader"] for one in results}):
        mine = [one for one in results if one["reader"] == reader]
        examples, seconds = examples_of(mine), sum(one["seconds"] for one in mine)
        words = re.sub(r"^.*::test_", "", reader).replace("_", " ")
        broken = sum(bool(one["broken"]) for one in mine)
        rows.append([words, str(examples), f"{1000 * seconds / examples:.1f}", str(broken)])
    return piped(rows, right="")


def summary(results: List[Dict[str, Any]]) -> str:
    """When and where, and how many."""
    return (f"{examples_of(results)} examples, {time.strftime('%Y-%m-%d', time.gmtime())}, "
            f"{len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=10000, help="for each reader")
    parser.add_argument("-k", default="", metavar="WORDS", help="only readers of these names, as pytest has it")
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"))
    parser.add_argument("--within", type=float, default=float("inf"), metavar="S", help="begin no piece after so long")
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="put the table between the page's marks")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "results.jsonl"
    results = results_of(log)
    stop_at = time.monotonic() + options.within
    for reader in in_turn(readers(options.k), options.examples, results):
        if time.monotonic() > stop_at:
            break
        mine = [one for one in results if one["reader"] == reader]
        seen = piece(reader, len(mine), min(PIECE, options.examples - examples_of(mine)))
        with open(log, "a", encoding="utf-8") as file:
            file.write(json.dumps(seen) + "\n")
        results.append(seen)
        print(f"{reader}, seed {seen['seed']}: {seen['broken'] or 'held'} ({seen['seconds']} s)", flush=True)
    text = table(results)
    print(text)
    if options.markdown:
        put_into(options.markdown, "<!-- fuzz -->", f"\n{summary(results)}\n\n{text}\n\n")
    return int(any(one["broken"] for one in results))


if __name__ == "__main__":
    sys.exit(main())
