"""Checkpoints on a disk that forgets what it may: the real files, manifests and second place, hit between two calls.

A worker writes checkpoint after checkpoint as `odsgd/training/checkpoint` does, in its order. It is killed, its host
loses power, or its disk is full for a while. Then it goes on from what is left.
"""
import random
from typing import Any, Dict, List

from scripts.maintain.simulation import disk, stdlib
from scripts.maintain.simulation.files import Null, Sink
from scripts.maintain.simulation.loader import Image
from scripts.maintain.simulation.system import Process, World

ROOT, SECOND = "/home/run/checkpoints", "/home/second"
KEEP, LIVES, FULL = 2, 4, "No space left"
NOTHING: Dict[str, Any] = {"num_workers": 1, "config": None, "batches_per_epoch": None, "course": None,
                           "parameters": {}, "virtual_seconds": None}


class Run:
    """One history. `saved`: the newest checkpoint that has been reported; `broken`: what was promised, and did not
    hold."""

    def __init__(self, seed: int, image: Image) -> None:
        self.world, self.draw = World(seed), random.Random(seed)
        stdlib.use(self.world)
        load = "odsgd.training.checkpoint.{}".format
        self.disk, self.manifests, self.checkpoint, self.mirror = (
            image.load(load(name)) for name in ("disk", "manifests", "checkpoint", "mirror"))
        self.host = self.world.host("10.0.0.1")
        for folder in ("/home/run", SECOND):
            self.host.files[folder] = self.host.names[folder] = None
        self.saved, self.broken = 0, []  # type: int, List[str]
        self.faults: List[str] = []
        for _ in range(LIVES):
            self._live()
            self._begin(self._look, 0)
        self.world.close()

    def _begin(self, main: Any, hit_at_call: int) -> None:
        process = Process(self.host, None, ["worker"], lambda process: main(),
                          {}, {0: Null(), 1: Sink(self.world, "out"), 2: Sink(self.world, "err")})
        process.label, process.hit_at_call, process.hit = "worker", hit_at_call, self._hit
        self.world.run(self.world.now + 1000.0, lambda: process.dead)
        self.world.run(self.world.now + 1.0)

    def _hit(self) -> None:
        what = self.draw.choice(("kill", "lose power", "lose power", "full disk"))
        self.faults.append(f"{what} at {self.world.now:.3f} s")
        self.world.note(f"FAULT {what}")
        if what == "full disk":
            self.host.full = True
        elif what == "kill":
            self.world.process().end(-9)
        else:
            self.host.lose_power()
            self.host.return_power()

    def _live(self) -> None:
        """Begin, and be hit at some call."""
        self._begin(self._write, self.draw.randrange(1, 900))
        self.host.full = False

    def _write(self) -> None:
        root, second = disk.Path(ROOT), self.mirror.CheckpointMirror(SECOND)
        there = self.manifests.complete(root)
        if len(there) > 1 and self.draw.random() < 0.3:  # the newest is passed over, and written once more
            there.pop()
            self.saved = there[-1]
        iteration = there[-1] if there else 0
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
            second.remove(iteration, self.manifests.MANIFEST)
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("worker-0.npz", self.manifests.WEIGHTS, self.manifests.SERVERS):
            with self.disk.replacing(folder / name) as temporary, disk.builtin_open(temporary, "wb") as file:
                for piece in range(3):
                    file.write(b"%d %d %s %d\n" % (iteration, piece, name.encode(), self.world.pids) * 50)
            files[name] = self.manifests.digest(folder / name)
            second.put(folder / name, iteration)
        self.manifests.write_manifest(folder, {**NOTHING, "schema": self.manifests.SCHEMA, "iteration": iteration,
                                               "files": files})
        self.saved = iteration  # from here on the launcher counts on it
        self.world.note(f"saved {iteration}")
        kept = self.checkpoint._worth_keeping(root, KEEP)
        self.checkpoint._retire(root, kept, iteration)
        second.put(folder / self.manifests.MANIFEST, iteration)
        self.checkpoint._retire_copies(second, kept, iteration)

    def _look(self) -> None:
        """A checkpoint that counts loads, here and in the second place; one that has been reported is there."""
        newest = 0
        for root in (disk.Path(ROOT), disk.Path(SECOND)):
            for iteration in self.manifests.complete(root):
                folder = root / str(iteration)
                try:
                    manifest = self.manifests.read_manifest(folder)
                    for name in manifest["files"]:
                        self.manifests.verify(folder, name, manifest)
                except Exception as error:
                    self.broken.append(f"a_checkpoint_that_counts_loads: {folder}: {error}")
                newest = max(newest, iteration) if str(root) == ROOT else newest
        if newest < self.saved:
            self.broken.append(f"a_reported_checkpoint_stays: {self.saved} was reported, and {newest} is the newest")
            self.saved = newest
