"""Defects of the past, to be put back into a copy of the code: the simulation has to find them.

Each is what it did, and the change that makes it: module, text that ships, text that it was.
"""
from typing import Dict, List, Tuple

from scripts.maintain.simulation.loader import Image

JUDGE, AGENTS = "odsgd.launch.policy.judge", "odsgd.launch.hosts.agents"
LIVENESS, CHILD = "odsgd.launch.policy.liveness", "odsgd.launch.agent.child"
FIRST_HEARD = JUDGE, "not self.non_workers or any(failure.killed", "any(failure.killed"
"""On a ring an end without a report was blamed if it was heard first, unless another was known to be killed."""

DEFECTS: Dict[str, List[Tuple[str, str, str]]] = {
    "a worker that MPI ended since another was killed was blamed in its place": [
        (JUDGE, "any_clearer and unreported,", "False,")],
    "a worker that MPI ended after another was blamed, and the message was sure of it": [
        (JUDGE, "cause.unreported and sum(one.unreported for one in self.failures) > 1", "False")],
    "a worker that MPI crashed after an agent had was blamed in place of the lost host": [
        FIRST_HEARD,
        ("odsgd.launch.policy.failures", "self.member is None or (self.member.code is not None",
         "self.member is not None and (self.member.code is not None")],
    "a worker of a ring that was ended since it stood still was not blamed, and one that MPI crashed then was": [
        ("odsgd.launch.policy.failures", "self.member is None or self.member.hung or self.member.error is not None",
         "self.member is None or self.member.error is not None")],
    "a worker of a ring raised an error, and one that MPI crashed then was blamed": [
        FIRST_HEARD],
    "a worker of a ring was ended by SIGTERM or SIGXCPU, and one that MPI crashed then was blamed": [
        FIRST_HEARD,
        ("odsgd.launch.policy.failures", "self.member.code < 0 and not self.unreported", "self.member.code == -9")],
    "who kept a job from starting was asked when all had been ended, and another was left out": [
        ("odsgd.launch.supervisor", "names = self.blocking\n", "names = self.judge.blocking_startup()\n")],
    "a worker that had waited for longer than --hang-timeout was ended when its wait was over": [
        (LIVENESS, "if waited and self.waits_s is None:", "if False:")],
    "on sockets the startup timeout did not see a worker that never asked to join": [
        (JUDGE, 'worker.blocks_startup if self.on_sockets else worker.phase == "waiting"',
         'worker.phase == "waiting"')],
    "the last words of a lost worker were taken for those of the worker that joined in its place": [
        ("odsgd.launch.supervisor", "message.process not in agent.names", "message.process not in self.judge.members")],
    "after a pause of a whole job healthy processes were said to have been silent": [
        ("odsgd.launch.agent.agent", "self.excused = held_up_s > HELD_UP_S", "self.excused = False")],
    "of two agents at one address only the first was watched": [
        (LIVENESS, "(process.agent, process.agent_at)", "(process.agent, 0.0)"),
        (LIVENESS, "for (_, heard_at), processes in agents.items():", "for (_, _), processes in agents.items():"),
        (LIVENESS, "silent_s = now - heard_at", "silent_s = now - (processes[0].agent_at or now)")],
    "a worker stopped before its first beat was not noticed": [
        (CHILD, '(self.stopped_at or now) if state == "T" else None', "None")],
    "a link that went down while workers met for an evaluation was waited for ten times as long": [
        (LIVENESS, '(waits or self.activity == "training")', '(self.activity == "training")')],
    "an asynchronous job whose link was down was told to give its workers data of one length": [
        (LIVENESS, "if self._uneven or not waiting or any(process.asynchronous for process in workers):",
         "if self._uneven or not waiting:")],
    "a worker that stood still before its agent was stopped was blamed in the agent's place": [
        (LIVENESS, "self._fresh_s = min(FRESH_S, self._warn_s)", "self._fresh_s = FRESH_S")],
    "workers whose messages were lost were told to have data of one length, without a doubt": [
        (LIVENESS, '"either messages between them do not come through, or not all do the same: "', '""')],
    "a worker that was done, after its job had lost another, was said to wait for more data": [
        (LIVENESS, " or any(process.asynchronous for process in workers):", ":"),
        (LIVENESS, " > UNEVEN_DATA_S and not process.leaving]", " > UNEVEN_DATA_S]")],
    "a worker that was done, a moment after all had waited for a link, was said to stand still": [
        (LIVENESS, "if waited and self.waits_s is None:", "if False:"),
        (LIVENESS, "process.progress_is_final, process.moved_at = True, told is not None, now",
         "process.progress_is_final = True, told is not None")],
    "a worker that MPI crashed was blamed while the agent of the one that was killed stood still": [
        (JUDGE, "self.liveness.unanswered_since(cause.at) if doubtful else []", "[]")],
    "a job whose servers had met waited for ever for a worker whose ssh stood still": [
        (JUDGE, 'worker.blocks_startup if self.on_sockets else worker.phase == "waiting"', "False")],
    "a ring whose link stayed down used up its restarts in seconds": [
        (JUDGE, "if len(self.workers) > 1 and len(alike) == 1 and None not in alike and not ended_while_joining:",
         "if len(self.workers) > 1 and len(alike) == 1:")],
    "an agent's streams that ended in one turn of the loop were closed twice, and the launcher ended with a KeyError": [
        (AGENTS, "if self._selector.get_map().get(key.fd) == key:", "if True:")],
    "Ctrl-C while a failed attempt ended was forgotten, and the job started again": [
        ("odsgd.launch.supervisor",
         "None if verdict.by_signal or verdict.workers_succeeded else self.judge.stopped()", "None")],
    "a worker that MPI ended after another's deadline was blamed in the deadline's place": [
        (JUDGE, "ring_timed_out = not self.non_workers and any(", "ring_timed_out = False and any(")],
    "a signal to an agent that had just begun left a folder behind": [
        ("odsgd.launch.agent.agent", "        self._listen_to_signals()  # before there is anything to remove\n", ""),
        ("odsgd.launch.agent.agent", "        linux.adopt_orphans()\n",
         "        linux.adopt_orphans()\n        self._listen_to_signals()\n")],
    # Nobody made these; a reader of the promises asked whether they would be found.
    "a job with restarts ended at its first crash": [
        ("odsgd.launch.policy.membership", "if restarts_used == max_restarts:", "if True:")],
    "a job that may lose workers ended with the first": [
        (JUDGE, "if self.continues_on_loss and not reasons:", "if False:")],
    "a process that stood still for two seconds was ended": [
        (LIVENESS, "elif process.silent_s > times * self._warn_s:", "elif process.silent_s > 2.0:"),
        (LIVENESS, "if process.silent_s > times * self._limit_s:", "if True:")],
    "a process that stood still was warned of without its name": [
        (LIVENESS, 'f"{process.name} on host {process.member.host} {text}"', 'f"a process {text}"')],
    "an agent that stood still was lost after six times --hang-timeout": [
        (LIVENESS, "if silent_s > self._limit_s:", "if silent_s > 6 * self._limit_s:")],
    "a worker was lost whose successor had not joined at the end, and the last line did not name it": [
        (JUDGE, 'worker.part == "lost" or (worker.lost_at and not worker.joined)', 'worker.part == "lost"'),
        ("odsgd.launch.policy.membership", "if judge.workers_ended_at is not None:", "if False:")],
    "an agent left its folder behind": [
        ("odsgd.launch.agent.agent", "shutil.rmtree(self.folder, ignore_errors=True)", "pass")],
}

