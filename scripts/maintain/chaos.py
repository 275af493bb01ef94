"""Jobs of `odsgd train` on this machine, each hit by one fault at a random moment; were the promises kept?

    scripts/maintain/chaos --jobs 100 [--seed 1] [--out runs/chaos] [--markdown FILE]

Everything about job K follows from seed and K: store, workers, servers, wire, victim, fault, moment, restarts. Jobs
that are in OUT/results.jsonl already are not run again, so that a campaign can go on where it was stopped.
docs/results/reliability.md says what is checked. The status is 0 if every promise was kept.
"""
import argparse
import contextlib
import json
import os
import platform
import random
import re
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvstore.errors import ConfigError
from odsgd.lab import cluster
from odsgd.launch.linux import descendants, state
from odsgd.tools import piped
from odsgd.training.checkpoint import manifests
from scripts.maintain.docs_tables import put_into

ROOT = Path(__file__).resolve().parents[2]
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
VICTIMS = ("worker", "server", "scheduler", "agent", "launcher", "disk", "link", "tunnel", "clock")
ON_TWO_HOSTS = ("link", "tunnel")
FAULTS = {"disk": ("full",), "link": ("down", "blip"), "launcher": ("kill",), "agent": ("kill", "kill", "stop", "slow"),
          "tunnel": ("kill", "stop"), "clock": ("forward", "back")}
FAULTS_OF_PROCESSES = ("kill", "kill", "stop", "segv", "slow")
HARMLESS = ("slow", "blip", "forward", "back")
MOMENTS = ("start-up", "training", "evaluation", "checkpoint", "end")
KILLED_WITHIN_S, HANG_TIMEOUT_S, HANG_SLACK_S = 15.0, 15.0, 15.0
LEFT_WITHIN_S, JOB_WITHIN_S = 12.0, 240.0
SLOW_S, BLIP_S, DOWN_S = 6.0, 4.0, HANG_TIMEOUT_S + 25
DISK_NBYTES = 1 << 24
JUMP_S = {"forward": 3600, "back": -3600}
NO_SPACE = "No space left on device"
ACCURATE = 0.9
MARK = "ODSGD_CHAOS_MARK"
ITERATION = re.compile(r"worker 0 \| iteration (\d+)/")


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
    wire: str


def case(seed: int, number: int) -> Case:
    """Job `number` of a campaign."""
    draw = random.Random(f"{seed}/{number}")
    store = draw.choice(sorted(STORES))
    ring = store in RINGS
    workers = draw.choice((2, 2, 2, 3))
    servers = 0 if ring else draw.choice((1, 2))
    victim = draw.choice([one for one in VICTIMS if not ring or one not in ("server", "scheduler")])
    rank = draw.randrange(workers if victim == "worker" else max(1, servers))
    fault = draw.choice(FAULTS.get(victim, FAULTS_OF_PROCESSES))
    moment = draw.choice(MOMENTS)
    name = f"{victim} {rank}" if victim in ("worker", "server") else victim
    workers = 2 if victim in ON_TWO_HOSTS else workers  # one on each
    return Case(number, store, workers, servers, name, fault, moment, draw.uniform(0, 0.4), draw.choice((0, 2)),
                draw.choice(("ps-lite", "sockets")) if servers else "")


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Meanwhile the folder is a file system of its own, in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_NBYTES}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Job:
    """A running launch, its lines with their times, and its processes, found by a mark in their environment.

    It runs on this machine, or on the hosts of an emulated cluster.
    """

    def __init__(self, case: Case, out: Path, hosts: Optional[cluster.Cluster] = None,
                 env: Optional[Mapping[str, str]] = None) -> None:
        self.mark, self.lines, self.out = uuid.uuid4().hex, [], out  # type: str, List[Any], Path
        self.hosts = hosts
        flags = STORES[case.store][0].split()
        restarts = ["--max-restarts", str(case.restarts)] if case.restarts else []
        where = ["-H", "@hosts", "--env", MARK] if hosts else []
        where += ["--wire", case.wire] if case.wire else []
        where += ["--secure"] if case.victim == "tunnel" else []
        command = [sys.executable, "-m", "odsgd", "launch", "-n", str(case.workers), "-s", str(case.servers), *where,
                   "--hang-timeout", str(HANG_TIMEOUT_S), *restarts, sys.executable, "-m", "odsgd", "train",
                   "--dataset", "digits", "--lr", "0.05", "--epochs", str(EPOCHS), "--checkpoint-every", str(EVERY),
                   "--eval-every", "2", "--log-interval", "1", *flags, "--out", str(out)]
        environ = {**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(env or {})}
        start: Callable[..., Any] = hosts.popen if hosts else subprocess.Popen
        self.process = start(command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, text=True,
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
        if victim == "tunnel":  # of one of the hosts, which knows no mark
            return max(filter(is_tunnel, descendants(self.process.pid)), default=None)
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


def is_tunnel(pid: int) -> bool:
    try:
        return b"odsgd.launch.connections.tunnel" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has gone
        return False


def newest(out: Path) -> int:
    return max(manifests.complete(out / "checkpoints"), default=0)


def wait_for_moment(job: Job, one: Case) -> None:
    total = EPOCHS * PER_EPOCH[one.workers]
    folder = job.out / "checkpoints"
    if one.moment == "start-up":
        job.until(lambda: one.victim in ("disk", "link", "clock") or job.pid(one.victim))
        time.sleep(5 * one.delay_s)
        return
    if one.moment == "end":
        job.until(lambda: (folder / str(total)).exists())
    elif one.moment == "checkpoint":
        job.until(lambda: newest(job.out) >= EVERY)
        job.until(lambda: any(not (path / manifests.MANIFEST).exists() for path in folder.iterdir()))
        time.sleep(one.delay_s / 20)
        return
    elif one.moment == "evaluation":
        job.until(lambda: any("epoch 2/" in line for _, line in list(job.lines)))
    else:
        job.until(lambda: newest(job.out) >= EVERY)
    time.sleep(one.delay_s)


def hit(job: Job, one: Case) -> bool:
    """Whether there was something to hit."""
    if job.process.poll() is not None:
        return False
    if one.victim == "disk":
        fill(job, one)
        return True
    if one.victim == "link":
        unplug(job, BLIP_S if one.fault == "blip" else DOWN_S)
        return True
    if one.victim == "clock":
        jump(job.out, JUMP_S[one.fault])
        return True
    pid = job.pid(one.victim)
    try:
        if pid is not None:
            strike(pid, one.fault)
    except ProcessLookupError:
        return False
    return pid is not None


def strike(pid: int, fault: str) -> None:
    if fault == "slow":
        for _ in range(int(SLOW_S)):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.8)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.2)
        return
    os.kill(pid, {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "segv": signal.SIGSEGV}[fault])


