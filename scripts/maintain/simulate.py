"""Run the real launcher and agents under simulated faults, from a seed; were the promises kept?

    scripts/maintain/simulate --seed 81723              the history, the faults and the verdict
    scripts/maintain/simulate --seeds 1000 [--from 1]   a table; a failing seed is shrunk by leaving faults out
    scripts/maintain/simulate --close --seeds 1000      the same, with more faults of processes, within seconds
    scripts/maintain/simulate --disk --seeds 1000       checkpoints on a disk that loses power
    scripts/maintain/simulate --servers --seeds 1000    workers and servers on sockets of our own
    scripts/maintain/simulate --defects                 defects of the past, put back: found after so many seeds
"""
import argparse
import collections
import functools
import os
import sys
import time
from pathlib import Path
from typing import Any, Callable, Counter, List, Sequence, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.maintain.simulation import defects, exchanges, promises, scenario
from scripts.maintain.simulation.loader import Image

Run = Callable[..., scenario.Result]


def shrunk(seed: int, run: Run, broken: Sequence[str]) -> List[int]:
    """The numbers of the faults that can be left out while the same promise is still broken."""
    without: List[int] = []
    for number in range(len(run(seed).faults)):
        now = promises.broken(run(seed, without=[*without, number]))
        if now and now[0].split()[0] == broken[0].split()[0]:
            without.append(number)
    return without


def show(seed: int, run: Run, without: Sequence[int]) -> int:
    """Print one history; returns how many promises were broken."""
    result = run(seed, without=without)
    print("\n".join(result.world.history))
    job = {name: value for name, value in vars(result.job).items() if value not in (None, (), {}, False, "", 0)}
    print(f"job: {job}")
    print("\n".join([f"fault: {fault}" for fault in result.faults] + [f"hit: {hit}" for hit in result.hits]))
    broken = tell(promises.broken(result))
    print(f"exit code {result.code} after {result.ended_at:.1f} s, history {result.digest}")
    return broken


def show_run(run: Any) -> int:
    """`show` for a history of another kind."""
    print("\n".join([*run.world.history, *(f"fault: {fault}" for fault in run.faults)]))
    return tell(run.broken)


def tell(broken: Sequence[str]) -> int:
    """Print which promises were broken; returns how many."""
    print("\n".join(f"BROKEN {sentence}" for sentence in broken) or "all promises were kept")
    return len(broken)


def survey(first: int, count: int, run: Run, again_every: int) -> int:
    """Run many seeds and print a table; returns how many broke a promise."""
    began, failed = time.process_time(), 0
    codes: Counter[str] = collections.Counter()
    events, seconds, changed = 0, 0.0, 0
    for seed in range(first, first + count):
        result = run(seed)
        broken = promises.broken(result)
        events, seconds = events + result.world.events, seconds + result.world.now
        codes[str(result.code)] += 1
        if again_every and seed % again_every == 0 and run(seed).digest != result.digest:
            changed += 1
            print(f"seed {seed}: the second history differs from the first", flush=True)
        if broken:
            failed += 1
            without = shrunk(seed, run, broken)
            faults = [f"{fault}" for fault in run(seed, without=without).faults]
            print(f"seed {seed}{''.join(f' --without {number}' for number in without)}: {broken[0][:160]} … "
                  f"{broken[0][-100:]} [{'; '.join(faults)}]", flush=True)
    took = time.process_time() - began
    print(f"{count} seeds, {failed} with a broken promise, {changed} that were not the same twice; exit codes "
          f"{dict(codes.most_common())}; {seconds:.0f} s simulated, {events} events in {took:.1f} s of a processor: "
          f"{60 * count / took:.0f} seeds a minute")
    return failed + changed


def survey_runs(what: str, first: int, count: int, start: Callable[[int], Any]) -> int:
    """`survey` for histories of another kind, which `start` runs by seed."""
    began, failed, hits = time.process_time(), 0, 0
    for seed in range(first, first + count):
        run = start(seed)
        failed, hits = failed + bool(run.broken), hits + len(run.faults)
        if run.broken:
            print(f"seed {seed}: {run.broken[0]} [{'; '.join(run.faults)}]", flush=True)
    took = time.process_time() - began
    print(f"{count} seeds of {what}, {failed} with a broken promise, {hits} faults: {60 * count / took:.0f} a minute")
    return failed


def finds(run: Any, defective: Image, ships: Image, most: int) -> Tuple[int, List[str]]:
    """The first seed with a promise that the defect breaks and the code that ships keeps; with 0 none of so many."""
    for seed in range(1, most + 1):
        broken = promises.broken(run(seed, defective))
        kept = promises.broken(run(seed, ships)) if broken else []
        broken = [sentence for sentence in broken if sentence not in kept]
        if broken:
            return seed, broken
    return 0, []


def calibrate(most: int, run: Any) -> int:
    """Put each defect back, and look how many seeds it takes to find it; returns how many are not found."""
    missed, ships = 0, Image()
    print("| defect | found after so many seeds | by the promise |\n| --- | --- | --- |")
    for what in defects.DEFECTS:
        seed, broken = finds(run, defects.image(what), ships, most)
        missed += not seed
        print(f"| {what} | {seed or f'none of {most}'} | {broken[0].partition(':')[0] if seed else ''} |", flush=True)
    for what, changes in defects.OF_SERVERS.items():
        runs = (exchanges.Run(seed, changes) for seed in range(1, most + 1))
        found = next((run for run in runs if run.broken and not exchanges.Run(run.seed).broken), None)
        missed += not found
        print(f"| of `--servers`: {what} | {found.seed if found else f'none of {most}'} | "
              f"{found.broken[0].partition(':')[0] if found else ''} |", flush=True)
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--without", type=int, action="append", default=[], help="leave out this fault of --seed")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--from", dest="first", type=int, default=1)
    parser.add_argument("--twice-every", type=int, default=100, help="run each such seed twice and compare")
    parser.add_argument("--defects", action="store_true", help="put defects back; try --seeds for each")
    parser.add_argument("--close", action="store_true", help="several faults of processes within seconds")
    parser.add_argument("--disk", action="store_true", help="checkpoints on a disk that loses power, in place of a job")
    parser.add_argument("--servers", action="store_true", help="workers and servers on sockets, in place of a job")
    options = parser.parse_args()
    drawn = functools.partial(
        scenario.run, draw_faults=scenario.draw_close_faults if options.close else scenario.draw_faults)
    if options.defects:
        return int(calibrate(options.seeds, drawn) > 0)
    image = Image()
    if options.disk:
        from scripts.maintain.simulation import checkpoints  # it needs MXNet
        what, start = "a disk", functools.partial(checkpoints.Run, image=image)  # type: str, Callable[[int], Any]
    elif options.servers:
        what, start = "servers", exchanges.Run
    if options.disk or options.servers:
        return int((show_run(start(options.seed)) if options.seed is not None else
                    survey_runs(what, options.first, options.seeds, start)) > 0)
    run = functools.partial(drawn, image=image)
    if options.seed is not None:
        return int(show(options.seed, run, options.without) > 0)
    return int(survey(options.first, options.seeds, run, options.twice_every) > 0)


if __name__ == "__main__":
    if sys.flags.hash_randomization:  # the order of a set is a part of the history
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main())
