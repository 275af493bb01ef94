"""Methods: what they say of themselves is true, and a user's own are found."""
import dataclasses
import importlib
import subprocess
import sys
import typing
from pathlib import Path
from typing import Type

import pytest

from kvstore import methods as algorithms
from kvstore.errors import ConfigError
from kvstore.messages.seam import GlobalWeights, Replicated, Servers
from kvstore.methods import fit
from kvstore.methods.asgd import AsyncRule
from kvstore.methods.common import CodedOptions
from kvstore.methods.contract import Method, Rule, Worker
from kvstore.options import TrainingLength
from tests import methods
from tests.jobs import ROOT, environment

EVERY = pytest.mark.parametrize("method", algorithms.METHODS.values(), ids=algorithms.METHODS)


def test_methods_are_imported_without_mxnet() -> None:
    modules = [f"kvstore.methods.{path.stem}" for path in (ROOT / "kvstore" / "methods").glob("*.py")]
    code = (f"import sys, importlib; [importlib.import_module(name) for name in {modules}]; import kvstore;"
            "sys.exit(', '.join({'mxnet', 'kvstore.engine', 'kvstore.fronts.gluon'} & set(sys.modules)) or None)")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), stderr=subprocess.PIPE)
    assert len(modules) > 10 and (done.returncode, done.stderr) == (0, b"")


# -- what they say of themselves -----------------------------------------------------------------------------------

@EVERY
def test_a_method_runs_where_its_worker_and_its_rule_do(method: Type[Method]) -> None:
    holder = typing.get_type_hints(method.worker)["weights_holder"]
    on_servers = bool({"server", "process"} & set(method.transports))
    assert method.transports and set(method.transports) <= {"server", "ring", "sharded", "process"}
    assert holder is (Servers if method.asynchronous else GlobalWeights if on_servers else Replicated)
    assert not (method.asynchronous and {"ring", "sharded"} & set(method.transports))
    assert hasattr(method, "rule") is on_servers
    if on_servers:
        assert issubclass(method.rule, AsyncRule) is method.asynchronous


@EVERY
def test_a_method_has_a_local_learning_rate_where_it_has_a_local_optimizer_and_nowhere_else(
        method: Type[Method]) -> None:
    options = method.Options()
    assert ("lr_local" in method.option_names()) is (method.local_optimizer(options) is not None)


@EVERY
def test_a_method_that_takes_plain_sgd_alone_is_not_resumed_from_the_optimizers_state(method: Type[Method]) -> None:
    assert not (method.plain_sgd and method.resumes_from_optimizer)
    assert not (method.asynchronous and method.resumes_from_optimizer)


@EVERY
def test_what_follows_from_the_options_of_a_method_is_of_use(method: Type[Method]) -> None:
    options = method.Options()
    pushes, fetches = method.intervals(options)
    assert pushes >= 1 and fetches >= 1
    traits = method.traits(options, 8)
    assert 1 <= traits.in_flight <= (8 if method.asynchronous else 1) and traits.collected >= 1
    assert traits.damped in (False, True) and (method.asynchronous or not traits.damped)
    assert traits.momentum is None or (method.plain_sgd and traits.momentum[1] == getattr(options, traits.momentum[0]))


@EVERY
def test_every_option_of_a_method_has_help_and_a_default_that_it_takes_and_can_be_read_back(
        method: Type[Method]) -> None:
    options = method.Options()
    for field in dataclasses.fields(method.Options):
        assert field.metadata["help"] and not field.metadata["help"].endswith("."), field.name
        assert field.default is not None or field.metadata["otherwise"], field.name
        assert field.default is None or field.metadata["kind"].convert(field.default) == field.default
    assert method.Options(**options.plain()) == options


@EVERY
def test_what_a_worker_and_a_rule_declare_has_a_meaning(method: Type[Method]) -> None:
    assert method.worker.returned in {"", *method.worker.arrays}
    kinds = [method.worker, method.rule] if hasattr(method, "rule") else [method.worker]
    for kind in kinds:
        assert issubclass(kind, (Worker, Rule)) and all(kind.arrays.values()), kind


