"""What is promised of a job (docs/results/reliability.md, docs/explanation/failures.md), each as a function.

A function gets the result of a history and gives sentences that say how the promise was broken: none, if it was kept.
"""
import itertools
import math
import re
import signal
from typing import Any, Callable, Iterator, List, Pattern, Set

from odsgd.launch.plan import place
from scripts.maintain.simulation.programs import MPI_GAVE_UP, MPI_SEARCHES_S, UNIT
from scripts.maintain.simulation.scenario import HERE, Hit, Result

KILLS = ("kill", "term", "xcpu", "segv", "abort", "raise")
CODES = {"kill": 137, "segv": 139, "abort": 134, "term": 143, "xcpu": 152, "raise": 70, "refuse": 64, "stop": 75,
         "stand": 75}
HARMLESS = ("clock", "block output", "late agents", "stutter")
HEALS = ("pause", "freeze", "slow", "full", "cut", "cut one way", "cut data")
OF_HOSTS = ("lose host", "reboot", "cut", "cut one way", "cut data", "slow", "reset")
OWN_DEADLINES = ("exit code 75", f"exit code {MPI_GAVE_UP}")
SIGNALS = {"interrupt": 130, "interrupt twice": 130, "terminate": 143}
FAILED = re.compile(r"odsgd launch: ((?:worker|server) \d+|scheduler) failed \(host ([^ ,)]+)")
LOST = re.compile(r"odsgd launch: lost host (\S+) \(")
LOST_WORKER = re.compile(r"odsgd launch: (worker \d+) was lost \(.*the job goes on with")
STARTS = re.compile(r"odsgd launch: (worker \d+) starts on .*, to join after iteration")
JOINED = re.compile(r"odsgd launch: (worker \d+) has joined")
ABSENT = re.compile(r"odsgd launch: (.* did not come back; )?trying again for")
FROM = re.compile(r"odsgd launch: restart \d+ of \d+, from (?:checkpoint (\d+)|the beginning)")
ENDS_ALL = re.compile(r"odsgd launch: (lost host \S+ \(|the job has not come up within|for \d+ s every process has|"
                      r".*needs as many batches)")
ENDED_BADLY = re.compile(r"odsgd launch: .* ended badly after the last worker had succeeded")
TELLS_LOSS = re.compile(r"was lost|lost host|given up")
BACK = re.compile(r"back: .*; the job ends after checkpoint")
WITHOUT = re.compile(r"the job has finished without workers \[(.*)\]")
AGAIN = re.compile(r"odsgd launch: (restart \d+ of|.*; trying again for|trying again for|going on (with|from))")
LEFT_OUT = re.compile(r"going on with .* (without .*); batches are dealt anew")
ENDED = re.compile(r"odsgd launch: ((?:worker|server) \d+|scheduler) (?:failed|was lost) "
                   r"\(host [^ ,]+(?:, pid (\d+))?\): exit code (\d+)")
NAMED_WITHIN_S, HANG_SLACK_S, TAKEN_IN_WITHIN_S = 15.0, 15.0, 10.0
ENDED_SLACK_S, ASKED_WITHIN_S = 10.0, 60.0
MORE_STEPS = 3  # which a worker begins before its job ends at a checkpoint
AT_ONCE_S = 3.0  # with starts and ends of ssh
TOLD_WITHIN_S = 2.5  # how far a worker is comes with its beats
FAREWELL_S = 5.0  # servers have it to end after the last worker
STAYS_S = 15.0  # how long the launcher waits for an agent to end what is there, before it says why it does
SSH_ANSWERS_S, SSH_LOOKS_S = 20.0, 50.0
"""So long the launcher waits for ssh before it begins; and ssh for a host that is away."""
MOVES_SLACK_S = 105.0
"""45 s for ssh to miss a host, and a minute for ends, starts and looks at the clock."""


def cuts_launcher_short(hit: Hit) -> bool:
    """Whether it leaves the launcher no time for last words, or to remove its file."""
    return hit.victim == "launcher" and hit.kind in (*KILLS, "stop", "interrupt twice")


