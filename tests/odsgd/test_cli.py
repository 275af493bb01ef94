"""The command ``odsgd``: dispatch, help, and how a mistake ends."""
import importlib
import re
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Callable, List, Tuple, Type

import pytest

from kvstore.errors import ConfigError, LacksError
from kvstore.job import ending
from odsgd.cli import COMMANDS, main
from odsgd.config.train import TrainConfig
from odsgd.launch.command import check_command

ROOT = Path(__file__).parents[2]


def test_help_shows_the_commands_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "train" in shown and "launch" in shown and "odsgd launch -n 2" in shown
    assert f"odsgd report {TrainConfig.from_flags(['--dataset', 'digits']).out} " in shown


def test_no_command_is_bad_usage_and_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 64
    assert "usage: odsgd" in capsys.readouterr().out


def test_output_that_nobody_reads_is_no_traceback() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "reproduction"), "--list"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert (process.wait(300), process.stderr.read()) == (128 + signal.SIGPIPE, "")


def test_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("odsgd ")


def test_an_unknown_command_gets_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lanch"]) == 64
    error = capsys.readouterr().err
    assert error.startswith("odsgd: unknown command `lanch`; did you mean `launch`? Known: ") and error.count("\n") == 1


def test_the_command_that_reproduces_the_papers_is_said_to_be_in_a_checkout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--list"]) == 64
    assert capsys.readouterr().err == (
        "odsgd: `reproduce` is run from a checkout of the repository: scripts/reproduce --help\n")


@pytest.mark.parametrize("words, told", [
    (["train", "--lr-locl", "1"], "odsgd train: unknown option `--lr-locl`; did you mean `--lr-local`?"),
    (["watch", "--onc"], "odsgd watch: unknown option `--onc`; did you mean `--once`?"),
    (["report", "runs", "--tabel"], "odsgd report: unknown option `--tabel`; did you mean `--table`?"),
    (["launch", "--nproc_per_node", "2"], "odsgd launch: unknown option `--nproc-per-node`: here it is -n, the number"),
    (["launch", "--cluster", "ssh"], "odsgd launch: unknown option `--cluster`: here it is --launcher."),
    (["launch", "--servers=2"], "odsgd launch: unknown option `--servers`: here it is -s, the number of servers."),
    (["train", "--learning_rate", "1"], "odsgd train: unknown option `--learning-rate`: here it is --lr."),
    (["train", "--dataset", "digits", "--epochs", "1"],
     "odsgd train: `odsgd` needs a job of workers and servers. To start one here: `odsgd launch -n 2 -s 1 odsgd train "
     "--dataset digits --epochs 1`"),
    (["train", "--kvstore", "local", "--out", "/dev/null/run"],
     "odsgd train: --out /dev/null/run: Not a directory on "),
    (["trace", "summary", "x", "--hostfile", "y"],
     "odsgd trace: unknown option `--hostfile`: it is an option of `odsgd launch`.")])
def test_every_command_tells_the_nearest_option(words: List[str], told: str,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 64
    error = capsys.readouterr().err
    assert error.startswith(told) and error.count("\n") == 1


@pytest.mark.parametrize("words", [[name] for name in COMMANDS] + [[], ["train", "-all"], ["launch", "-all"]])
def test_help_fits_a_terminal_of_80_columns(words: List[str], capsys: pytest.CaptureFixture[str],
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*words[:1], "--help" + "".join(words[1:])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= (75 if not words[1:] else 400)
    if words in (["train"], ["train", "-all"]):
        assert any("--optimizer-local" in line for line in lines)
        assert any("learning rate of the global weights" in line for line in lines)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_main(name: str) -> None:
    assert callable(importlib.import_module(COMMANDS[name][0]).main)


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Callable[..., int]) -> None:
    module = types.ModuleType(name)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)


def test_train_runs_the_resolved_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = []

    def run(config: TrainConfig) -> int:
        ran.append(config)
        return 7
    stand_in(monkeypatch, "odsgd.training.loop", run=run)
    monkeypatch.setenv("DMLC_PS_ROOT_URI", "127.0.0.1")  # as in a worker of a job
    assert main(["train", "--kvstore", "dist_sync", "--epochs", "3", "--out", str(tmp_path)]) == 7
    assert (ran[0].kvstore, ran[0].epochs) == ("ssgd", 3)


def test_launch_gets_the_rest_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "odsgd.launch.command", main=lambda argv: len(argv))
    assert main(["launch", "-n", "2", "--help"]) == 3


@pytest.mark.parametrize("kind, code", [(ConfigError, 64), (LacksError, 70)])  # another host may have it
def test_a_setting_that_turns_out_not_to_work_is_one_line_too(
        kind: Type[ConfigError], code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
        capsys: pytest.CaptureFixture[str]) -> None:
    def run(config: object) -> int:
        raise kind("no GPU 0 on this machine")
    stand_in(monkeypatch, "odsgd.training.loop", run=run)
    assert main(["train", "--kvstore", "local", "--out", str(tmp_path)]) == code
    assert capsys.readouterr().err == "odsgd train: no GPU 0 on this machine\n"


