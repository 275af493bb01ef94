"""A stand-in for every process of a job: a scheduler, server or worker without MXNet, which joins, acts and leaves.

The scheduler listens where DMLC_PS_ROOT_* says, says `go` to all when they are there, and ends when all workers
have said `bye`; its end is the servers'. The deed of a member is its first argument, or MEMBER_<NAME> in the
environment (e.g. MEMBER_SERVER_0=hang):

    ok | exit N | report-and-exit N | hang (ignores SIGTERM) | wait | children | absent | silent
    until-lost (ends when it has been told of a lost worker)
"""
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

ROLE = os.environ["DMLC_ROLE"]
RANK = os.environ.get(f"ODSGD_{ROLE.upper()}_RANK")
NAME = ROLE if RANK is None else ROLE + " " + RANK
PORT = int(os.environ["DMLC_PS_ROOT_PORT"])
BY_FILE = os.environ.get("DMLC_LOCAL") == "1"
FAMILY = socket.AF_UNIX if BY_FILE else socket.AF_INET
ROOT: Any = f"/tmp/{PORT}" if BY_FILE else (os.environ["DMLC_PS_ROOT_URI"], PORT)


def report(event: str, **fields: Any) -> None:
    os.write(int(os.environ["ODSGD_REPORT_FD"]), (json.dumps(dict(fields, event=event)) + "\n").encode())


def be_scheduler() -> None:
    listener = socket.socket(FAMILY)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(ROOT)
    listener.listen(64)
    count = int(os.environ["DMLC_NUM_WORKER"]) + int(os.environ["DMLC_NUM_SERVER"])
    members = [listener.accept()[0] for _ in range(count)]
    roles = [member.recv(16) for member in members]
    for member in members:
        member.sendall(b"go")
    report("joined")
    print("joined")
    act()
    for member, role in zip(members, roles):
        if role == b"worker":
            member.recv(16)


def join() -> socket.socket:
    while True:
        link = socket.socket(FAMILY)
        try:
            link.connect(ROOT)
            break
        except OSError:
            link.close()
            time.sleep(0.02)
    link.sendall(ROLE.encode())
    assert link.recv(16) == b"go", "the scheduler has gone"
    report("joined")
    print("joined")
    return link


def act() -> None:
    default = sys.argv[1] if ROLE == "worker" and len(sys.argv) > 1 else "ok"
    deed, _, number = os.environ.get("MEMBER_" + NAME.upper().replace(" ", "_"), default).partition(" ")
    if deed == "exit":
        print("about to exit with", number, file=sys.stderr)
        sys.exit(int(number))
    elif deed == "report-and-exit":
        report("failed", error="ValueError: the loss is nan")
        os._exit(int(number))
    elif deed == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("hanging")
        time.sleep(600)
    elif deed == "wait":
        time.sleep(600)
    elif deed == "until-lost":
        wait_for_losses()
    elif deed == "children":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        print("has children")
        time.sleep(600)


def wait_for_losses() -> None:
    """Until the file of lost workers says something; print it, and the file's mode."""
    path = os.environ["ODSGD_LOST"]
    while not os.path.getsize(path):
        time.sleep(0.02)
    with open(path) as lost:
        print(f"lost {lost.read()!r}, mode {os.stat(path).st_mode & 0o777:o}")
    print("file", path)


def main() -> None:
    action = os.environ.get("MEMBER_" + NAME.upper().replace(" ", "_"))
    if action == "absent":
        return
    if action == "silent":
        time.sleep(600)
    report("connecting")
    if ROLE == "scheduler":
        be_scheduler()
        return
    link = join()
    act()
    if ROLE == "worker":
        report("done")
        link.sendall(b"bye")
    else:
        link.recv(16)


if __name__ == "__main__":
    main()