def may_be_unread(result: Result) -> bool:
    """Whether what the launcher said may not have come out."""
    return any(hit.kind in ("block output", "close output") or cuts_launcher_short(hit) for hit in result.hits)


def ends(result: Result) -> Iterator[str]:
    """A job ends: each wait of the launcher has a bound, however its processes, hosts and links fail."""
    if result.code is None and not any(hit.kind == "stop" and hit.victim == "launcher" for hit in result.hits):
        yield f"the launcher has not ended after {result.world.now:.0f} s"


def says_why(result: Result) -> Iterator[str]:
    """The exit code is 0 only if all workers have, but those that were said to be lost; else the last lines say why."""
    training, hits = result.training, result.hits
    unread = may_be_unread(result)
    if not hits and result.code != 0:
        yield f"nothing was hit, and the exit code is {result.code}"
    if result.code == 0:
        last = max(training.begun, default=0)
        done = [one for one in training.finals if one[0] == last]
        without = _ranks(WITHOUT, result)
        ranks = {rank for _, rank, _ in done} | without | _ranks(JOINED, result)
        if not done or (not unread and not ranks >= set(range(training.begun[last] - result.job.spare))):
            yield f"exit code 0, and the workers have not done all: {training.begun} began, {training.finals} ended"
        for rank in sorted(without):
            if not any(f"worker {rank}" in text and TELLS_LOSS.search(text) for text in result.texts()):
                yield f"the job has ended without worker {rank}, and never said that it was lost"
        wanted = UNIT * training.iterations * (training.iterations + 1) // 2
        if not training.asynchronous and any(total != wanted for _, _, total in done):
            yield f"exit code 0, and the sums are not those of {training.iterations} steps ({wanted}): {done}"
    texts = result.texts()
    since = max((at for at, text in enumerate(texts, start=1) if AGAIN.match(text)), default=0)
    why = [text for text in texts[since:] if "odsgd launch: " in text and "warning" not in text]
    why += [text for text in texts if text == "KeyboardInterrupt" or "stopped by SIG" in text]  # overtakes others
    if (result.code or 0) > 0 and not unread and not why:
        yield f"exit code {result.code}, and since it last began not a word why"


def _ranks(line: Pattern[str], result: Result) -> Set[int]:
    """The numbers that lines of this kind name."""
    return {int(rank) for text in result.texts() for found in [line.search(text)] if found
            for rank in re.findall(r"\d+", found[1])}


def stops(result: Result) -> Iterator[str]:
    """A signal to the launcher ends the job after the grace at most, a second one at once; exit code 128 + signal."""
    first = next((hit for hit in result.hits if hit.kind in SIGNALS), None)
    if first is None or result.code is None:
        return
    held_s = sum(hit.lasts_s or 1e9 for hit in result.hits
                 if hit.victim == "launcher" and hit.kind in ("stop", "pause", "block output"))
    within_s = result.job.grace_s + 6.0 + 4.0 + 3.0 + held_s
    if first == result.only_hit and first.kind == "interrupt twice":
        within_s = 0.5 + AT_ONCE_S
    if result.ended_at - first.at_s > within_s:
        yield f"the launcher ended {result.ended_at - first.at_s:.1f} s after {first.kind}, not within {within_s:g} s"
    code = 128 - result.code if result.code < 0 else result.code  # as a shell sees one that a signal ended at its start
    if len(result.hits) == 1 and code not in (SIGNALS[first.kind], 0):
        yield f"{first.kind}, and the exit code is {result.code}"