def test_defaults_that_depend_on_other_options_are_filled_in() -> None:
    def filled(name: str, **options: typing.Any) -> typing.Dict[str, typing.Any]:
        return {key: value for key, value in algorithms.find(name).Options(**options).plain().items()
                if value is not None and key not in CodedOptions.__dataclass_fields__}
    assert filled("odsgd", optimizer_local="dcasgd_c") == {
        "warmup": 200, "optimizer_local": "dcasgd_c", "momentum_local": 0.0, "lamda": 0.04}
    assert filled("odsgd", optimizer_local="dcasgd_a")["lamda"] == 2.0
    assert filled("dcasgd_a") == {"lamda": 2.0, "m": 0.95, "epsilon": 1e-7}
    assert (filled("downpour"), filled("downpour", push_every=2, fetch_every=3)) == (
        {"T": 1}, {"push_every": 2, "fetch_every": 3})
    assert (filled("easgd"), filled("eamsgd", alpha=0.1)) == (
        {"T": 4, "beta": 0.9}, {"T": 4, "alpha": 0.1, "delta": 0.9})


def test_a_length_in_epochs_becomes_iterations_where_an_epoch_is_known() -> None:
    values: typing.Any = {"warmup": "2epochs"}
    options = algorithms.find("odsgd").Options(**values)
    assert options.in_iterations(7).plain()["warmup"] == 14
    with pytest.raises(ConfigError, match="`2epochs`: only a training run knows how long an epoch is"):
        options.in_iterations()
    assert options.plain()["warmup"] == TrainingLength(2, "epochs").plain()


# -- a user's own --------------------------------------------------------------------------------------------------

@pytest.mark.usefixtures("own_methods")
@pytest.mark.parametrize("ending", ["", ":Halved"])
def test_a_method_is_loaded_from_a_file(tmp_path: Path, ending: str) -> None:
    path = methods.write(tmp_path)
    loaded = algorithms.load(f"{path}{ending}")
    assert loaded.name == "halved" and algorithms.find("halved") is loaded
    assert algorithms.where(loaded) == f"{path}:Halved"
    assert algorithms.load(algorithms.where(loaded)) is loaded  # the file is executed once


