"""The launcher and its agents under simulated faults (`scripts/maintain/simulate`): some seeds of it, in every run.

What is tried is the code that ships. A seed's job and faults change with the simulation, so none is kept by its number:
faults are put into the code instead, and have to be found. All defects of the past: `scripts/maintain/simulate
--defects`.
"""
import errno
import functools
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, List

import pytest

from scripts.maintain import simulate
from scripts.maintain.simulation import checkpoints, defects, exchanges, processes, promises, scenario, stdlib
from scripts.maintain.simulation.loader import Image

SCRIPT = Path(simulate.__file__)


@pytest.fixture(scope="module")
def ships() -> Image:
    return Image()


@pytest.mark.parametrize("draw", [scenario.draw_faults, scenario.draw_close_faults])
def test_promises_are_kept_under_faults_and_a_seed_has_one_history(draw: Any, ships: Image) -> None:
    hit = 0
    for seed in range(1, 151):
        result = scenario.run(seed, ships, draw_faults=draw)
        assert promises.broken(result) == [], f"{SCRIPT.stem} [--close] --seed {seed} shows how"
        assert scenario.run(seed, ships, draw_faults=draw).digest == result.digest
        hit += bool(result.hits)
    assert hit > 75


def test_a_checkpoint_that_counts_loads_whatever_a_disk_forgets(ships: Image) -> None:
    for seed in range(1, 41):
        run = checkpoints.Run(seed, ships)
        assert run.broken == [], run.faults
        assert seed % 5 or checkpoints.Run(seed, ships).world.history == run.world.history


def test_workers_hear_of_a_loss_though_the_disk_is_full_at_that_moment(ships: Image) -> None:
    def draw(job: Any, *others: Any, full_s: float) -> List[Any]:
        hosts = dict.fromkeys([scenario.HERE, *(slot.address for slot in job.slots)])
        return [scenario.Fault("kill", f"worker {job.num_workers - 1}", 4.3, 0, 0.0, ""),
                *(scenario.Fault("full", host, 4.0, 0, full_s, "") for host in hosts if full_s)]

    tried = 0
    for seed in range(1, 301):
        job = scenario.draw_job(ships, random.Random(seed), random.Random(f"more {seed}"))
        if job.on_worker_loss == "continue" and job.num_workers > 1 and job.hang_timeout_s > 8:
            plain, full = (scenario.run(seed, ships, draw_faults=functools.partial(draw, full_s=full_s))
                           for full_s in (0.0, 3.0))
            assert full.code == plain.code, full.texts()
            tried += any("tries again until the file can be written" in text for text in full.texts())
    assert tried > 3