def names_the_victim(result: Result) -> Iterator[str]:
    """The process that is blamed is one that was hit, or the message says that nobody can be."""
    hits = result.hits
    if any(hit.kind in SIGNALS for hit in hits) or may_be_unread(result):
        return
    texts = result.texts()
    for at, (told_s, text) in enumerate(result.said):
        failed, lost = FAILED.match(text), LOST.match(text)
        met = [hit for hit in hits if _may_be_blamed(result, hit, told_s)]
        victims = {hit.victim for hit in met}
        hosts = {HERE if hit.victim == "all" else hit.victim.replace("agent ", "") for hit in met
                 if hit.kind in (*OF_HOSTS, "freeze", "end agent")}
        remarks = itertools.takewhile(lambda line: line.startswith("  "), texts[at + 1:])
        if any(victim in line or victim in hosts or victim.startswith(("agent", "ssh")) for line in remarks
               if "first is not known" in line for victim in victims):  # the line names processes, no hosts and agents
            continue
        # A deadline tells the round that has not ended, MPI that it has not found the others: not who was late.
        if failed and failed[1] not in victims and failed[2] not in hosts and not text.endswith(OWN_DEADLINES):
            yield f"{failed[1]} is blamed, and {', '.join(sorted(victims)) or 'nobody'} was hit: {text}"
        if lost and not victims & {f"agent {lost[1]}", f"ssh {lost[1]}", f"agent {HERE}", lost[1], HERE}:
            yield f"host {lost[1]} is said to be lost, and {', '.join(sorted(victims)) or 'nothing'} was hit: {text}"


def _may_be_blamed(result: Result, hit: Hit, told_s: float) -> bool:
    """Whether it had come, and, alone, had not been over for long."""
    over_s = hit.at_s + hit.lasts_s + HANG_SLACK_S if hit.lasts_s and hit == result.only_hit else math.inf
    return hit.at_s <= told_s <= over_s


def blames_no_data(result: Result) -> Iterator[str]:
    """Workers whose data are of one length are not told that they are not, without a doubt."""
    if result.training.fewer:
        return
    for text in result.texts():
        doubted = not result.training.asynchronous and "either messages between them do not come through" in text
        if "needs as many batches" in text and not doubted:
            yield text


def bears(result: Result) -> Iterator[str]:
    """A job is not hurt by a clock that jumps or output that nobody reads, nor if one process, host or link stands
    still, is cut off or slow for less than half of each deadline."""
    hit, job = result.only_hit, result.job
    if hit is None or result.code is None:
        return
    half_s = min(job.hang_timeout_s, job.startup_timeout_s, result.training.timeout_s, SSH_ANSWERS_S,
                 math.inf if job.num_servers else MPI_SEARCHES_S) / 2
    if (hit.kind in HARMLESS or (hit.kind in HEALS and 0 < hit.lasts_s <= half_s)) and result.code:
        yield f"{hit.kind} {hit.victim} for {hit.lasts_s:g} s, and the exit code is {result.code}"


def outlives(result: Result) -> Iterator[str]:
    """A job that has trained outlives the crash of one process: with a restart, or without the worker with
    --on-worker-loss continue; and so the loss of a host that has nothing but workers, if it is found well before the
    others' own deadlines."""
    hit, job = result.only_hit, result.job
    of_host = hit is not None and hit.kind in ("lose host", "reboot", "cut")
    if hit is None or hit.victim == "launcher" or not result.code or not (of_host or hit.kind in (*KILLS, "end agent")):
        return
    trained = {f"worker {rank}" for _, rank, step, at in result.training.steps if step > 1 and at < hit.at_s}
    lost, began = set(_on_host(job, hit.victim) if of_host else [hit.victim]), job.num_workers - job.spare
    without = job.on_worker_loss == "continue" and began > len(lost) and lost and lost <= trained
    if of_host:  # all have met; and it is neither the launcher's nor that of two agents
        alone = hit.victim != HERE and [host.address for host in job.slots].count(hit.victim) == 1
        found_s = job.hang_timeout_s + HANG_SLACK_S
        without = without and len(trained) >= began and alone and found_s < result.training.timeout_s
    over = any(map(ENDED_BADLY.match, result.texts()))
    if not over and ((trained and job.max_restarts and not of_host) or without):
        yield f"{hit.kind} {hit.victim} at {hit.at_s:.2f} s, and the exit code is {result.code}"


def _on_host(job: Any, address: str) -> List[str]:
    """The workers and servers that a job has there."""
    workers, servers = place(job)
    return [f"{role} {rank}" for role, hosts in (("worker", workers), ("server", servers))
            for rank, host in enumerate(hosts) if host.address == address]


