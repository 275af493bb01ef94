"""Programs of the distribution, for tests that run them for real; with `--system` what is missing is installed."""
from __future__ import annotations

import os
import shutil
import subprocess
from typing import Dict, List

import pytest

PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])
INSTALLED_WITHIN_S, UPDATED_WITHIN_S = 240.0, 20.0
HURRIED = ["-o", "Acquire::Retries=0", "-o", "Acquire::http::Timeout=5", "-o", "DPkg::Lock::Timeout=60"]
system = False
"""Whether tests may change this machine (`scripts/test --system`)."""
_refused: List[str] = []
"""Why nothing can be installed here, once that is known: it is not tried again."""


def provide(programs: Dict[str, str]) -> Dict[str, str]:
    """Paths of these programs by name, each given with its package. A test that lacks one is skipped."""
    missing = {name: package for name, package in programs.items() if not shutil.which(name, path=PATH)}
    if missing:
        why = (_refused or [_why_not()])[0] or _install(sorted(set(missing.values())))
        if why:
            _refused[:] = [why]
            pytest.skip(f"no {', '.join(missing)} here ({', '.join(missing.values())}), and {why}")
    return {name: str(shutil.which(name, path=PATH)) for name in programs}


def ask(what: str) -> None:
    """Skip the test unless `what`, which changes this machine, has been asked for."""
    if not system:
        pytest.skip(f"{what}: only with --system")


def _why_not() -> str:
    if not system:
        return "it is installed with --system only"
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return "only root can install it, by apt-get"
    if os.path.isdir("/run/systemd/system"):
        return "to install it would start services of this machine"
    return ""


def _install(packages: List[str]) -> str:
    """Empty, or why it has failed. The lists of packages may be old, or not be there at all."""
    install = ["install", "-y", "--no-install-recommends", *packages]
    return _apt(install, INSTALLED_WITHIN_S) and (
        _apt(["update"], UPDATED_WITHIN_S) or _apt(install, INSTALLED_WITHIN_S))


def _apt(words: List[str], within_s: float) -> str:
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}  # no service is started
    try:
        done = subprocess.run(["apt-get", "-q", *HURRIED, *words], env=env, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=within_s)
    except subprocess.TimeoutExpired:
        return f"apt-get {words[0]} has not ended within {within_s:g} s"
    return f"apt-get {words[0]} says: {(done.stdout.splitlines() or ['nothing'])[-1]}" if done.returncode else ""
