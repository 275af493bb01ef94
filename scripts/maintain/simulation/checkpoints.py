"""Checkpoints on a disk that forgets what it may: the real files, manifests and second place, hit between two calls.

A worker writes checkpoint after checkpoint as `odsgd/training/checkpoint` does, in its order. It is killed, its host
loses power, or its disk is full for a while. Then it goes on from what is left. Other processes want the run's folder
meanwhile, of the same job and of another.
"""
import functools
import math
import random
import signal
from typing import Any, Callable, Dict, List, Set, Tuple

from kvstore.errors import ConfigError, RoundTimeoutError
from scripts.maintain.simulation import disk, stdlib
from scripts.maintain.simulation.files import Null, Sink
from scripts.maintain.simulation.loader import Image
from scripts.maintain.simulation.system import Process, World

RUN, ROOT, SECOND = "/home/run", "/home/run/checkpoints", "/home/second"
KEEP, LIVES, FULL = 2, 4, "No space left"
NOTHING: Dict[str, Any] = {"num_workers": 1, "config": None, "batches_per_epoch": None, "course": None,
                           "parameters": {}, "virtual_seconds": None}


class Run:
    """One history. `saved`: the checkpoints that have been reported; `untold`: those that were whole when their writer
    ended before it could; `copies`: those of the second place that count; `broken`: what was promised, and did not
    hold."""

    def __init__(self, seed: int, image: Image) -> None:
        self.world, self.draw = World(seed), random.Random(seed)
        stdlib.use(self.world)
        load = "odsgd.training.checkpoint.{}".format
        self.disk, self.manifests, self.checkpoint, self.mirror = (
            image.load(load(name)) for name in ("disk", "manifests", "checkpoint", "mirror"))
        self.host = self.world.host("10.0.0.1")
        for folder in (RUN, SECOND):
            self.host.files[folder] = self.host.names[folder] = None
        self.saved, self.copies, self.broken = [0], [0], []  # type: List[int], List[int], List[str]
        self.untold: Set[int] = set()
        self.faults: List[str] = []
        self.inside: Dict[Tuple[str, int], float] = {}  # by job and process: until when it had the run's folder
        self.paused_until = 0.0  # until when a process stood still, perhaps with the lock
        for _ in range(LIVES):
            self._live()
            self._await([self._begin("reader", {}, self._look, 0)])
        self.world.close()

    def _begin(self, label: str, env: Dict[str, str], main: Callable[[], None], hit_at_call: int,
               start_s: float = 0.0) -> Process:
        process = Process(self.host, None, [label], lambda process: main(), env,
                          {0: Null(), 1: Sink(self.world, "out"), 2: Sink(self.world, "err")}, start_s)
        process.label, process.hit_at_call, process.hit = label, hit_at_call, self._hit
        return process

    def _await(self, processes: List[Process]) -> None:
        self.world.run(self.world.now + 1000.0, lambda: all(process.dead for process in processes))
        self.world.run(self.world.now + 1.0)

    def _hit(self) -> None:
        what = self.draw.choice(("kill", "pause", "lose power", "lose power", "full disk"))
        self.faults.append(f"{what} at {self.world.now:.3f} s")
        self.world.note(f"FAULT {what}")
        if what == "full disk":
            self.host.full = True
        elif what == "kill":
            self.world.process().end(-9)
        elif what == "pause":
            process, lasts_s = self.world.process(), self.draw.choice((1.0, 10.0, 60.0))
            self.paused_until = max(self.paused_until, self.world.now + lasts_s)
            self.world.after(lasts_s, functools.partial(process.signal, signal.SIGCONT))
            process.signal(signal.SIGSTOP)
        else:
            self.host.lose_power()
            self.host.return_power()
            self.inside.clear()

    def _live(self) -> None:
        """Begin, and be hit at some call."""
        draw, mine = self.draw, f"job {self.world.pids}"
        env = {"ODSGD_RESTARTS": draw.choice(("0", "1"))}
        processes = [self._begin("worker", {**env, "ODSGD_SECRET": mine}, functools.partial(self._hold, self._write),
                                 draw.randrange(1, 900), 2 * draw.random())]
        for _ in range(draw.choice((0, 0, 1, 2))):
            stay = functools.partial(stdlib.sleep, draw.choice((0.0, 1.0, 5.0)))
            processes.append(self._begin("visitor", {**env, "ODSGD_SECRET": draw.choice((mine, "another job"))},
                                         functools.partial(self._hold, stay), draw.randrange(1, 60), 3 * draw.random()))
        self._await(processes)
        self.host.full = False

    def _hold(self, work: Callable[[], None]) -> None:
        """Do it in the run's folder, where two jobs never are."""
        process, began = self.world.process(), self.world.now
        job = process.env["ODSGD_SECRET"]
        process.data["on_end"] = [lambda: self._leave(job, process.pid)]
        try:
            with self.disk.held(disk.Path(RUN)):
                others = [other for (other, _), until in self.inside.items() if other != job and until == math.inf]
                self.broken += [f"one_job_in_a_folder: {job} came in, and {other} was there" for other in others]
                self.inside[job, process.pid] = math.inf
                work()
                self._leave(job, process.pid)
        except (ConfigError, RoundTimeoutError) as error:
            self.world.note(f"refused: {error}")
            had = [until for (other, _), until in self.inside.items() if other != job]
            if not any(until >= began for until in (*had, self.paused_until)):
                self.broken.append(f"a_free_folder_is_given: {error}")
        except OSError as error:
            if FULL not in str(error):
                raise

    def _leave(self, job: str, pid: int) -> None:
        if self.inside.get((job, pid)) == math.inf:
            self.inside[job, pid] = self.world.now

    def _write(self) -> None:
        root, second = disk.Path(ROOT), self.mirror.CheckpointMirror(SECOND)
        there = self.manifests.complete(root)
        if len(there) > 1 and self.draw.random() < 0.3:  # the newest is passed over, and written once more
            there.pop()
            self.copies = [copy for copy in self.copies if copy <= there[-1]]
        iteration = there[-1] if there else 0
        self.untold |= {*there} - {*self.saved}
        self.saved = [0, *(one for one in self.saved if one in there)]
        try:
            for _ in range(5):
                iteration += 1
                self._save(root, second, iteration)
        except (OSError, self.mirror.MirrorError) as error:  # the run ends with one line
            self.world.note(f"ended: {error}")
            if FULL not in str(error):
                raise

    def _save(self, root: Any, second: Any, iteration: int) -> None:
        folder, files = root / str(iteration), {}
        if folder.is_dir():
            self.disk.remove_for_good(folder / self.manifests.MANIFEST)
            second.uncount(iteration)
        self.disk.make_folder(folder)
        for name in ("worker-0.npz", self.manifests.WEIGHTS, self.manifests.SERVERS):
            with self.disk.replacing(folder / name) as temporary, disk.builtin_open(temporary, "wb") as file:
                for piece in range(3):
                    file.write(b"%d %d %s %d\n" % (iteration, piece, name.encode(), self.world.pids) * 50)
            files[name] = self.manifests.digest(folder / name)
            second.put(folder / name, iteration)
        self.manifests.write_manifest(folder, {**NOTHING, "schema": self.manifests.SCHEMA, "iteration": iteration,
                                               "files": files})
        self.saved.append(iteration)  # from here on the launcher counts on it
        self.world.note(f"saved {iteration}")
        kept = self.checkpoint._worth_keeping(root, KEEP, iteration)
        self.checkpoint._retire(root, kept, iteration)
        second.put(folder / self.manifests.MANIFEST, iteration)
        self.copies.append(iteration)
        self.checkpoint._retire_copies(second, kept, iteration, iteration, KEEP)

    def _look(self) -> None:
        """A checkpoint that counts loads, here and in the second place; one that has been reported is there, and so is
        the one before it."""
        newest = {ROOT: 0, SECOND: 0}
        for root in (disk.Path(ROOT), disk.Path(SECOND)):
            there = self.manifests.complete(root)
            lost = [one for one in self.saved[-KEEP:] if one not in (0, *there)
                    and not any(one < untold < self.saved[-1] for untold in self.untold)]  # which is kept in its place
            if str(root) == ROOT and lost:
                self.broken.append(f"a_reported_checkpoint_stays: of {self.saved[-KEEP:]} there are {there}")
            for iteration in there:
                folder = root / str(iteration)
                try:
                    manifest = self.manifests.read_manifest(folder)
                    for name in manifest["files"]:
                        self.manifests.verify(folder, name, manifest)
                except Exception as error:
                    self.broken.append(f"a_checkpoint_that_counts_loads: {folder}: {error}")
                newest[str(root)] = max(newest[str(root)], iteration)
        if newest[SECOND] < self.copies[-1]:
            self.broken.append(f"a_reported_checkpoint_stays: {self.copies[-1]} was copied, the newest is "
                               f"{newest[SECOND]}")
        self.saved = [one for one in self.saved if one <= newest[ROOT]]
        self.copies = [copy for copy in self.copies if copy <= newest[SECOND]]
