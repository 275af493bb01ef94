"""The tunnel process of this host: its agent starts, watches and ends it."""
import contextlib
import functools
import math
import os
import signal
import subprocess
import sys
import time
from typing import List

from odsgd.launch import linux
from odsgd.launch.messages import Beats, Channel, HostWarning, Message, Noise, OpenRemoteSockets, TunnelOrders
from odsgd.launch.policy.liveness import KERNEL_STATES, warn_s

ENDED_WITHIN_S = 1.0


class TunnelProcess:
    """Passes messages between the launcher and the tunnel (`tunnel.py`)."""

    def __init__(self, orders: TunnelOrders, launcher: Channel) -> None:
        goes_on = functools.partial(linux.die_with, os.getpid(), signal.SIGCONT)  # a stopped tunnel sees our end
        self.popen = subprocess.Popen([sys.executable, *linux.python_words("odsgd.launch.connections.tunnel")],
                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True,
                                      preexec_fn=goes_on)
        assert self.popen.stdin and self.popen.stdout
        self.channel = Channel(self.popen.stdout.fileno(), self.popen.stdin.fileno())
        self.channel.send(orders)
        self.files: List[str] = []  # that a killed tunnel leaves behind
        self._launcher, self._hang_timeout_s = launcher, orders.hang_timeout_s
        self._heard_at = time.monotonic()
        self._spoke = self._warned = False

    def send(self, message: Message) -> None:
        """Pass on what the launcher says."""
        if isinstance(message, OpenRemoteSockets):
            self.files += [socket.name for socket in message.sockets if os.path.isabs(socket.name)]
        self.channel.send(message)

    def read(self) -> None:
        """Pass on what the tunnel says. If it has ended, hang up, so that no process is blamed for its own end."""
        self._heard_at, self._spoke = time.monotonic(), True
        for message in self.channel.receive():
            if not isinstance(message, Beats):
                self._launcher.send(message)
        if not self.channel.open:
            self._launcher.send(Noise("odsgd agent: the tunnel of this host has ended"))
            self._launcher.close()

    def watch(self) -> None:
        """Kill a tunnel that is silent for too long. Before its first word only a stopped one is silent."""
        if not self.channel.open:
            return
        now = time.monotonic()
        state = linux.state(self.popen.pid)
        if not self._spoke and state not in ("T", "t"):
            self._heard_at = now
        silent_s = now - self._heard_at
        if silent_s > (self._hang_timeout_s or math.inf):
            self.popen.kill()
        elif silent_s > warn_s(self._hang_timeout_s) and not self._warned:
            self._warned = True
            text = f"its tunnel has not answered for {silent_s:.0f} s"
            self._launcher.send(HostWarning(f"{text}: {KERNEL_STATES[state]}" if state in KERNEL_STATES else text))

    def close(self) -> None:
        """Hang up: the tunnel then removes its sockets and ends."""
        assert self.popen.stdin
        self.popen.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(ENDED_WITHIN_S)
