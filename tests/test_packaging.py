"""scripts/setup and its callers on machines that are not there: a PATH of stand-ins, no network, milliseconds. And the
Dockerfile, where there is no Docker: it can be read, and what it names exists.
"""
from __future__ import annotations

import os
import re
import runpy
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import pytest

from odsgd.launch.hosts import kubernetes
from tests.jobs import ROOT

TOOLS = ("sh", "dirname", "cat", "cksum", "grep", "tail", "head", "mkdir", "rm", "ln", "cp", "sed", "cut", "df", "tr",
         "mktemp", "tee")

# Answers like a Python as far as scripts/setup asks. Its environment: VERDICT (what the probe finds), PIP_STATUS and
# PIP_SAYS (what pip install does), TORCH (the versions that pip finds), PYTEST_STATUS, RUFF_STATUS, MYPY_STATUS,
# LAYERS_STATUS, SITE_STATUS, CALLS (how it was called).
PYTHON = """#!/bin/sh
echo "$*" | head -n 1 >>"$CALLS"
case "$1 $2" in
    "-c "*_base_executable*) echo "$VERDICT|$0" ;;
    "-m venv") mkdir -p .venv/bin && for name in python lint-imports; do cp "$0" ".venv/bin/$name"; done ;;
    "-m pip") case $3 in index) echo "torch (2.13.0)"; echo "Available versions: $TORCH" ;; esac
        [ "$3" != install ] || { echo "$PIP_SAYS"; exit "$PIP_STATUS"; } ;;
    "-m pytest") exit "$PYTEST_STATUS" ;;
    "-m ruff") exit "$RUFF_STATUS" ;;
    "-m mypy") exit "$MYPY_STATUS" ;;
    "--no-cache ") exit "$LAYERS_STATUS" ;;
    "-m mkdocs") exit "$SITE_STATUS" ;;
esac
"""
READY = "ready|3.9.7|"


class Machine:
    """A checkout in a folder with a space, and a PATH that holds the few tools scripts/setup may use."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a clone"
        self.bin = folder / "bin"
        self.calls_log = folder / "calls"
        for name in ("setup.py", "scripts/setup", "scripts/test", "scripts/check", ".ci/run"):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or pytest.skip(f"no {tool} here"))

    def add(self, name: str, text: str = PYTHON) -> Path:
        """Put a program on the PATH."""
        program = self.bin / name
        if program.is_symlink():
            program.unlink()
        program.write_text(text)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        return program

    def run(self, script: str = "scripts/setup", *arguments: str,
            **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a script of the checkout from another folder."""
        self.calls_log.write_text("")
        variables: Dict[str, str] = {"PATH": str(self.bin), "HOME": str(self.bin), "CALLS": str(self.calls_log),
                                     "VERDICT": READY, "PIP_SAYS": "", "TORCH": "2.13.0, 2.12.1"}
        variables.update({f"{tool}_STATUS": "0" for tool in ("PIP", "PYTEST", "RUFF", "MYPY", "LAYERS", "SITE")})
        variables.update(environment)
        return subprocess.run([str(self.root / script), *arguments], env=variables, cwd=str(self.bin),
                              capture_output=True, text=True, timeout=300)

    def copies(self) -> None:
        """Give it what .ci/run copies the tracked files with."""
        self.add("git", "#!/bin/sh\nprintf 'setup.py\\0scripts/setup\\0scripts/test\\0'")
        (self.bin / "xargs").symlink_to(shutil.which("xargs") or pytest.skip("no xargs here"))

    @property
    def calls(self) -> List[str]:
        """How the stand-in for Python was called in the last run."""
        return self.calls_log.read_text().splitlines()

    def installs(self) -> List[str]:
        """The calls of pip install in the last run."""
        return [call for call in self.calls if call.startswith("-m pip install")]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.add("python3")
    return machine


def the_error(result: subprocess.CompletedProcess[str]) -> str:
    """The one line of error; progress may stand before it."""
    assert result.returncode == 1 and result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if not line.startswith("setting up")]
    assert len(lines) == 1, result.stderr
    return lines[0]


def test_a_clone_is_set_up_once(machine: Machine) -> None:
    first = machine.run()
    assert first.returncode == 0, first.stderr
    assert first.stderr == ("setting up .venv (Python 3.9.7, once, log in .venv/setup.log): pip, packages (cpu,test),"
                            " MXNet, done.\n")
    assert machine.installs()[-1] == "-m pip install --no-build-isolation -e .[cpu,test]"
    second = machine.run()
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert machine.installs() == []


