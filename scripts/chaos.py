"""Jobs of `odsgd train` on this machine, each hit by one fault at a random moment; were the promises kept?

    scripts/chaos --jobs 100 [--seed 1] [--out runs/chaos] [--markdown FILE]

Everything about job K follows from seed and K: store, workers, servers, victim, fault, moment, restarts. Jobs that are
in OUT/results.jsonl already are not run again, so that a campaign can go on where it was stopped. docs/reliability.md
says what is checked. The status is 0 if every promise was kept.
"""
import argparse
import json
import os
import platform
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kvstore.errors import ConfigError  # noqa: E402
from odsgd.launch.linux import descendants, state  # noqa: E402
from odsgd.training import checkpoint  # noqa: E402

EPOCHS, EVERY, PER_EPOCH = 40, 20, {1: 44, 2: 22, 3: 14}
STORES = {  # flags, and whether two runs of two workers have the same bits
    "ssgd": ("--kvstore ssgd --momentum 0.9", True),
    "odsgd": ("--kvstore odsgd --optimizer-local dcasgd_a --lr-local 0.02 --warmup 10 --momentum 0.9", True),
    "pipesgd": ("--kvstore pipesgd --warmup 10 --momentum 0.9", True),
    "sasgd": ("--kvstore sasgd --T 4", True),
    "asgd": ("--kvstore asgd", False),
    "easgd": ("--kvstore easgd", False),
}
RINGS = ("pipesgd", "sasgd")
VICTIMS = ("worker", "server", "scheduler", "agent", "launcher")
FAULTS = ("kill", "kill", "stop", "segv", "slow")
MOMENTS = ("start-up", "training", "evaluation", "checkpoint", "end")
KILLED_WITHIN_S, HANG_TIMEOUT_S, HANG_SLACK_S = 15.0, 15.0, 15.0
LEFT_WITHIN_S, JOB_WITHIN_S = 12.0, 240.0
SLOW_S = 6.0
ACCURATE = 0.9
MARK = "ODSGD_CHAOS_MARK"


class Case(NamedTuple):
    """One job and its fault."""

    number: int
    store: str
    workers: int
    servers: int
    victim: str
    fault: str
    moment: str
    delay_s: float
    restarts: int


def case(seed: int, number: int) -> Case:
    """Job `number` of a campaign."""
    draw = random.Random(f"{seed}/{number}")
    store = draw.choice(sorted(STORES))
    ring = store in RINGS
    workers = draw.choice((2, 2, 2, 3))
    servers = 0 if ring else draw.choice((1, 2))
    victim = draw.choice([one for one in VICTIMS if not ring or one not in ("server", "scheduler")])
    rank = draw.randrange(workers if victim == "worker" else max(1, servers))
    fault = draw.choice(FAULTS)
    if victim == "launcher" or (victim == "agent" and fault == "segv"):
        fault = "kill"
    moment = draw.choice(MOMENTS)
    name = f"{victim} {rank}" if victim in ("worker", "server") else victim
    return Case(number, store, workers, servers, name, fault, moment, draw.uniform(0, 0.4), draw.choice((0, 2)))


