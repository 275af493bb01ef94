"""The Dockerfile, where there is no Docker: it can be read, and what it names exists."""
import re
import shutil
import subprocess
from typing import List, Tuple

import pytest

from odsgd.launch.hosts import kubernetes
from tests.jobs import ROOT
from tests.test_packaging import packaging

TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
LINES = re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE).replace("\\\n", " ").split("\n")
INSTRUCTIONS: List[Tuple[str, str]] = [(line.partition(" ")[0], line.partition(" ")[2]) for line in LINES if line]


def those(word: str) -> List[str]:
    return [rest for name, rest in INSTRUCTIONS if name == word]


def test_it_has_known_instructions_and_its_commands_are_a_shells() -> None:
    assert {word for word, _ in INSTRUCTIONS} == {"ARG", "FROM", "RUN", "COPY", "ENV", "WORKDIR", "CMD"}
    for command in those("RUN"):
        checked = subprocess.run(["sh", "-n", "-c", command], capture_output=True, text=True, timeout=300)
        assert checked.returncode == 0, checked.stderr


def test_what_it_copies_and_installs_exists() -> None:
    for sources in those("COPY"):
        assert all((ROOT / source).exists() for source in sources.split()[:-1]), sources
    told = packaging()
    extras = re.search(r"/src\[\$\{MXNET\},(.*?)\]", TEXT)
    assert extras and set(extras[1].split(",")) <= set(told["extras_require"])
    assert set(re.findall(r"MXNET=(\w+)", TEXT)) == {"cpu", "cu112"} <= set(told["extras_require"])
    headless = re.search(r'opencv-python-headless(.*?)"', TEXT)
    assert headless and "opencv-python" + headless[1] in told["install_requires"]


def test_no_index_is_named_and_its_command_is_a_pods() -> None:
    assert "://" not in TEXT
    assert those("CMD") == [f'["python3", "-m", "{kubernetes.MODULE}"]']


def test_the_packages_of_the_distribution_are_known() -> None:
    if not shutil.which("apt-cache"):
        pytest.skip("no apt-cache here")
    words = those("RUN")[0].partition("--no-install-recommends")[2].partition("&&")[0].split()
    asked = subprocess.run(["apt-cache", "show", *words], capture_output=True, text=True, timeout=300)
    known = set(re.findall(r"^Package: (.*)$", asked.stdout, re.MULTILINE))
    if not known:
        pytest.skip("apt has no lists of packages here")
    assert set(words) <= known