def outlives_each(result: Result) -> Iterator[str]:
    """A job outlives as many crashes of workers as it has restarts, if it trains on between them: also those of one
    worker in the same words."""
    hits, job, steps = result.hits, result.job, result.training.steps
    workers = all(hit.kind in KILLS and hit.victim.startswith("worker") for hit in hits)
    if not result.code or not workers or not 1 < len(hits) <= job.max_restarts:
        return
    far = 1
    for number, hit in enumerate(hits):
        mine = [(step, at) for attempt, _, step, at in steps if attempt == number]
        if hit.attempt != number or not any(step > far and at < hit.at_s - TOLD_WITHIN_S for step, at in mine):
            return
        far = max(step for step, _ in mine)
    yield f"{len(hits)} workers crashed, each in an attempt that had come farther, and the exit code is {result.code}"


def tells_where_it_begins_again(result: Result) -> Iterator[str]:
    """The first restart is said to go on from the newest checkpoint that was told of when a worker crashed."""
    at, text = next(((at, text) for at, text in result.said if AGAIN.match(text)), (0.0, ""))
    begins, before = FROM.match(text), [hit for hit in result.hits if hit.at_s < at]
    if not begins or not before or not all(hit.kind in KILLS and hit.victim.startswith("worker") for hit in before):
        return
    saved = [step for _, _, step, when in result.training.saved if when < before[0].at_s]
    if int(begins[1] or 0) < max(saved, default=0):
        yield f"{max(saved)} was saved before {before[0].victim} was hit at {before[0].at_s:.2f} s: {text}"


def waits_for_who_is_missing(result: Result) -> Iterator[str]:
    """Before a job goes on without a worker or a host, it tries for --rejoin-timeout."""
    left_out = [at for at, text in result.said if LEFT_OUT.search(text)][:1]
    tried = [at for at, text in result.said if ABSENT.match(text)][:1]
    if left_out and not may_be_unread(result):
        tries_s = left_out[0] - tried[0] if tried else 0.0
        if tries_s < result.job.rejoin_timeout_s - 0.5:
            yield f"tried for {tries_s:.1f} s, --rejoin-timeout {result.job.rejoin_timeout_s:g}"


def ends_what_waits(result: Result) -> Iterator[str]:
    """When messages do not come through, and nobody moves for --hang-timeout, the job ends, whatever its workers do."""
    hit = result.only_hit
    if hit is None or hit.kind != "cut data" or hit.lasts_s or result.code is None:
        return
    training, job = result.training, result.job
    if training.asynchronous or max((step for _, _, step, _ in training.steps if step), default=0) < 4:
        return
    within_s = max(job.hang_timeout_s, 10 * (training.step_s + training.alone_s)) + training.alone_s + HANG_SLACK_S
    lines = [at for at, text in result.said if at > hit.at_s and "odsgd launch: " in text and "warning" not in text]
    if result.code and (not lines or lines[0] - hit.at_s > within_s + training.timeout_s * (training.timeout_s < 60)):
        yield f"the link went down at {hit.at_s:.1f} s, and nothing is said within {within_s:g} s"


def tries_again(result: Result) -> Iterator[str]:
    """A job that has started once, and has a restart, outlives a link that is down for less than --rejoin-timeout."""
    hit = result.only_hit
    if hit is None or hit.kind != "cut data" or not result.job.max_restarts:
        return
    started = any(step > 1 for attempt, _, step, _ in result.training.steps if attempt == 0)
    if started and 0 < hit.lasts_s <= result.job.rejoin_timeout_s / 2 and result.code != 0:
        yield f"the link was down for {hit.lasts_s:.1f} s, and the exit code is {result.code}"