class Job:
    """A running launch, its lines with their times, and its processes, found by a mark in their environment."""

    def __init__(self, case: Case, out: Path) -> None:
        self.mark, self.lines, self.out = uuid.uuid4().hex, [], out  # type: str, List[Any], Path
        flags = STORES[case.store][0].split()
        restarts = ["--max-restarts", str(case.restarts)] if case.restarts else []
        command = [sys.executable, "-m", "odsgd", "launch", "-n", str(case.workers), "-s", str(case.servers),
                   "--hang-timeout", str(HANG_TIMEOUT_S), *restarts, sys.executable, "-m", "odsgd", "train",
                   "--dataset", "digits", "--lr", "0.05", "--epochs", str(EPOCHS), "--checkpoint-every", str(EVERY),
                   "--eval-every", "2", *flags, "--out", str(out)]
        environ = {**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        with self.process.stdout as said:
            for line in said:
                self.lines.append((time.monotonic(), line.rstrip("\n")))

    def marked(self) -> Dict[int, Dict[str, str]]:
        found = {}
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                pairs = Path(f"/proc/{entry}/environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            env = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
            if env.get(MARK) == self.mark and state(int(entry)) not in ("Z", ""):
                found[int(entry)] = env
        return found

    def pid(self, victim: str) -> Optional[int]:
        if victim == "launcher":
            return self.process.pid if self.process.poll() is None else None
        role, _, rank = victim.partition(" ")
        for pid, env in self.marked().items():
            if victim == "agent":
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"odsgd.launch.agent" in words and pid in descendants(self.process.pid):
                    return pid
            elif env.get("DMLC_ROLE") == role and (not rank or env.get(f"ODSGD_{role.upper()}_RANK") == rank):
                return pid
        return None

    def until(self, ready: Callable[[], Any], patience_s: float = JOB_WITHIN_S) -> bool:
        """Whether it came true before the job ended."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and self.process.poll() is None:
            if ready():
                return True
            time.sleep(0.005)
        return False

    def said(self, pattern: str, after: float) -> Optional[float]:
        """When the launcher first said so."""
        times = [when for when, line in list(self.lines) if when >= after and line.startswith("odsgd launch:")
                 and re.search(pattern, line)]
        return times[0] if times else None


def newest(out: Path) -> int:
    return max(checkpoint.complete(out / "checkpoints"), default=0)


def wait_for_moment(job: Job, one: Case) -> None:
    total = EPOCHS * PER_EPOCH[one.workers]
    folder = job.out / "checkpoints"
    if one.moment == "start-up":
        job.until(lambda: job.pid(one.victim))
        time.sleep(5 * one.delay_s)
        return
    if one.moment == "end":
        job.until(lambda: (folder / str(total)).exists())
    elif one.moment == "checkpoint":
        job.until(lambda: newest(job.out) >= EVERY)
        job.until(lambda: any(not (path / checkpoint.MANIFEST).exists() for path in folder.iterdir()))
        time.sleep(one.delay_s / 20)
        return
    elif one.moment == "evaluation":
        job.until(lambda: any("epoch 2/" in line for _, line in list(job.lines)))
    else:
        job.until(lambda: newest(job.out) >= EVERY)
    time.sleep(one.delay_s)


def hit(pid: int, fault: str) -> None:
    if fault == "slow":
        for _ in range(int(SLOW_S)):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.8)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.2)
        return
    os.kill(pid, {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "segv": signal.SIGSEGV}[fault])


def run(one: Case, folder: Path) -> Dict[str, Any]:
    """Run a job and hit it; what was seen."""
    out = folder / str(one.number)
    shutil.rmtree(out, ignore_errors=True)
    began = time.monotonic()
    job = Job(one, out)
    try:
        wait_for_moment(job, one)
        pid = job.pid(one.victim)
        running = pid is not None and job.process.poll() is None
        hit_at = time.monotonic()
        if pid is not None:
            try:
                hit(pid, one.fault)
            except ProcessLookupError:
                running = False
        try:
            code: Optional[int] = job.process.wait(JOB_WITHIN_S)
        except subprocess.TimeoutExpired:
            code = None
        ended_at = time.monotonic()
        left = left_after(job)
        job.reader.join(5)
        expected = "lost host|the agent on host" if one.victim == "agent" else re.escape(one.victim)
        named_at = job.said(expected, hit_at)
        return {**one._asdict(), "hit": running, "code": code, "left": left,
                "named_s": None if named_at is None else round(named_at - hit_at, 1),
                "restarted": job.said("restart 1 of", hit_at) is not None,
                "damaged": damaged(out), "finished": newest(out) == EPOCHS * PER_EPOCH[one.workers],
                "accuracy": accuracy(out), "weights": weights(out), "seconds": round(ended_at - began, 1),
                "said": [line for _, line in job.lines if line.startswith("odsgd launch:")][:6]}
    finally:
        for pid in job.marked():
            os.kill(pid, signal.SIGKILL)
        job.process.wait()


def left_after(job: Job) -> int:
    """Processes that are still there some time after the launcher."""
    deadline = time.monotonic() + LEFT_WITHIN_S
    while time.monotonic() < deadline and job.marked():
        time.sleep(0.1)
    return len(job.marked())


def damaged(out: Path) -> List[str]:
    """Checkpoints that count, and are not whole."""
    bad = []
    for iteration in checkpoint.complete(out / "checkpoints"):
        path = out / "checkpoints" / str(iteration)
        try:
            manifest = checkpoint.read_manifest(path)
            for name in manifest["files"]:
                checkpoint.verify(path, name, manifest)
        except ConfigError as error:
            bad.append(str(error))
    return bad


def accuracy(out: Path) -> Optional[float]:
    try:
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return None
    return next((one["test_accuracy"] for one in reversed(records) if one.get("test_accuracy") is not None), None)


def weights(out: Path) -> Optional[str]:
    path = out / "checkpoints" / str(newest(out)) / checkpoint.WEIGHTS
    return checkpoint.digest(path)["sha256"] if path.is_file() else None


def reference(one: Case, folder: Path) -> str:
    """The weights of a job like this one that nothing has hit; the number of servers does not change them."""
    out = folder / f"reference-{one.store}-{one.workers}"
    if newest(out) != EPOCHS * PER_EPOCH[one.workers]:
        shutil.rmtree(out, ignore_errors=True)
        job = Job(one._replace(restarts=0), out)
        code = job.process.wait(JOB_WITHIN_S)
        assert code == 0, job.lines
    found = weights(out)
    assert found
    return found


def judge(seen: Dict[str, Any], same_bits: Optional[bool]) -> List[str]:
    """The promises that were broken."""
    found = {f"not ended within {JOB_WITHIN_S:g} s": seen["code"] is None,
             f"{seen['left']} processes left": seen["left"],
             "a checkpoint that counts is damaged": seen["damaged"]}
    broken = [text for text, is_so in found.items() if is_so]
    fatal = seen["hit"] and seen["fault"] != "slow"
    if seen["victim"] == "launcher" and fatal:
        return broken
    limit_s = KILLED_WITHIN_S if seen["fault"] in ("kill", "segv") else HANG_TIMEOUT_S + HANG_SLACK_S
    named_s = limit_s + 1 if seen["named_s"] is None else seen["named_s"]
    if fatal and (seen["code"] != 0 or seen["restarted"]) and named_s > limit_s:
        broken.append(f"{seen['victim']} was not named within {limit_s:g} s")
    # A server that is hit when all workers have succeeded makes the exit code another one; the job has finished.
    if (not fatal or seen["restarts"]) and not (seen["finished"] and (fatal or seen["code"] == 0)):
        broken.append(f"not finished (exit code {seen['code']})")
    elif seen["code"] == 0 and same_bits is False:
        broken.append("other bits")
    elif seen["code"] == 0 and same_bits is None and not (seen["accuracy"] or 0) > ACCURATE:
        broken.append(f"accuracy {seen['accuracy']}")
    return broken


def table(results: List[Dict[str, Any]]) -> str:
    """By victim and fault, as Markdown."""
    head = ["victim", "fault", "jobs", "hit while running", "named after, median and max (s)", "left behind",
            "damaged checkpoints", "restarted", "finished", "same bits", "broken promises"]
    rows = [head, ["---"] * len(head)]
    groups = sorted({(VICTIMS.index(one["victim"].split()[0]), FAULTS.index(one["fault"])) for one in results})
    for victim, fault in groups:
        mine = [one for one in results if one["victim"].split()[0] == VICTIMS[victim] and one["fault"] == FAULTS[fault]]
        named = [one["named_s"] for one in mine if one["hit"] and one["named_s"] is not None and one["fault"] != "slow"]
        told = f"{statistics.median(named):.1f}, {max(named):.1f}" if named else "-"
        bits = [one["same_bits"] for one in mine if one["same_bits"] is not None]
        rows.append([VICTIMS[victim], FAULTS[fault], str(len(mine)), str(sum(one["hit"] for one in mine)), told,
                     str(sum(one["left"] for one in mine)), str(sum(len(one["damaged"]) for one in mine)),
                     str(sum(one["restarted"] for one in mine)), str(sum(one["finished"] for one in mine)),
                     f"{sum(bits)} of {len(bits)}", str(sum(bool(one["broken"]) for one in mine))])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def summary(results: List[Dict[str, Any]], seed: int) -> str:
    """Where and when, and how many."""
    broken = [f"job {one['number']} ({one['fault']} {one['victim']} at {one['moment']}): {'; '.join(one['broken'])}"
              for one in results if one["broken"]]
    kept = f"Broken promises: {len(broken)}" + (". " + ". ".join(broken) if broken else "") + "."
    return (f"{len(results)} jobs of seed {seed}, {time.strftime('%Y-%m-%d', time.gmtime())}, "
            f"{len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}. {kept}")


def placed(page: str, text: str) -> str:
    """The page with the text between its marks."""
    head, begin, rest = page.partition("<!-- chaos -->\n")
    _, end, tail = rest.partition("<!-- end of chaos -->")
    if not begin or not end:
        raise SystemExit("the page has no lines `<!-- chaos -->` and `<!-- end of chaos -->`")
    return f"{head}{begin}\n{text}\n\n{end}{tail}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"))
    parser.add_argument("--within", type=float, default=float("inf"), metavar="S", help="begin no job after so long")
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="put the table between the page's marks")
    options = parser.parse_args()
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "results.jsonl"
    results = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    done = {one["number"] for one in results if one["seed"] == options.seed}
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # which ends the job under way
    stop_at = time.monotonic() + options.within
    for number in range(options.jobs):
        if number in done or time.monotonic() > stop_at:
            continue
        one = case(options.seed, number)
        seen = run(one, folder)
        comparable = STORES[one.store][1] and one.workers == 2 and seen["finished"] and seen["code"] == 0
        seen["same_bits"] = seen["weights"] == reference(one, folder) if comparable else None
        seen["broken"], seen["seed"] = judge(seen, seen["same_bits"]), options.seed
        with open(log, "a", encoding="utf-8") as file:
            file.write(json.dumps(seen) + "\n")
        results.append(seen)
        shutil.rmtree(folder / str(number), ignore_errors=not seen["broken"])
        print(f"{number}: {one.store}, {one.workers}+{one.servers}, {one.fault} {one.victim} at {one.moment}, restarts "
              f"{one.restarts}: {'; '.join(seen['broken']) or 'as promised'} ({seen['seconds']} s)", flush=True)
    mine = [one for one in results if one["seed"] == options.seed and one["number"] < options.jobs]
    text = table(mine)
    print(text)
    if options.markdown:
        page = options.markdown.read_text(encoding="utf-8")
        options.markdown.write_text(placed(page, f"{summary(mine, options.seed)}\n\n{text}"), encoding="utf-8")
    return int(any(one["broken"] for one in mine))


if __name__ == "__main__":
    sys.exit(main())