@pytest.mark.usefixtures("own_methods")
def test_a_method_is_loaded_from_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    methods.write(tmp_path, name="module_of_a_method.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded = algorithms.load("module_of_a_method:Halved")
    assert algorithms.where(loaded) == "module_of_a_method:Halved" and algorithms.find("halved") is loaded


@pytest.mark.usefixtures("own_methods")
def test_a_method_is_found_by_an_entry_point_of_another_package(tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    methods.write(tmp_path, name="package_of_a_method.py")
    about = tmp_path / "halving-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: halving\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[odsgd.methods]\nhalved = package_of_a_method:Halved\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert algorithms.find("halved").name == "halved"
    with pytest.raises(ConfigError, match="unknown store `halvde`; did you mean `halved`"):
        algorithms.find("halvde")


def test_the_methods_of_this_package_are_where_servers_find_them() -> None:
    for method in algorithms.METHODS.values():
        assert algorithms.load(algorithms.where(method), trusted=False) is method


@pytest.mark.usefixtures("own_methods")
def test_a_file_of_a_sender_who_is_not_trusted_is_not_executed(tmp_path: Path) -> None:
    path = methods.write(tmp_path, f"open({str(tmp_path / 'executed')!r}, 'w').close()")
    around = f"kvstore./{'../' * 20}{path}"
    for text in (str(path), f"{path}:Halved", "subprocess:Popen", around, f"{around}:Halved",
                 "kvstore.weights.servers.__main__", "kvstore.methods.sync"):
        with pytest.raises(ConfigError, match=r"is not this package's, and this job has no secret \(ODSGD_SECRET\)"):
            algorithms.load(text, trusted=False)
    assert not (tmp_path / "executed").exists()


@pytest.mark.usefixtures("own_methods")
@pytest.mark.parametrize("text, ending, said", [
    ("x = 1", "", "expected one subclass of kvstore.methods.contract.Method, found none"),
    ("from kvstore.methods.sync import SSGD", "", "found none"),
    (methods.HALVED + "\n    class Third(Halved):\n        name = 'third'\n", "",
     "found Halved, Third; name one as file.py:Class"),
    (methods.HALVED, ":Halfed", "found none"),
])
def test_a_file_without_one_method_is_refused(tmp_path: Path, text: str, ending: str, said: str) -> None:
    path = methods.write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        algorithms.load(f"{path}{ending}")
    assert str(caught.value).startswith(f"`{path}{ending}`: ") and said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"no file `{tmp_path}/no\.py`; a method's file must lie at the same path"):
        algorithms.load(f"{tmp_path}/no.py")
    with pytest.raises(ConfigError, match="cannot import the method's module `no_such_module`"):
        algorithms.load("no_such_module:Method")


@pytest.mark.usefixtures("own_methods")
def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    path = methods.write(tmp_path, methods.HALVED.replace('"halved"', '"ssgd"'))
    with pytest.raises(ConfigError) as caught:
        algorithms.load(str(path))
    assert str(caught.value) == (f"method `ssgd` is kvstore.methods.sync:SSGD already; give {path}:Halved another "
                                 "name")
    assert algorithms.find("ssgd").__module__ == "kvstore.methods.sync"


@pytest.mark.usefixtures("own_methods")
def test_a_file_that_fails_is_executed_anew_the_next_time(tmp_path: Path) -> None:
    path = methods.write(tmp_path, "raise LookupError('not yet')")
    with pytest.raises(LookupError, match="not yet"):
        algorithms.load(str(path))
    methods.write(tmp_path)
    assert algorithms.load(str(path)).name == "halved"


@EVERY
def test_the_methods_of_this_package_have_the_form_that_a_file_is_checked_for(method: Type[Method]) -> None:
    fit.check_file(method, "here")


MISTAKES = {
    "transports = 'ring'": "transports are ring; expected a tuple of some of server, ring, sharded",
    "transports = ('sever',)": r"transports are \('sever',\); expected a tuple",
    "rule = None": "rule is None, expected a subclass of kvstore.methods.contract.Rule, which servers need; without",
    "worker = Rule": r"worker is .*Rule.*, expected a subclass of kvstore.methods.contract.Worker",
    "worker = Worker": r"Worker has no `iterate\(self, grad, step\)`",
    "rule = Rule": r"Rule has no `receive\(self, header, grad, w\)`",
    "transport = ('ring',)": "has `transport`, which nothing reads; did you mean `transports`",
    "takes = 'weight'": "takes is weight; expected gradients or weights",
    "takes = 'weights'": "takes = \"weights\" and `outer_sgd` go together",
    "Options = dict": "Options is not a dataclass of options",
    "Options = __import__('dataclasses').make_dataclass('Options', [('period', int, 4)], bases=(SSGD.Options,), "
    "frozen=True)": "option `period` has no kind and help; write `period: ... = option",
    "name = 3": "the method has no name",
}
OF_A_WORKER = {
    "def iterate(self, grad): pass": r"Wrong.iterate takes \(self, grad\), expected \(self, grad, step\)",
    "def itterate(self, grad, step): pass": "Wrong has `itterate`, which nothing reads; did you mean `iterate`",
    "arrays = ['v']": r"arrays of Wrong are \['v'\], expected names with meanings",
    "def global_weights(self): pass": r"Wrong.global_weights takes \(self\), expected \(self, step\)",
    "facts = ('count')": "facts of Wrong are count, expected a tuple of names",
    "returned = 'w'": "Wrong returns `w`, which is not one of its `arrays`",
}


@pytest.mark.usefixtures("own_methods")
@pytest.mark.parametrize("line, said", [
    *MISTAKES.items(), *((f"class Wrong(Synchronous):\n        {line}\n"
                          "    worker = Wrong", said) for line, said in OF_A_WORKER.items())])
def test_a_mistake_in_a_method_is_one_line_when_its_file_is_loaded(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "mistaken.py"
    path.write_text("from kvstore.methods.contract import Rule, Worker\nfrom kvstore.methods.sync import SSGD, "
                    f"Synchronous\n\n\nclass Mine(SSGD):\n    name = 'mine'\n    {line}\n")
    with pytest.raises(ConfigError, match=said) as caught:
        algorithms.load(str(path))
    assert str(caught.value).startswith(f"{path}:Mine: ") and "\n" not in str(caught.value)