def fill(job: Job, one: Case) -> None:
    """Fill the disk of the run. Before a restart somebody makes room."""
    filler = job.out.parent / "filler"
    since = time.monotonic()
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    with contextlib.suppress(OSError), open(filler, "ab", buffering=0) as file:
        while True:
            file.write(b"0")
    if one.restarts:
        job.until(lambda: job.said("restart 1 of", since))
        filler.unlink()


def unplug(job: Job, seconds: float) -> None:
    """Take a host's link down for some time, at its switch."""
    assert job.hosts
    port = ["ip", "link", "set", job.hosts.hosts[-1]]
    job.hosts.run([*port, "down"], timeout=20)
    time.sleep(seconds)
    job.hosts.run([*port, "up"], timeout=20)


def jumping(out: Path) -> Dict[str, str]:
    """The environment of a job whose clock can be made to `jump`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    source, library, clock = Path(__file__).with_name("clock.c"), out.with_name("clock.so"), out.with_name("clock")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    clock.write_bytes(bytes(8))
    return {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(clock)}


def jump(out: Path, seconds: int) -> None:
    """Of the wall clock, for all processes of a job at once."""
    with open(out.with_name("clock"), "r+b") as file:
        file.write(struct.pack("=q", seconds))


def run(one: Case, folder: Path) -> Dict[str, Any]:
    """Run a job and hit it; what was seen."""
    out = folder / str(one.number)
    shutil.rmtree(out, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        hosts = None
        if one.victim in ON_TWO_HOSTS:
            hosts = stack.enter_context(cluster.Cluster.up(hosts=one.workers, own_tmp=one.victim == "tunnel"))
        if one.victim == "disk":
            stack.enter_context(small_disk(out))
        env = jumping(out / "run") if one.victim == "clock" else {}
        return watched(one, Job(one, out / "run", hosts, env))


def watched(one: Case, job: Job) -> Dict[str, Any]:
    """Hit a job at its moment, and see it to its end."""
    began, out = time.monotonic(), job.out
    try:
        wait_for_moment(job, one)
        hit_at = time.monotonic()
        running = hit(job, one)
        try:
            code: Optional[int] = job.process.wait(JOB_WITHIN_S)
        except subprocess.TimeoutExpired:
            code = None
        ended_at = time.monotonic()
        left = left_after(job)
        job.reader.join(5)
        named_at = named(job, one, hit_at)
        return {**one._asdict(), "hit": running, "code": code, "left": left,
                "named_s": None if named_at is None else round(named_at - hit_at, 1),
                "restarted": job.said("restart 1 of", hit_at) is not None, "useful_s": useful_s(job.lines, hit_at),
                "damaged": damaged(out), "finished": newest(out) == EPOCHS * PER_EPOCH[one.workers],
                "accuracy": accuracy(out), "weights": weights(out), "seconds": round(ended_at - began, 1),
                "traceback": traceback_in([line for _, line in job.lines]),
                "said": [line for _, line in job.lines if line.startswith("odsgd launch:")][:6]}
    finally:
        for pid in job.marked():
            os.kill(pid, signal.SIGKILL)
        job.process.wait()


def named(job: Job, one: Case, since: float) -> Optional[float]:
    """When the launcher named the victim, or a process the full disk."""
    if one.victim == "disk":
        return next((when for when, line in list(job.lines) if when >= since and NO_SPACE in line), None)
    words = {"agent": "lost host|the agent on host", "link": "do not come through|has not answered",
             "tunnel": "lost host|its tunnel has not answered"}
    if mpi_does_not_start(one._asdict()):
        words["link"] += "|worker . failed .*exit code"  # MPI ends itself, with its own words
    blamed = rf"^odsgd launch: (warning: )?{re.escape(one.victim)} "  # others are told of behind it
    return job.said(words.get(one.victim, blamed), since)


def useful_s(lines: Sequence[Tuple[float, str]], since: float) -> Optional[float]:
    """The longest time from then on in which no iteration was done that had not been done before; None: none came.

    >>> at = lambda when, number: (when, f"worker 0 | iteration {number}/9: loss 1")
    >>> useful_s([at(1.0, 4), at(2.0, 5), at(9.0, 4), at(9.5, 5), at(10.0, 6), at(10.5, 7)], 1.5)
    8.0
    """
    farthest, last, longest = 0, since, None  # type: int, float, Optional[float]
    for when, line in lines:
        found = ITERATION.match(line)
        if found and int(found[1]) > farthest:
            farthest = int(found[1])
            if when > since:
                longest, last = max(longest or 0.0, when - last), when
    return None if longest is None else round(longest, 1)


def mpi_does_not_start(one: Dict[str, Any]) -> bool:
    """Whether the workers of a ring do not reach each other at the start, at which MPI gives up by itself."""
    return one["store"] in RINGS and (one["victim"], one["fault"], one["moment"]) == ("link", "down", "start-up")


def traceback_in(lines: List[str]) -> List[str]:
    """The first traceback, and some of what is printed beside it."""
    first = next((at for at, line in enumerate(lines) if "Traceback" in line), len(lines))
    return lines[first:first + 40]


def left_after(job: Job) -> int:
    """Processes that are still there some time after the launcher."""
    deadline = time.monotonic() + LEFT_WITHIN_S
    while time.monotonic() < deadline and job.marked():
        time.sleep(0.1)
    return len(job.marked())


def damaged(out: Path) -> List[str]:
    """Checkpoints that count, and are not whole."""
    bad = []
    for iteration in manifests.complete(out / "checkpoints"):
        path = out / "checkpoints" / str(iteration)
        try:
            manifest = manifests.read_manifest(path)
            for name in manifest["files"]:
                manifests.verify(path, name, manifest)
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
    path = out / "checkpoints" / str(newest(out)) / manifests.WEIGHTS
    return manifests.digest(path)["sha256"] if path.is_file() else None


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
             f"{seen['left']} processes left": seen["left"], "a traceback": seen["traceback"],
             "a checkpoint that counts is damaged": seen["damaged"]}
    broken = [text for text, is_so in found.items() if is_so]
    fatal = seen["hit"] and seen["fault"] not in HARMLESS
    if seen["victim"] == "launcher" and fatal:
        return broken
    limit_s = KILLED_WITHIN_S if seen["fault"] in ("kill", "segv", "full") else HANG_TIMEOUT_S + HANG_SLACK_S
    if (seen["fault"], seen["moment"]) == ("full", "start-up"):  # it is noticed when there is something to write
        limit_s = JOB_WITHIN_S
    named_s = limit_s + 1 if seen["named_s"] is None else seen["named_s"]
    if fatal and (seen["code"] != 0 or seen["restarted"]) and named_s > limit_s:
        broken.append(f"{seen['victim']} was not named within {limit_s:g} s")
    # A server that is hit when all workers have succeeded makes the exit code another one; the job has finished.
    goes_on = not fatal or (seen["restarts"] and not mpi_does_not_start(seen))
    if goes_on and not (seen["finished"] and (fatal or seen["code"] == 0)):
        broken.append(f"not finished (exit code {seen['code']})")
    elif seen["code"] == 0 and same_bits is False:
        broken.append("other bits")
    elif seen["code"] == 0 and same_bits is None and not (seen["accuracy"] or 0) > ACCURATE:
        broken.append(f"accuracy {seen['accuracy']}")
    return broken


def table(results: List[Dict[str, Any]]) -> str:
    """By victim and fault, and by moment, as Markdown."""
    head = ["jobs", "hit while running", "named after, median and max (s)", "left behind", "damaged checkpoints",
            "restarted", "finished", "same bits", "broken promises"]
    order = [(victim, fault) for victim in VICTIMS
             for fault in dict.fromkeys(FAULTS.get(victim, FAULTS_OF_PROCESSES))]
    by_victim = [[victim, fault, *counted([one for one in results
                                           if (one["victim"].split()[0], one["fault"]) == (victim, fault)])]
                 for victim, fault in order]
    by_moment = [[moment, *counted([one for one in results if one["moment"] == moment])]
                 for moment in dict.fromkeys(MOMENTS)]
    return "\n\n".join(piped([[*of, *head], *(row for row in rows if row[len(of)] != "0")], right="")
                       for of, rows in ((["victim", "fault"], by_victim), (["moment"], by_moment)))


def counted(results: List[Dict[str, Any]]) -> List[str]:
    """How these jobs went, in the order of the table's columns."""
    waits = [one["named_s"] for one in results
             if one["hit"] and one["named_s"] is not None and one["fault"] not in HARMLESS]
    told = f"{statistics.median(waits):.1f}, {max(waits):.1f}" if waits else "-"
    bits = [one["same_bits"] for one in results if one["same_bits"] is not None]
    return [str(len(results)), str(sum(one["hit"] for one in results)), told,
            str(sum(one["left"] for one in results)), str(sum(len(one["damaged"]) for one in results)),
            str(sum(one["restarted"] for one in results)), str(sum(one["finished"] for one in results)),
            f"{sum(bits)} of {len(bits)}", str(sum(bool(one["broken"]) for one in results))]