def test_of_pytorch_the_newest_cpu_build_is_installed_and_no_other(machine: Machine) -> None:
    assert machine.run("scripts/setup", "cpu,torch", TORCH="2.13.0, 2.12.1+cpu, 2.12.1, 2.11.0+cpu").returncode == 0
    assert machine.installs()[-1] == "-m pip install --no-build-isolation -e .[cpu,torch] torch==2.12.1+cpu"
    assert "has no CPU build of PyTorch" in the_error(machine.run("scripts/setup", "torch"))
    result = machine.run(".ci/run")  # goes on without it
    assert result.returncode == 0 and "its tests are skipped" in result.stderr
    assert not [call for call in machine.calls if "-k torch" in call]


def test_pytorch_alone_in_a_fresh_clone_brings_mxnet_with_it(machine: Machine) -> None:
    assert machine.run("scripts/setup", "torch", TORCH="2.12.1+cpu").returncode == 0
    assert machine.installs()[-1] == "-m pip install --no-build-isolation -e .[cpu,test,torch] torch==2.12.1+cpu"


@pytest.mark.parametrize("version, verdict", [("3.14.0", "ready"), ("3.15.0", "unfit")])
def test_tests_alone_are_set_up_without_mxnet_on_later_pythons(machine: Machine, version: str, verdict: str) -> None:
    python = machine.add("python3", PYTHON.replace("$VERDICT|$0", f"{verdict}|{version}|not 3.8 to 3.14|$0"))
    result = machine.run("scripts/test", TORCH="2.12.1+cpu", EXTRAS="torch,test")
    if verdict == "unfit":
        assert result.stderr.startswith("scripts/setup: needs a 64-bit CPython 3.8 to 3.14")
    else:
        assert machine.installs()[-1] == "-m pip install --no-build-isolation -e .[torch,test] torch==2.12.1+cpu"
        assert machine.calls[-1] == "-m pytest -n 4" and python.exists()


def test_a_changed_setup_installs_again_into_the_same_environment(machine: Machine) -> None:
    machine.run()
    with (machine.root / "setup.py").open("a") as setup:
        setup.write("# changed\n")
    assert machine.run().returncode == 0
    assert "-m venv .venv" not in machine.calls
    assert machine.installs() == ["-m pip install --no-build-isolation -e .[cpu,test]"]


def test_an_interrupted_installation_starts_afresh(machine: Machine) -> None:
    machine.run()
    (machine.root / ".venv/.odsgd/unfinished").touch()
    (machine.root / ".venv/half").touch()
    assert machine.run().returncode == 0
    assert "-m venv .venv" in machine.calls
    assert not (machine.root / ".venv/half").exists()


def test_a_repository_that_moved_is_set_up_again(machine: Machine) -> None:
    machine.run()
    machine.root = machine.root.rename(machine.root.with_name("another place"))
    assert machine.run().returncode == 0
    assert "-m venv .venv" in machine.calls


def test_a_failed_reinstallation_keeps_the_environment(machine: Machine) -> None:
    machine.run()
    original = (machine.root / "setup.py").read_text()
    (machine.root / "setup.py").write_text(original + "# changed\n")
    assert machine.run(PIP_STATUS="1", PIP_SAYS="ERROR: No matching distribution found").returncode == 1
    (machine.root / "setup.py").write_text(original)
    assert machine.run().stderr == ""


def test_a_python_without_venv_and_ensurepip_gets_an_environment_all_the_same(machine: Machine) -> None:
    result = machine.run(VERDICT="bare|3.11.2|")
    assert result.returncode == 0, result.stderr
    assert "-m venv .venv" not in machine.calls
    assert (machine.root / ".venv/bin/python").resolve() == machine.bin / "python3"
    assert f"home = {machine.bin}\n" in (machine.root / ".venv/pyvenv.cfg").read_text()


def test_a_suitable_python_behind_an_unsuitable_one_is_found(machine: Machine) -> None:
    machine.add("python3", '#!/bin/sh\necho "unfit|3.13.0|not 3.8 to 3.12|/opt/python3.13"\n')
    machine.add("python3.12", "#!/bin/sh\nexit 127\n")
    machine.add("python3.10")
    result = machine.run(VERDICT="ready|3.10.4|")
    assert result.returncode == 0 and "(Python 3.10.4," in result.stderr