def test_an_interruption_is_one_line_but_for_a_process_of_a_job(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # a store of an earlier test may have left its own

    def run(config: object) -> int:
        signal.raise_signal(signal.SIGINT)
        return 0
    stand_in(monkeypatch, "odsgd.training.loop", run=run)
    words = ["train", "--kvstore", "local", "--out", str(tmp_path)]
    assert main(words) == 130
    assert capsys.readouterr().err == "odsgd train: interrupted\n"
    ending.die_of_errors()
    with pytest.raises(KeyboardInterrupt):
        main(words)


@pytest.mark.parametrize("command", [
    ["odsgd", "train"], ["/usr/bin/odsgd", "train"], ["python", "-m", "odsgd", "train"], ["scripts/train.py"],
    [sys.executable, "scripts/train.py"]], ids=" ".join)
def test_a_launcher_can_check_the_workers_command(command: List[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check_command([*command, "--lr", "1"])
    with pytest.raises(ConfigError, match="unknown option `--lrr`"):
        check_command([*command, "--lrr", "1"])


@pytest.mark.parametrize("command", ["train.py --lrr 1", "python my/train.py --lrr 1", "odsgd", "python", "ls train"])
def test_commands_of_others_are_not_ours_to_check(command: str) -> None:
    check_command(command.split())


@pytest.mark.parametrize("command", [[str(ROOT / "scripts" / "train.py")], ["-m", "odsgd", "train"]])
def test_the_other_ways_to_start_it_are_the_same(command: List[str]) -> None:
    done = subprocess.run([sys.executable, *command, "--lrr", "1"], cwd=ROOT, capture_output=True, text=True,
                          timeout=300)
    assert (done.returncode, done.stderr.split(";")[0]) == (64, "odsgd train: unknown option `--lrr`")


def test_another_kvstore_in_the_place_of_ours_is_named(tmp_path: Path) -> None:
    (tmp_path / "kvstore.py").write_text("VALUE = 1")
    assert ends_with(f"sys.path.insert(0, '{tmp_path}')", "import odsgd")[1] == (
        f"ImportError: {tmp_path}/kvstore.py is not odsgd's kvstore; rename it, or take its folder out of PYTHONPATH")


def ends_with(*lines: str) -> Tuple[int, str]:
    """Exit code and last line of a Python that runs these lines."""
    code = "\n".join(["import sys", f"sys.path.insert(0, {str(ROOT)!r})", *lines])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stderr.splitlines()[-1]


def test_what_is_not_installed_is_a_line_that_says_what_to_install(tmp_path: Path) -> None:
    train = f"sys.exit(odsgd.cli.main(['train', '--kvstore', 'local', '--out', '{tmp_path}/run']))"
    code, line = ends_with("import odsgd.cli", "sys.modules['mxnet'] = None", train)
    assert code == 70 and line == (
        "odsgd train: MXNet is not installed: in a clone of odsgd pip install '.[cpu]', or for GPUs '.[cu112]' "
        "(also cu110, cu102, cu101, cu100), on Linux x86-64 with Python 3.8 to 3.12 "
        f"(this is {sys.version.split()[0]}); a later Python trains with PyTorch "
        "(odsgd.torch)")
    assert ends_with("import os, odsgd, kvstore", "sys.modules['mxnet'] = None", "os.environ['ODSGD_REPORT_FD'] = '2'",
                     "os.environ['DMLC_PS_ROOT_URI'] = '127.0.0.1'", "kvstore.create('local')")[0] == 70
    (tmp_path / "mxnet.py").write_text("import numpy; numpy.PZERO")
    code, line = ends_with(f"sys.path.insert(0, '{tmp_path}')", "import numpy, odsgd.cli",
                           "numpy.__version__ = '2.0.1'", train)
    assert (code, line) == (70, "odsgd train: MXNet 1.9.1 needs NumPy 1, and here is 2.0.1: pip install 'numpy<2'")
    for name, needed in (("huggingface", "transformers"), ("lightning", "lightning")):
        _, line = ends_with("sys.modules.update({'odsgd.torch': sys, '%s': None})" % needed, f"import odsgd.{name}")
        assert f"odsgd.{name} needs {needed}: pip install {needed} (" in line
    _, line = ends_with("sys.modules['torch'] = None", "import odsgd.huggingface")
    assert line == "ModuleNotFoundError: PyTorch 2.1 or newer is not installed; pip install 'torch>=2.1'"


def test_hints_name_what_an_index_has_as_setup_py_asks_for_it() -> None:
    wanted = (ROOT / "setup.py").read_text(encoding="utf-8")
    files = [*(ROOT / "kvstore").rglob("*.py"), *(ROOT / "odsgd").rglob("*.py")]
    hints = {hint for path in files for words in re.findall(r"pip install ((?:'[^'{}]+' ?)+)", path.read_text("utf-8"))
             for hint in re.findall("'([^']+)'", words)}
    assert {"mpi4py>=4.1", "torch>=2.1", ".[cpu]"} <= hints
    assert not [hint for hint in hints if not hint.startswith(".[") and f'"{hint.partition(",")[0]}' not in wanted]
