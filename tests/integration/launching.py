"""Starting the launcher as a process of its own, with stand-ins for servers, ssh and mpirun, and watching it."""
import dataclasses
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid

from odsgd.launch.agent import descendants

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
MEMBER = os.path.join(HERE, "launch_member.py")
HANG = os.path.join(HERE, "launch_hang.py")
MARK = "LAUNCH_TEST_MARK"
PATIENCE_S = 60.0


class Launch:
    """`odsgd launch` with these arguments. Every process of it carries a mark, by which it is found in /proc.

    `within`: a command that runs it, e.g. in another network namespace.
    """

    def __init__(self, *arguments, env=None, cwd=None, unread=False, within=()):
        self.mark = uuid.uuid4().hex
        environ = {**os.environ, "PYTHONPATH": ROOT, MARK: self.mark, "PYTHONUNBUFFERED": "1", **(env or {})}
        self.output, self.errors = [], []
        self._news = threading.Condition()
        command = [*within, sys.executable, __file__, *map(str, arguments)]
        self.process = subprocess.Popen(command, env=environ, cwd=cwd, stdin=subprocess.DEVNULL,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
        pairs = [(self.process.stderr, self.errors)]
        if not unread:
            pairs.append((self.process.stdout, self.output))
        self._readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in pairs]
        for reader in self._readers:
            reader.start()

    def _read(self, stream, lines):
        for line in stream:
            with self._news:
                lines.append(line.rstrip("\n"))
                self._news.notify_all()
        stream.close()

    def wait_for(self, *lines):
        """Until each of these lines has been printed."""
        with self._news:
            seen = self._news.wait_for(lambda: set(lines) <= set(self.output + self.errors), PATIENCE_S)
        assert seen, "never saw {}; output:\n{}".format(set(lines) - set(self.output + self.errors), self)
        return self

    def wait_for_all_joined(self, workers=2, servers=1):
        names = ["worker %d" % rank for rank in range(workers)] + ["server %d" % rank for rank in range(servers)]
        return self.wait_for("scheduler | joined", *(name + " | joined" for name in names))

    def wait(self):
        """The exit code; by then nothing of the job is left."""
        code = self.process.wait(PATIENCE_S)
        for reader in self._readers:
            reader.join(PATIENCE_S)
        self.nothing_is_left()
        return code

    def nothing_is_left(self, within_s=0.0):
        deadline = time.monotonic() + within_s
        while marked(self.mark) and time.monotonic() < deadline:
            time.sleep(0.02)
        left = marked(self.mark)
        assert not left, "still running: {}; output:\n{}".format(left, self)

    def pid(self, name):
        """The pid of `worker 1`, `server 0`, `scheduler`."""
        role, _, rank = name.partition(" ")
        pids = [pid for pid, env in marked(self.mark).items() if env.get("DMLC_ROLE") == role
                and (not rank or env.get("ODSGD_%s_RANK" % role.upper()) == rank)]
        children = {child for pid in pids for child in descendants(pid)}  # who have its environment
        return next(pid for pid in pids if pid not in children)

    def kill(self, name, number):
        os.kill(self.pid(name), number)

    @property
    def said(self):
        """What the launcher itself has said, its name taken off."""
        start = next((index for index, line in enumerate(self.errors) if line.startswith("odsgd launch: ")), None)
        return "" if start is None else "\n".join(self.errors[start:]).replace("odsgd launch: ", "")

    def __str__(self):
        return "\n".join(self.output + ["--"] + self.errors)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for reader in self._readers:
            reader.join(PATIENCE_S)


def marked(mark):
    """Pid and environment of every living process that carries the mark."""
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open("/proc/%s/environ" % entry, "rb") as environ, open("/proc/%s/stat" % entry, "rb") as stat:
                pairs = environ.read().decode(errors="replace").split("\0")
                state = stat.read().rpartition(b")")[2].split()[0]
        except OSError:
            continue
        env = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        if env.get(MARK) == mark and state != b"Z":
            found[int(entry)] = env
    return found


def command_line(pid):
    """What every user of this machine can read of a process; empty if it has gone."""
    try:
        with open("/proc/%s/cmdline" % pid, "rb") as cmdline:
            return cmdline.read().decode(errors="replace")
    except OSError:
        return ""


def leaves_nothing_when_killed(*options, env=None):
    """A job whose workers have children and whose launcher is killed with -9 ends on every host."""
    with Launch("-n", 2, "-s", 1, *options, MEMBER, "children", env=env) as launch:
        launch.wait_for("worker 0 | has children", "worker 1 | has children")
        launch.process.kill()
        launch.nothing_is_left(within_s=20)


def words(*command):
    """A command as one string for variables that are split like a shell's words, such as LAUNCH_TEST_SERVER."""
    return " ".join(shlex.quote(str(word)) for word in command)


def python_program(path, text):
    """An executable that runs `text` with this Python, whose path a `#!` line could not name if it had a space."""
    source = "%s.py" % path
    with open(source, "w") as script:
        script.write(text)
    with open(str(path), "w") as stub:
        stub.write('#!/bin/sh\nexec %s "$@"\n' % words(sys.executable, source))
    os.chmod(str(path), 0o755)
    return str(path)


def stand_in_ssh(folder, note=""):
    """A program called like ssh that runs the command here, with nothing of our environment but the mark."""
    path = os.path.join(str(folder), "ssh")
    with open(path, "w") as script:
        script.write("""#!/bin/sh
while [ "$1" = -o ] || [ "$1" = -p ]; do shift 2; done
host=$1; shift
%s
cd /
exec env -i PATH="$PATH" HOME="$HOME" %s="$%s" sh -c "$*"
""" % (note, MARK, MARK))
    os.chmod(path, 0o755)
    return path


def main():
    """The command line with a stand-in for `python -m kvstore.server`, and as much patience as a test wants."""
    from odsgd.launch import cli, supervise, watch
    for number in (signal.SIGINT, signal.SIGHUP):  # whoever runs the tests may ignore them, as `nohup` and `&` do
        signal.signal(number, signal.SIG_DFL)
    run = supervise.run
    server = tuple(shlex.split(os.environ.get("LAUNCH_TEST_SERVER", "")) or [sys.executable, MEMBER])
    supervise.run = lambda job: run(dataclasses.replace(job, server_command=server))
    watch.FAREWELL_S = float(os.environ.get("LAUNCH_TEST_FAREWELL_S", 20))
    sys.exit(cli.main())


if __name__ == "__main__":
    main()
