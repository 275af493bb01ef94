"""A wheel, installed outside the checkout: it says what it is, and trains."""
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

from kvstore._version import BUILT_FROM, VERSION, commit
from tests.jobs import ROOT

SOURCES = ("setup.py", "MANIFEST.in", "CHANGELOG.md", "pyproject.toml", "README.md", "LICENSE", "kvstore", "odsgd")


def run(*command: object, cwd: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_wheel_trains_outside_a_checkout_and_names_its_version_and_commit(tmp_path: Path) -> None:
    source, venv = tmp_path / "source", tmp_path / "venv"
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(str(ROOT / name), str(source / name))
    run("git", "init", "-q", cwd=source)
    run("git", "add", ".", cwd=source)
    run("git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "all", cwd=source)
    built_from = run("git", "rev-parse", "--short", "HEAD", cwd=source).strip()
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, source,
        cwd=tmp_path)
    wheel, = tmp_path.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    packages = next(venv.glob("lib/python3*/site-packages"))
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))  # a checkout's own .pth is not read there
    run(venv / "bin/python", "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel, cwd=tmp_path)

    odsgd = venv / "bin/odsgd"
    assert run(odsgd, "--version", cwd=tmp_path) == f"odsgd {VERSION} (commit {built_from})\n"
    assert str(packages) in run(venv / "bin/python", "-c", "import odsgd; print(odsgd.__file__)", cwd=tmp_path)
    assert all((packages / name / "py.typed").is_file() for name in ("kvstore", "odsgd"))
    metadata = next(packages.glob("odsgd-*.dist-info/METADATA")).read_text(encoding="utf-8")
    assert {"Summary", "License", "Requires-Python", "Description-Content-Type"} <= set(
        re.findall(r"^([\w-]+): ", metadata, re.MULTILINE)) and "# odsgd" in metadata
    run(odsgd, "launch", "-n", 2, "-s", 1, odsgd, "train", "--dataset", "digits", "--kvstore", "odsgd",
        "--iterations", 8, "--out", "run", cwd=tmp_path)
    assert "test accuracy" in run(odsgd, "report", "run", cwd=tmp_path)


def test_an_sdist_has_what_a_wheel_is_built_from_and_no_part_of_the_tests(tmp_path: Path) -> None:
    for name in SOURCES:
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_one.py").touch()
    run(sys.executable, "setup.py", "-q", "sdist", cwd=tmp_path)
    with tarfile.open(next(tmp_path.glob("dist/*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {*SOURCES, "odsgd/py.typed", "odsgd/lab/advise/measured.json"} <= names
    assert not [name for name in names if name.startswith("tests")]
    assert (f"kvstore/{BUILT_FROM}" in names) == bool(commit()), "known in a checkout alone"


def test_the_changelog_begins_with_this_version_and_a_tag_of_this_commit_is_its() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heading = re.search(r"^## (\S+) — \d{4}-\d\d-\d\d$", text, re.MULTILINE)
    assert heading and heading[1] == VERSION
    assert len(text[heading.end():].split("\n## ")[0].strip().splitlines()) <= 25
    tags = run("git", "tag", "--points-at", "HEAD", cwd=ROOT).split() if (ROOT / ".git").exists() else []
    assert [tag for tag in tags if tag.startswith("v")] in ([], [f"v{VERSION}"])
