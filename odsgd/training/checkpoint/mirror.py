"""A second place for checkpoints, so that the loss of a disk is not the loss of a run: a folder, or one on a host.

It has the layout of a run's `checkpoints`. A file is there under its name when all of it is there, and the manifest
comes last. On a host the folder is reached by ssh, which asks for nothing there but a shell and coreutils.
"""
import contextlib
import functools
import os
import re
import shlex
import shutil
import subprocess
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterator, List, Optional

from kvstore.errors import ConfigError, KVStoreError, shown
from kvstore.job import environment
from kvstore.job.aside import BackgroundThread
from odsgd.launch.hosts.ssh import ssh
from odsgd.training.checkpoint import disk, manifests
from odsgd.training.checkpoint.disk import flush_folder, remove_for_good, replacing
from odsgd.training.checkpoint.manifests import FILES, MANIFEST

COPIED_WITHIN_S = 1800.0
"""One file; a host that has gone is noticed by ssh after 45 s."""
CONNECTED_WITHIN_S = 20


class MirrorError(KVStoreError):
    """Something was not copied to the second place, or not brought back."""


class CheckpointMirror:
    """A folder. Its copies are made in order, on one thread; a process that ends does not wait for it."""

    def __init__(self, folder: str) -> None:
        self._folder, self._made = folder, False
        self._thread = BackgroundThread("the second place of checkpoints", most=0)
        self._aside: List[Future[None]] = []

    def later(self, call: Callable[..., None], *arguments: Any) -> "Future[None]":
        """Call it beside the training."""
        future: Future[None] = Future()
        self._thread.do(functools.partial(_settle, future, call, *arguments))
        return future

    def aside(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call it beside the training; `failures` says whether it failed."""
        self._aside.append(self.later(call, *arguments))

    def failures(self, within_s: float = 0.0) -> List[str]:
        """What has gone wrong aside since the last call; waits at most `within_s` for copies that are under way."""
        done, under_way = futures.wait(self._aside, within_s)
        errors = [one.exception() for one in self._aside if one in done]
        self._aside = [one for one in self._aside if one in under_way]
        late = [f"not done within {within_s:g} s"] if self._aside and within_s else []
        return [f"the second place of checkpoints: {error}" for error in [*filter(None, errors), *late]]

    def put(self, path: Path, iteration: int) -> None:
        """Copy a file there. The folder is made once: if it has gone since, so has the disk that it was on."""
        target = Path(self._folder) / str(iteration) / path.name
        _copy(path, target, parents=not self._made)
        self._made = True

    def get(self, iteration: int, name: str, path: Path) -> None:
        """Copy a file of a checkpoint back."""
        _copy(Path(self._folder) / str(iteration) / name, path, parents=True)

    def holds(self, name: str = "") -> List[int]:
        """The checkpoints that have a file of this name; without one, all that have a folder."""
        rest = f"/{name}" if name else ""
        numbers = re.findall(rf"/([0-9]{{1,15}}){re.escape(rest)}$", self._paths(rest), re.MULTILINE)
        return sorted(map(int, numbers))

    def _paths(self, rest: str) -> str:
        """A line for each path FOLDER/* followed by `rest`."""
        return "\n".join(map(str, Path(self._folder).glob(f"*{rest}")))

    def uncount(self, iteration: int) -> None:
        """Remove a checkpoint's manifest for good, if it is there."""
        remove_for_good(Path(self._folder) / str(iteration) / MANIFEST)

    def remove(self, iteration: int) -> None:
        """Remove a checkpoint's files, the manifest before the others, and its folder, if nothing else is in it."""
        manifests.remove(Path(self._folder) / str(iteration))


class RemoteMirror(CheckpointMirror):
    """A folder on another host."""

    def __init__(self, host: str, folder: str) -> None:
        super().__init__(folder)
        words = ssh(environment.secure(), CONNECTED_WITHIN_S)
        program = shutil.which(words[0])
        if program is None:
            raise ConfigError(f"checkpoint_to: {words[0]} is not a program on this machine; install ssh, or name a "
                              "folder")
        self._ssh, self._host = [program, *words[1:], host], host

    def put(self, path: Path, iteration: int) -> None:
        folder, target = self._path(iteration), self._path(iteration, path.name)
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size  # ssh may end in between, which `cat` there cannot tell from the end
            there = f"test -d {shlex.quote(self._folder)} && " * self._made
            self._run(f"umask 077 && {there}mkdir -p {folder} && cat >{target}.tmp && "
                      f"test $(wc -c <{target}.tmp) -eq {size} && sync {target}.tmp && "
                      f"mv {target}.tmp {target} && sync {folder} {folder}..", stdin=file)
        self._made = True

    def get(self, iteration: int, name: str, path: Path) -> None:
        with replacing(path) as temporary, open(temporary, "wb") as file:
            self._run(f"cat {self._path(iteration, name)}", stdout=file)

    def _paths(self, rest: str) -> str:
        return self._run(f"ls -d {shlex.quote(self._folder)}/*{rest} 2>/dev/null || true")

    def uncount(self, iteration: int) -> None:
        folder, manifest = self._path(iteration), self._path(iteration, MANIFEST)
        self._run(f"test ! -d {folder} || {{ rm -f {manifest} && sync {folder}; }}")

    def remove(self, iteration: int) -> None:
        folder, manifest = self._path(iteration), self._path(iteration, MANIFEST)
        there = self._run(f"test ! -d {folder} || {{ rm -f {manifest} && sync {folder} && ls {folder}; }}").splitlines()
        names = " ".join([MANIFEST, *filter(FILES.fullmatch, there)])
        self._run(f"test ! -d {folder} || (cd {folder} && rm -f {names}) && (rmdir {folder} 2>/dev/null || true)")

    def _path(self, iteration: int, name: str = "") -> str:
        return shlex.quote(f"{self._folder}/{iteration}/{name}")

    def _run(self, line: str, stdin: Optional[BinaryIO] = None, stdout: Optional[BinaryIO] = None) -> str:
        """Run a line of the shell there. Without a fork of this process (`close_fds`), which MXNet would wait for."""
        try:
            ran = subprocess.run([*self._ssh, line], stdin=stdin or subprocess.DEVNULL, close_fds=False,
                                 stdout=stdout or subprocess.PIPE, stderr=subprocess.PIPE, timeout=COPIED_WITHIN_S)
        except subprocess.TimeoutExpired:
            raise MirrorError(f"{self._host} did not take it within {COPIED_WITHIN_S:g} s") from None
        if ran.returncode:
            said = ran.stderr.decode("utf-8", "replace").strip().splitlines()
            raise MirrorError(f"{self._host}:{self._folder}: ssh ended with exit code {ran.returncode}"
                             + (f": {shown(said[-1])}" if said else ""))
        return (ran.stdout or b"").decode("utf-8", "replace")


@contextlib.contextmanager
def held(second: Optional[CheckpointMirror], rank: int) -> Iterator[None]:
    """Keep other jobs out meanwhile, as from a run's folder; not on another host, nor where nothing can be written."""
    with contextlib.ExitStack() as stack:
        if second is not None and not isinstance(second, RemoteMirror):
            with contextlib.suppress(OSError):
                stack.enter_context(disk.held(Path(second._folder), rank))
        yield


def _copy(source: Path, target: Path, parents: bool) -> None:
    try:
        target.parent.mkdir(parents=parents, exist_ok=True)
        with replacing(target) as temporary:
            shutil.copyfile(source, temporary)
        flush_folder(target.parent.parent)
    except OSError as error:
        raise MirrorError(f"cannot copy `{source}` to `{target}`: {error.strerror}") from None


def _settle(future: "Future[None]", call: Callable[..., None], *arguments: Any) -> None:
    try:
        call(*arguments)
        future.set_result(None)
    except BaseException as error:  # whoever waits for the future reports it
        future.set_exception(error)


def mirror_at(place: Optional[str]) -> Optional[CheckpointMirror]:
    """The place that an option names: ``FOLDER``, or ``[USER@]HOST:FOLDER``."""
    if not place:
        return None
    host, colon, folder = place.partition(":")
    if not colon or "/" in host:
        return CheckpointMirror(place)
    at_home = folder == "~" or folder.startswith("~/")  # where ssh begins
    return RemoteMirror(host, (folder[2:] if at_home else folder) or ".")
