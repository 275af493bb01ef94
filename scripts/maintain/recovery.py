"""From a fault to the next useful step, in seconds: a job for each fault of the campaign, on each transport.

    .venv/bin/python scripts/maintain/recovery.py [--out runs/recovery] [--markdown PAGE]

Jobs and faults are those of `chaos.py`, in training, with `--max-restarts 2`. A job that is in OUT/results.jsonl
already is not run again.
"""
import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from odsgd.tools import piped
from scripts.maintain import chaos
from scripts.maintain.docs_tables import put_into

TRANSPORTS = {"ps-lite": ("ssgd", "ps-lite"), "sockets": ("ssgd", "sockets"), "ring": ("sasgd", "")}


def cases() -> Iterator[Tuple[str, chaos.Case]]:
    """Every fault that a job of a transport can meet and outlive, with the transport's name."""
    for transport, (store, wire) in TRANSPORTS.items():
        for victim in chaos.VICTIMS:
            for fault in dict.fromkeys(chaos.FAULTS.get(victim, chaos.FAULTS_OF_PROCESSES)):
                name = {"worker": "worker 1", "server": "server 0"}.get(victim, victim)
                if victim != "launcher" and (wire or victim not in ("server", "scheduler")):
                    yield transport, chaos.Case(0, store, 2, int(bool(wire)), name, fault, "training", 0.2, 2, wire)


def run(transport: str, one: chaos.Case, folder: Path, log: Path) -> None:
    """Run a job, and keep what came of it."""
    seen = {"transport": transport, "load": round(os.getloadavg()[0], 1), **chaos.run(one, folder)}
    with open(log, "a", encoding="utf-8") as file:
        file.write(json.dumps(seen) + "\n")
    print(f"{transport}: {one.fault} {one.victim}: {seen['useful_s']} s, "
          f"{'finished' if seen['finished'] else 'not finished'}", flush=True)


def table(results: List[Dict[str, Any]]) -> str:
    """A line for each fault, a column for each transport."""
    rows = [["fault", *TRANSPORTS]]
    for victim, fault in dict.fromkeys((one.victim, one.fault) for _, one in cases()):
        cells = []
        for transport in TRANSPORTS:
            found = [one for one in results
                     if (one["transport"], one["victim"], one["fault"]) == (transport, victim, fault) and one["hit"]]
            waits = sorted(one["useful_s"] for one in found if one["finished"])
            cells.append("did not go on" if len(waits) < len(found) else _spread(waits) if waits else "-")
        if any(cell != "-" for cell in cells):
            rows.append([f"{victim.split()[0]}: {fault}", *cells])
    return piped(rows, right="")


def _spread(waits: List[float]) -> str:
    return f"{statistics.median(waits):.1f}" + (f" ({waits[0]:.1f} to {waits[-1]:.1f})" if waits[1:] else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/recovery"))
    parser.add_argument("--times", type=int, default=1, help="jobs of each kind")
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="put the table between the page's marks")
    options = parser.parse_args()
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "results.jsonl"
    beyond = chaos.out_of_reach(folder)
    for transport, one in cases():
        kind = transport, one.victim, one.fault
        done = sum((seen["transport"], seen["victim"], seen["fault"]) == kind for seen in chaos.results_of(log))
        for _ in range(0 if one.victim in beyond else options.times - done):
            run(transport, one, folder, log)
    text = table(chaos.results_of(log))
    print(text)
    if options.markdown:
        put_into(options.markdown, "<!-- recovery -->", f"\n{text}\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