def goes_on_without(result: Result) -> Iterator[str]:
    """With -n MIN:MAX and a restart a job goes on without a host that is gone for good, or a worker that does not
    begin again: it is tried for --rejoin-timeout, and nobody else is left out."""
    job, hits = result.job, result.hits
    gone = {(hit.kind, hit.victim) for hit in hits if not hit.lasts_s}
    started = any(step > 1 for attempt, _, step, _ in result.training.steps if attempt == 0)
    if not job.least_workers or not started or len(gone) != len(hits) or result.code is None:
        return
    lost = [victim for kind, victim in gone if kind in ("lose host", "cut") and victim != HERE]
    hung = [victim for kind, victim in gone if kind == "hang"]
    if len(gone) == 1 and lost:
        away = [name for name in _on_host(job, lost[0]) if name.startswith("worker")]
    elif len(gone) == 2 and hung and ("kill", hung[0]) in gone:
        away = hung
    else:
        return
    if len(away) < job.num_workers and result.code:
        yield f"{' and '.join(away) or lost[0]} did not come back, and the exit code is {result.code}"
    for text in result.texts():
        left_out = LEFT_OUT.search(text)
        if left_out and not set(re.findall(r"worker \d+", left_out[1])) <= set(away):
            yield f"{' and '.join(away)} did not come back: {text}"


def grows(result: Result) -> Iterator[str]:
    """With --grow a job goes on with all workers from a checkpoint that it writes when a host is there again."""
    hit, left_out = result.only_hit, [at for at, text in result.said if LEFT_OUT.search(text)]
    if hit is None or not result.job.grow or not left_out or result.code is None:
        return
    since = max(hit.at_s + hit.lasts_s, left_out[-1]) + ASKED_WITHIN_S
    due = hit.kind in ("reboot", "cut") and hit.lasts_s and sum(at > since for *_, at in result.training.saved) > 1
    if due and not any(at >= left_out[-1] and BACK.search(text) for at, text in result.said):
        yield f"{hit.victim} is there again since {hit.at_s + hit.lasts_s:.1f} s, and the job goes on without it"
    begun, training = result.training.begun, result.training
    grown = [at for at, text in result.said if at >= left_out[-1] and "with all workers, if they come" in text]
    if begun[max(begun)] < result.job.num_workers and grown:
        yield f"{hit.victim} is there again, and the job has begun again without it"
    for end in grown:
        newest = max((attempt for attempt, _, _, at in training.steps if at < end), default=0)
        last = max((step for attempt, _, step, at in training.steps if attempt == newest and at < end), default=0)
        saved = max((step for attempt, _, step, at in training.saved if at < end), default=0)
        if last > saved + MORE_STEPS:
            yield f"{hit.victim} is there again, and the job ended in step {last}, after checkpoint {saved}"


def names_in_time(result: Result) -> Iterator[str]:
    """A process that crashes or raises an error is named within 15 s, one that is stopped after 10 to 12, or half of
    --hang-timeout; a server then or, if all workers have ended first, 5 s after them. Who waits for a stopped worker
    that was long alone before may end by its own deadline first."""
    hit, training = result.only_hit, result.training
    if hit is None or result.code is None:
        return
    killed = hit.kind in KILLS and hit.victim != "launcher"
    if not killed and not (hit.kind == "stop" and hit.victim.startswith(("worker", "server"))):
        return
    within_s = NAMED_WITHIN_S if killed else min(NAMED_WITHIN_S, result.job.hang_timeout_s / 2 + 4.0)
    role, _, host = hit.victim.partition(" ")
    host = "" if role not in ("agent", "ssh") else "127.0.0.1" if result.job.launcher == "local" else host
    named = [at - (FAREWELL_S if "after the last worker" in text else 0.0) for at, text in result.said
             if at >= hit.at_s and (hit.victim in text or (host and host in text))
             and "starting for " not in text]  # that says who is waited for, not that it is stopped
    if not killed and training.alone_s + within_s > training.timeout_s and any(
            FAILED.match(text) and text.endswith(OWN_DEADLINES) for text in result.texts()):
        return
    done = [rank for attempt, rank, _ in training.finals if attempt == hit.attempt]
    over = result.code == 0 and not named and done and (  # it had done all already, or nobody waits for it
        not hit.victim.startswith("worker") or int(hit.victim.split()[1]) in done
        or (result.job.spare > 0 and result.ended_at - hit.at_s <= within_s))
    if not over and (not named or named[0] - hit.at_s > within_s):
        yield f"{hit.victim} was hit at {hit.at_s:.2f} s ({hit.kind}), and is not named within {within_s:g} s"