def test_a_machine_without_room_for_one_more_process_for_a_second_costs_no_job(ships: Image,
                                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    begin, refused = processes.Popen.__init__, []

    def in_time(self: Any, *given: Any, **named: Any) -> None:
        if stdlib.world.process().label == "launcher" and stdlib.world.now < 1.0:
            refused.append(stdlib.world.now)
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        begin(self, *given, **named)

    monkeypatch.setattr(processes.Popen, "__init__", in_time)
    for seed in range(1, 21):  # before a job by ssh every host is tried, and a failure told
        if not scenario.draw_job(ships, random.Random(seed), random.Random(f"more {seed}")).slots:
            assert scenario.run(seed, ships, draw_faults=lambda *_: []).code == 0
    assert len(refused) > 10


@pytest.mark.parametrize("ships, was", [
    ("            os.fsync(file.fileno())\n", "            pass\n"),
    ("    shared = file.readline().strip() == job\n", "    shared = True\n")], ids=["no flush", "another job's lock"])
def test_a_disk_that_is_not_flushed_and_a_folder_of_two_jobs_are_found_out(ships: str, was: str) -> None:
    changed = Image({"odsgd.training.checkpoint.disk": [(ships, was)]})
    assert any(checkpoints.Run(seed, changed).broken for seed in range(1, 41))


def test_a_push_is_in_the_weights_once_whoever_is_killed_late_or_cut_off() -> None:
    joined = 0
    for seed in range(76, 101):
        run = exchanges.Run(seed)
        assert run.broken == [], run.faults
        joined += run.num_workers in run.closing  # the first that joins has this row
        assert seed % 5 or exchanges.Run(seed).world.history == run.world.history
    assert joined > 0


POLICY, SUPERVISOR = "odsgd.launch.policy", "odsgd.launch.supervisor"
JUDGE, LIVENESS, MEMBERSHIP = (f"{POLICY}.{name}" for name in ("judge", "liveness", "membership"))


@pytest.mark.parametrize("module, was, now, promise, kind", [
    (JUDGE, "return all(worker.code == 0", "return any(worker.code == 0", "says_why", "kill"),
    (JUDGE, "        return Verdict(exit_code, cause", "        return Verdict(1, cause", "gives_its_code", "raise"),
    (SUPERVISOR, "            before = attempt\n", "            before = attempt\n            time.sleep(1000.0)\n",
     "moves", "kill"),
    (SUPERVISOR, "                console.say(decision.text)", "                pass", "restarts", "kill"),
    (SUPERVISOR, "            self.console.say(lost.message)\n", "", "says_why", "kill"),
    (LIVENESS, "        for process in self._answering(now):\n            if not process.activity",
     "        for process in ():\n            if not process.activity", "ends_what_stands_still", "stand"),
    (LIVENESS, "process.silent_s > times * self._limit_s", "process.silent_s > 3 * times * self._limit_s",
     "ends_what_stands_still", "stop"),
    (SUPERVISOR, "if self.signals_seen > signals_seen:", "if False:", "stops", "interrupt twice"),
    (MEMBERSHIP, "if wait_s > 0 and not set(missing)", "if False and not set(missing)", "waits_for_who_is_missing",
     "lose host"),
    (MEMBERSHIP, "attempt.farthest <= before.farthest", "True", "outlives_each", "kill twice")],
    ids=["one is enough", "exit code", "late restart", "restart unsaid", "loss unsaid", "stands still", "silent",
         "second Ctrl-C", "nobody waits", "same words"])
def test_each_promise_looks(module: str, was: str, now: str, promise: str, kind: str) -> None:
    def draw(job: Any, about_s: float, draw: random.Random, *more: Any) -> List[scenario.Fault]:
        at_s, worker = about_s * (0.3 + 0.3 * draw.random()), f"worker {job.num_workers - 1}"
        if kind == "kill twice":
            return scenario.draw_again(worker, draw)
        host = job.slots[-1].address if job.slots else ""
        victim = {"interrupt twice": "launcher", "lose host": host}.get(kind, worker)
        return [scenario.Fault(kind, victim, at_s, 0, 0.0, "")] if victim else []

    changed = Image({module: [(was, now)]})
    found = (promises.broken(scenario.run(seed, changed, draw_faults=draw)) for seed in range(1, 101))
    assert any(sentence.startswith(promise) for sentences in found for sentence in sentences)


def test_a_push_that_is_added_twice_is_found() -> None:
    twice = {"kvstore.weights.servers.hub": [("        self._update(key, pushed, stored)\n",
                                              "        self._update(key, pushed, stored)\n" * 2)]}
    assert any(exchanges.Run(seed, twice).broken for seed in range(1, 11))


def test_one_buffer_for_two_exchanges_in_flight_is_found() -> None:
    one_buffer = {"kvstore.transports.buffers": [("        before = self.last\n        self._buffers.rotate(-1)\n",
                                                  "        before = self.last\n")]}
    assert any(exchanges.Run(seed, one_buffer).broken for seed in range(1, 16))


def test_the_same_seed_prints_the_same_bytes_in_another_process() -> None:
    command = [sys.executable, str(SCRIPT), "--seed", "7"]
    first, second = (subprocess.run(command, capture_output=True, check=True).stdout for _ in range(2))
    assert first == second and b"all promises were kept" in first


def test_a_defect_of_the_past_is_found_and_a_failing_seed_is_shrunk_to_what_it_takes(ships: Image) -> None:
    what, = (what for what in defects.DEFECTS if "closed twice" in what)
    seed, broken = simulate.finds(scenario.run, defects.image(what), ships, 100)
    assert broken and broken[0].startswith(("raises_nothing", "says_why", "names_in_time"))
    without = simulate.shrunk(seed, functools.partial(scenario.run, image=defects.image(what)), broken)
    assert len(scenario.run(seed, ships).faults) - len(without) <= 2


def test_every_defect_is_one_that_the_code_could_have_again() -> None:
    for what in defects.DEFECTS:
        image = defects.image(what)
        for module in image.changes:
            image.load(module)
    for changes in defects.OF_SERVERS.values():
        image = Image(changes, copied=exchanges.COPIED, real=())
        for module in changes:
            image.load(module)