OF_SERVERS: Dict[str, Dict[str, List[Tuple[str, str]]]] = {
    "a worker on sockets that began while its link was down ended at once, and restarts were used up in seconds": {
        "kvstore.weights.servers.courier": [("not in (*LINK_DOWN, *comes_later)", "not in comes_later")]},
    "a worker on sockets whose link was down when it called the servers ended at once": {
        "kvstore.transports.outbox": [("courier.call_again(address", "courier.call(address")]},
    "a worker that joined before a server's host had heard of the loss ended that server": {
        "kvstore.weights.servers.hub": [
            ("joined > before >= 0:", "rank in environment.lost_workers() and before >= 0:"),
            ("elif joined == before or", "elif before >= 0 or")]},
    "a worker that joined when all others were done ended a server": {
        "kvstore.weights.servers.shard": [('if not store["buckets"].keys() <= gone', "")]},
    "a worker joined in the place of one that had closed the store, and a server forgot it under the joiner": {
        "kvstore.weights.servers.server": [('if name == "opened":', "if False:")]},
    "who called the scheduler, and was gone when it answered, cost it a traceback": {
        "kvstore.weights.servers.sockets": [("with connection, contextlib.suppress(OSError):", "with connection:")]},
    "a worker killed between the two sums of a gathering left a text of zeros": {
        "kvstore.job.agreement": [('text.tobytes().decode() if text.all() else ""', "text.tobytes().decode()")]},
}
"""The defects that `exchanges` has to find."""


def image(what: str) -> Image:
    """The code with a defect put back."""
    changes: Dict[str, List[Tuple[str, str]]] = {}
    for module, now, then in DEFECTS[what]:
        changes.setdefault(module, []).append((now, then))
    return Image(changes)