def ends_what_stands_still(result: Result) -> Iterator[str]:
    """A worker or server that is stopped, or a worker in training or a server that stands still, has failed after
    --hang-timeout, or 5 times its longest iteration; a worker elsewhere, or in its first iterations, after 10 times
    --hang-timeout. The host of an agent that is stopped, or of its ssh, is lost after --hang-timeout."""
    hit, job, training = result.only_hit, result.job, result.training
    if hit is None or hit.kind not in ("stop", "stand") or hit.lasts_s or result.code is None:
        return
    activity, steps = training.stood.get(hit.victim, ("", 0))
    trains = any(at < hit.at_s for _, _, step, at in training.steps if step > 1)
    of_host = hit.victim.startswith(("agent", "ssh")) and trains
    if not of_host and not hit.victim.startswith(("worker", "server")):
        return
    within_s = job.hang_timeout_s
    if hit.kind == "stand":
        going = activity == "serving" or (activity == "training" and steps > 3)
        within_s = max(within_s * (1 if going else 10), 10 * training.step_s + 5 * training.alone_s)
    if within_s + ENDED_SLACK_S > training.timeout_s:  # the others' own deadline is over first
        return
    until = hit.at_s + within_s + ENDED_SLACK_S + (STAYS_S if of_host else 0.0)
    if (result.code or result.ended_at > until) and not any(
            hit.at_s <= at <= until and (LOST.match(text) if of_host else hit.victim in text and (
                FAILED.match(text) or LOST_WORKER.match(text) or "missing" in text)) for at, text in result.said):
        yield f"{hit.victim} stands still since {hit.at_s:.2f} s ({activity}), and has not failed after {within_s:g} s"


def gives_its_code(result: Result) -> Iterator[str]:
    """A job that fails ends with 128 + the signal that ended the process to blame; 75 after a deadline; 64 if its
    options were refused; else 70."""
    failures = [text for text in result.texts() if FAILED.match(text) or ENDS_ALL.match(text)]
    verdicts = list(filter(ENDED_BADLY.match, result.texts()))[:1] or failures[-1:]
    if not result.code or not verdicts or any(hit.victim == "launcher" for hit in result.hits):
        return
    text, hit, code = verdicts[0], result.only_hit, 75
    failed, told = FAILED.match(text), re.search(r"(?:killed|told to end) by (SIG\w+)|exit code (\d+)", text)
    if (LOST.match(text) and "told to end" not in text) or "has reported a failure" in text:
        code = 70
    elif told:
        code = 128 + signal.Signals[told[1]] if told[1] else int(told[2])
    if failed and hit and failed[1] == hit.victim:
        code = CODES.get(hit.kind, code)
    if result.code != code:
        yield f"the exit code is {result.code}, not {code}: {text}"


def tells_of_fewer_batches(result: Result) -> Iterator[str]:
    """When a worker of a synchronous job has fewer batches than the others, the job fails, and says so."""
    if not result.hits or any(hit.kind != "fewer" for hit in result.hits) or not result.training.finals:
        return
    if result.code == 0 or not any("needs as many batches" in text for text in result.texts()):
        yield f"{result.hits[0].victim} had fewer batches, which nobody says; exit code {result.code}"


def moves(result: Result) -> Iterator[str]:
    """When everything that failed is well again, a job goes on or ends: each next step, or the end, comes within the
    time of its deadlines."""
    if result.code is None or any(not hit.lasts_s and hit.kind not in (*KILLS, *SIGNALS, "end agent", "reset", "clock")
                                  for hit in result.hits):
        return
    job, training = result.job, result.training
    since = max((hit.at_s + hit.lasts_s for hit in result.hits), default=0.0)
    within_s = (10 * max(job.hang_timeout_s, training.alone_s) + 2 * job.startup_timeout_s + job.rejoin_timeout_s
                + MOVES_SLACK_S)
    for at in [*(at for *_, at in training.steps if at > since), result.ended_at]:
        if at - since > within_s:
            yield f"from {since:.1f} to {at:.1f} s no step began, for longer than {within_s:g} s"
        since = at