def test_a_python_of_pyenv_alone_is_found(machine: Machine) -> None:
    (machine.bin / "python3").unlink()
    home = machine.bin / "home"
    folder = home / ".pyenv/versions/3.9.7/bin"
    folder.mkdir(parents=True)
    machine.add("python-of-pyenv").rename(folder / "python3")
    assert machine.run(HOME=str(home)).returncode == 0


def test_a_ready_python_is_preferred_to_a_bare_one(machine: Machine) -> None:
    machine.add("python3", PYTHON.replace("$VERDICT", "bare|3.11.2|"))
    machine.add("python3.9")
    assert "(Python 3.9.7," in machine.run().stderr


@pytest.mark.parametrize("name", [None, "python3"])
def test_no_suitable_python_is_one_line_with_what_was_found(machine: Machine, name: Optional[str]) -> None:
    if not name:
        (machine.bin / "python3").unlink()
    line = the_error(machine.run(VERDICT="unfit|3.13.0|not 3.8 to 3.12"))
    found = f"{machine.bin}/python3 3.13.0 (not 3.8 to 3.12)" if name else "no Python at all"
    assert line == ("scripts/setup: needs a 64-bit CPython 3.8 to 3.12 with ctypes, ssl and zlib; found "
                    f"{found}. Install one, or name it: PYTHON=/path/to/python {machine.root}/scripts/setup")
    assert not (machine.root / ".venv").exists()


def test_the_python_that_the_user_names_is_taken_or_refused(machine: Machine) -> None:
    machine.add("python3", "#!/bin/sh\nexit 1\n")
    mine = machine.add("mine")
    assert machine.run(PYTHON=str(mine)).returncode == 0
    assert machine.run().stderr == ""
    other = machine.add("other", '#!/bin/sh\necho "unfit|3.7.1|not 3.8 to 3.12|$0"\n')
    assert f"found {other} 3.7.1 (not 3.8 to 3.12)" in the_error(machine.run(PYTHON=str(other)))
    assert machine.run().stderr == "", "the environment that was there is gone"


def test_too_little_disk_is_one_line_before_anything_is_written(machine: Machine) -> None:
    machine.add("df", '#!/bin/sh\necho Filesystem; echo "/dev/x 9 9 307200 99% /"\n')
    assert the_error(machine.run()) == (
        f"scripts/setup: needs 1500 MB of free disk in {machine.root}, which has 300 MB."
        " Free some, or clone elsewhere.")
    assert not (machine.root / ".venv").exists()


def test_no_index_is_one_line_with_the_words_of_pip(machine: Machine) -> None:
    says = ("WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError('<pip.X object at 0x7f>:"
            " Failed to establish a new connection: [Errno 111] Connection refused')': /simple/wheel/\n"
            "ERROR: No matching distribution found for wheel")
    line = the_error(machine.run(PIP_STATUS="1", PIP_SAYS=says))
    assert line.startswith("scripts/setup: no package index can be reached; pip: 'NewConnectionError('Failed to")
    assert line.endswith(f"log: {machine.root}/.venv/setup.log)")


def test_what_pip_refuses_is_one_line_with_its_last_error(machine: Machine) -> None:
    says = "Collecting mxnet\nERROR: No matching distribution found for mxnet==1.9.1\n[notice] a new release"
    line = the_error(machine.run(PIP_STATUS="1", PIP_SAYS=says))
    assert "it says: ERROR: No matching distribution found for mxnet==1.9.1 (log: " in line


def test_an_environment_of_somebody_else_is_left_alone(machine: Machine) -> None:
    (machine.root / ".venv").mkdir()
    assert "was not made by scripts/setup" in the_error(machine.run())
    assert list((machine.root / ".venv").iterdir()) == []


def test_the_test_script_hands_on_arguments_and_status(machine: Machine) -> None:
    result = machine.run("scripts/test", "-k", "two words", PYTEST_STATUS="3")
    assert result.returncode == 3
    assert machine.calls[-1] == "-m pytest -n 4 -k two words"


@pytest.mark.parametrize("named", ["setup.py", "setup.py::test_one"])
def test_the_test_script_starts_one_process_for_a_file(machine: Machine, named: str) -> None:
    assert machine.run("scripts/test", named, "-x").returncode == 0
    assert machine.calls[-1] == f"-m pytest {named} -x"