def results_of(log: Path) -> List[Dict[str, Any]]:
    """What a campaign has seen so far."""
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []


def summary(results: List[Dict[str, Any]], seed: int) -> str:
    """Where and when, and how many."""
    broken = [f"job {one['number']} ({one['fault']} {one['victim']} at {one['moment']}): {'; '.join(one['broken'])}"
              for one in results if one["broken"]]
    kept = f"Broken promises: {len(broken)}" + (". " + ". ".join(broken) if broken else "") + "."
    return (f"{len(results)} jobs of seed {seed}, {time.strftime('%Y-%m-%d', time.gmtime())}, "
            f"{len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}. {kept}")


def out_of_reach(folder: Path) -> Dict[str, str]:
    """Victims that cannot be hit here, and why."""
    beyond = {}
    try:
        cluster.check_machine()
    except ConfigError as error:
        beyond.update(dict.fromkeys(("disk", "link", "tunnel"), str(error)))
    if any(Path("/tmp") in [path, *path.parents] for path in (folder, ROOT)):
        beyond.setdefault("tunnel", "its hosts have a /tmp of their own, and see nothing in this one; run from another "
                          "folder, and name one with --out")
    if not shutil.which("cc"):
        beyond["clock"] = "no compiler of C (cc) for scripts/maintain/clock.c"
    return beyond


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"))
    parser.add_argument("--within", type=float, default=float("inf"), metavar="S", help="begin no job after so long")
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="put the table between the page's marks")
    options = parser.parse_args()
    folder = options.out.resolve()
    beyond = out_of_reach(folder)
    for victim, why in beyond.items():
        print(f"left out: {victim} ({why})", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "results.jsonl"
    results = results_of(log)
    done = {one["number"] for one in results if one["seed"] == options.seed}
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # which ends the job under way
    stop_at = time.monotonic() + options.within
    for number in range(options.jobs):
        one = case(options.seed, number)
        if number in done or one.victim.split()[0] in beyond or time.monotonic() > stop_at:
            continue
        seen = run(one, folder)
        comparable = STORES[one.store][1] and one.workers == 2 and seen["finished"] and seen["code"] == 0
        seen["same_bits"] = seen["weights"] == reference(one, folder) if comparable else None
        seen["broken"], seen["seed"] = judge(seen, seen["same_bits"]), options.seed
        with open(log, "a", encoding="utf-8") as file:
            file.write(json.dumps(seen) + "\n")
        results.append(seen)
        shutil.rmtree(folder / str(number), ignore_errors=True)  # one that was ended at start-up has none
        print(f"{number}: {one.store}, {one.workers}+{one.servers} {one.wire}, {one.fault} {one.victim} at "
              f"{one.moment}, restarts {one.restarts}: {'; '.join(seen['broken']) or 'as promised'} "
              f"({seen['seconds']} s)", flush=True)
    mine = [one for one in results if one["seed"] == options.seed and one["number"] < options.jobs]
    text = table(mine)
    print(text)
    if options.markdown:
        put_into(options.markdown, "<!-- chaos -->", f"\n{summary(mine, options.seed)}\n\n{text}\n\n")
    return int(any(one["broken"] for one in mine))


if __name__ == "__main__":
    sys.exit(main())