def names_who_is_late(result: Result) -> Iterator[str]:
    """A worker that hangs before it asks to join is missing after --startup-timeout, if the others wait so long."""
    hit, startup_s = result.only_hit, result.job.startup_timeout_s
    if hit is None or hit.kind != "hang" or result.training.timeout_s < startup_s:
        return
    joins = any(f"odsgd launch: {hit.victim} starts on" in text for text in result.texts())  # nobody waits for it
    if joins or 0 < hit.lasts_s < startup_s:
        return
    if not any(at < startup_s + NAMED_WITHIN_S and "missing: " in text and hit.victim in text
               for at, text in result.said):
        yield f"{hit.victim} has not asked to join, and is not said to be missing after {startup_s:g} s"


def tells_its_own_end(result: Result) -> Iterator[str]:
    """The exit code with which a process is said to have ended is its own, not that of another in whose place it is."""
    for text in result.texts():
        ended = ENDED.match(text)
        if ended and not any(f"{ended[1]} (pid {ended[2]}, " in line and line.endswith(f"ended: {ended[3]}")
                             for line in result.world.history):
            yield text


def blames_no_freeze(result: Result) -> Iterator[str]:
    """When all processes of a job stand still at once, or those of a host for less than --hang-timeout, and go on,
    none is blamed; but on a ring, or when a host did, for its own deadline, as MPI's search for others, or ssh's."""
    hit, job = result.only_hit, result.job
    if hit is None or hit.kind != "freeze" or (hit.victim != "all" and hit.lasts_s > job.hang_timeout_s - 2.0):
        return
    for text in result.texts():
        blamed = FAILED.match(text) or LOST.match(text) or "every process has answered" in text
        why = text.partition("; the job goes on")[0]
        own = why.endswith((*OWN_DEADLINES, "Connection timed out")) and (hit.victim != "all" or not job.num_servers)
        if blamed and hit.lasts_s < job.startup_timeout_s and not own:
            yield f"{hit.victim} stood still for {hit.lasts_s:g} s: {text}"


def leaves_nothing(result: Result) -> Iterator[str]:
    """When the launcher has ended nothing of the job is left: no process, no file."""
    late = [hit for hit in result.hits if not hit.lasts_s or hit.at_s + hit.lasts_s > result.ended_at - SSH_LOOKS_S]
    held = {hit.victim.partition(" ")[2] or HERE for hit in late if hit.kind in ("stop", "pause")
            and hit.victim.startswith(("agent", "ssh", "launcher"))}
    away = {hit.victim for hit in result.hits if hit.kind in ("lose host", "reboot")}
    away |= {hit.victim for hit in late if hit.kind in ("slow", "freeze")
             or (hit.kind in ("cut", "cut one way") and hit.lasts_s)}
    cut_off = {hit.victim for hit in result.hits if hit.cuts_for_good}
    if result.code is None or HERE in away:
        return
    killed = {hit.victim.partition(" ")[2] for hit in result.hits
              if hit.kind in KILLS and hit.victim.startswith("agent")}
    for host in result.world.hosts.values():
        if not host.up or host.name in held | away:
            continue
        left = [label for label in result.left[host.name]  # ssh looks again for 45 s, and stays with a stopped agent
                if label.split()[1] not in away | held
                and not (cut_off & {host.name, HERE} and label.startswith("sshd"))]  # TCP tries for some 15 min
        if left:
            yield f"left on {host.name}: {', '.join(left)}"
        kept = [path for path in host.below("/tmp") if path != "/tmp/odsgd-1000"]
        kept += list(host.below("/tmp/odsgd-1000"))
        if any(map(cuts_launcher_short, result.hits)):
            kept = [path for path in kept if not path.startswith(f"/tmp/odsgd-1000/{result.launcher.pid}.")]
        if kept and host.name not in killed:
            yield f"left on {host.name}: {', '.join(kept)}"