@pytest.mark.parametrize("wrong", ["RUFF", "MYPY", "LAYERS", "SITE", ""])
def test_the_check_asks_every_tool_and_fails_if_one_complains(machine: Machine, wrong: str) -> None:
    assert machine.run("scripts/check", **{f"{wrong}_STATUS": "2"}).returncode == (1 if wrong else 0)
    assert machine.calls[-4:] == ["-m ruff check .", "-m mypy", "--no-cache", "-m mkdocs build --strict"]


@pytest.mark.parametrize("wrong, status", [({"RUFF_STATUS": "2"}, 1), ({"PYTEST_STATUS": "3"}, 3), ({}, 0),
                                           ({"RUFF_STATUS": "2", "PYTEST_STATUS": "3"}, 3)])
def test_ci_tests_as_a_newcomer_does_then_checks_and_tells_of_either(machine: Machine, wrong: Dict[str, str],
                                                                     status: int) -> None:
    machine.copies()
    done = machine.run(".ci/run", TORCH="2.12.1+cpu", TMPDIR=str(machine.bin), **wrong)
    assert done.returncode == status
    assert (f"failed with status 3: {machine.root}/scripts/test --system" in done.stdout) == (status == 3)
    assert (f"failed with status 1: {machine.root}/scripts/check" in done.stdout) == ("RUFF_STATUS" in wrong)
    tests, check, torch = map(machine.calls.index, (
        "-m pytest -n 4 --system", "-m ruff check .",
        "-m pytest -n 4 -k on_pytorch or (torch and (gluon or mxnet))"))
    assert tests < check < torch == len(machine.calls) - 1
    assert "torch" not in " ".join(machine.calls[:tests])  # as a newcomer runs them


@pytest.mark.parametrize("version", ["3.12", "3.11"])
def test_ci_runs_the_tests_without_jobs_on_another_python_if_there_is_one(machine: Machine, version: str) -> None:
    answers = PYTHON.replace('case "$1 $2" in', f'case "$1 $2" in "-c "*print*version_info*) echo {version} ;;')
    machine.add("python3.12", answers)
    machine.copies()
    done = machine.run(".ci/run", TORCH="2.12.1+cpu", TMPDIR=str(machine.bin))
    without_jobs = [call for call in machine.calls if call.endswith("tests/odsgd tests/property tests/kvstore")]
    assert done.returncode == 0 and len(without_jobs) == (version == "3.12")
    assert ("no Python 3.12 here: its tests are skipped" in done.stderr) == (version != "3.12")
    assert not list(machine.bin.glob("tmp.*"))  # the copy has gone


def packaging() -> Dict[str, Any]:
    """The arguments of setup()."""
    setuptools = pytest.importorskip("setuptools")
    arguments: Dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **kwargs: arguments.update(kwargs))
        patch.chdir(ROOT)
        runpy.run_path(str(ROOT / "setup.py"))
    return arguments


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="not the environment that scripts/setup makes")
def test_a_script_beside_the_clone_finds_the_package_and_not_the_folder(tmp_path: Path) -> None:
    (tmp_path / "odsgd").mkdir()
    script = tmp_path / "script.py"
    script.write_text("import odsgd\nprint(odsgd.__version__)\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, str(script)], env=environment, check=True, timeout=100)


def test_every_package_is_packaged() -> None:
    here = {str(path.parent.relative_to(ROOT)).replace("/", ".")
            for name in ("kvstore", "odsgd") for path in (ROOT / name).rglob("*.py")}
    assert set(packaging()["packages"]) == here


def test_both_twins_of_opencv_have_the_same_bounds() -> None:
    bounds = [line.split("'")[1] for line in (ROOT / "scripts/setup").read_text().splitlines()
              if line.startswith("opencv=")]
    assert ["opencv-python" + bound for bound in bounds] == [
        requirement.partition(";")[0] for requirement in packaging()["extras_require"]["cpu"]
        if requirement.startswith("opencv")]


def test_the_message_without_mxnet_offers_the_extras_that_exist() -> None:
    text = (ROOT / "kvstore/job/environment.py").read_text()
    others = {"mpi", "plot", "torch", "trainers", "board", "pytest", "test", "check", "docs"}
    extras = set(packaging()["extras_require"]) - others
    assert {"cpu", "cu112"} < extras
    assert [extra for extra in sorted(extras) if extra not in text] == []


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
    assert headless and any(one.startswith(f"opencv-python{headless[1]};") for one in told["extras_require"]["cpu"])


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