def one_at_a_time(result: Result) -> Iterator[str]:
    """No process of an earlier attempt trains on, or completes a checkpoint, once a later attempt has begun to.

    Those of an agent that is stopped, or cut off, do for a while: the lock on the run's folder keeps them apart.
    """
    apart = ("stop", "pause", "cut", "cut one way", "slow", "lose host", "reboot", "freeze")
    if any(hit.kind in apart and not hit.victim.startswith(("worker", "server", "scheduler")) for hit in result.hits):
        return
    newest = 0
    for attempt, rank, step, _ in result.training.steps:
        if attempt < newest:
            yield f"worker {rank} of attempt {attempt} began step {step} after attempt {newest} had begun to train"
            return
        newest = max(newest, attempt)
    newest = 0
    for attempt, name, step, _ in result.training.saved:
        if attempt < newest:
            yield f"{name} of attempt {attempt} saved {step} after attempt {newest} had"
        newest = max(newest, attempt)


def resumes(result: Result) -> Iterator[str]:
    """A restart goes on from the newest checkpoint that counts, and the sums have each step once."""
    for attempt, start, newest in result.training.resumed:
        if start != newest:
            yield f"attempt {attempt} began from {start}, and {newest} was whole"
    for (where, rank, step), times in result.training.pushes.items():
        if times > 1:
            yield f"{where} has step {step} of worker {rank} {times} times"


def restarts(result: Result) -> Iterator[str]:
    """There are no more restarts than --max-restarts, none after refused options, and each is said."""
    count = sum(" restart " in text and " of " in text for text in result.texts())
    if count > result.job.max_restarts:
        yield f"{count} restarts, --max-restarts {result.job.max_restarts}"
    again, begun = sum(bool(AGAIN.match(text)) for text in result.texts()), max(result.training.begun, default=0)
    if again < begun and not may_be_unread(result):
        yield f"attempt {begun} began, and only {again} were said"
    if again and result.hits and all(hit.kind == "refuse" for hit in result.hits):
        yield "the options were refused, and the job began again"


def takes_in(result: Result) -> Iterator[str]:
    """Who asks for a place that is empty gets it, and joins, while the job goes on and nothing else goes wrong."""
    for at, text in result.said:
        emptied, began = LOST_WORKER.match(text), STARTS.match(text)
        if emptied and emptied[1] != "worker 0" and result.asks_from is not None:
            since, sought = max(at, result.asks_from), f"{emptied[1]} starts on "
        elif began:
            since, sought = at, f"{began[1]} has joined"
        else:
            continue
        until = since + TAKEN_IN_WITHIN_S
        if until < result.ended_at and not _troubled(result, since, until) and not any(
                since - 1.0 <= told < until and f"odsgd launch: {sought}" in line for told, line in result.said):
            yield f"at {at:.1f} s: {text[:80]}; and within {TAKEN_IN_WITHIN_S:g} s nobody said: {sought}"


def _troubled(result: Result, since: float, until: float) -> bool:
    """Whether a fault came then, or had not healed."""
    return any(hit.at_s < until and (hit.lasts_s or (0.0 if hit.kind in KILLS else math.inf)) + hit.at_s > since
               for hit in result.hits if hit.kind != "clock")


def raises_nothing(result: Result) -> Iterator[str]:
    """No process of the job ends with a Python traceback of our code, and nothing that only observes fails, unless the
    disk is full."""
    for line in result.world.history:
        observes = "failed, and the job goes on without" in line and "No space left on device" not in line
        if "TRACEBACK" in line or "Traceback (most recent" in line or observes:
            yield line
            return


PROMISES: List[Callable[[Result], Iterator[str]]] = [
    ends, says_why, stops, names_the_victim, blames_no_data, blames_no_freeze, bears, outlives, outlives_each,
    tells_where_it_begins_again, waits_for_who_is_missing, ends_what_waits, tries_again, goes_on_without, grows,
    names_in_time, ends_what_stands_still, gives_its_code, tells_of_fewer_batches, moves, names_who_is_late,
    tells_its_own_end, leaves_nothing, one_at_a_time, resumes, restarts, takes_in, raises_nothing]


def broken(result: Result) -> List[str]:
    """All sentences, with the promise in front."""
    return [f"{promise.__name__}: {sentence}" for promise in PROMISES for sentence in promise(result)]
