"""Our stores by name in MXNet: ``mx.kv.create("odsgd")``, ``gluon.Trainer(…, kvstore="odsgd")``, Module's ``fit``.

MXNet takes any name. One it does not know means its store of this process alone, and where there is one device no store
at all unless the name contains ``dist``: each worker would train by itself, in silence. So MXNet is taught our names,
and to refuse all that neither of us knows. In a job of `odsgd launch --store` its own names mean that store, too
(`choice.StandIn`). Nothing here imports MXNet; NumPy and the methods come with the first store.
"""
import functools
import importlib.machinery
import os
import sys
import types
from typing import Any, Callable, Iterable, List, Tuple

from kvstore.errors import ConfigError
from kvstore.fronts.gluon import batch
from kvstore.job import environment

MXNETS = ("local", "device", "nccl", "dist_sync", "dist_async", "dist_device_sync")
_WORDS = {"local", "update", "allreduce", "cpu", "device", "nccl", "dist", "sync", "async", "p3"}
"""MXNet's names are made of these, in any order: it looks for words in them."""

Create = Callable[..., Any]
TAUGHT = "knows_names_of_odsgd"
"""An attribute of MXNet's module, since others may wrap its functions, too."""


def install(mx: Any, create: Create) -> None:
    """Teach this MXNet our names; `create` makes the store of a name. A second call does nothing."""
    if getattr(mx.kvstore, TAUGHT, False):
        return
    setattr(mx.kvstore, TAUGHT, True)
    ours = functools.partial(_ours, mx, create)
    wrap(mx.kvstore, "create", functools.partial(_create, mx, ours))  # mx.kv is the same module
    for module in (mx.model, mx.module.module):
        wrap(module, "_create_kvstore", functools.partial(_create_for_module, mx, ours))
    wrap(mx.gluon.Trainer, "__init__", functools.partial(_init_trainer, mx, ours))
    wrap(mx.gluon.Trainer, "_init_kvstore", _init_kvstore)
    wrap(mx.gluon.trainer, "_create_sparse_kvstore", _create_sparse)
    wrap(mx.nd.NDArray, "backward", batch.backward)
    wrap(mx.autograd, "backward", batch.backward)
    wrap(mx.mod.Module, "init_optimizer", batch.init_optimizer)
    _watch_saving(mx)


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Let `around` be called in place of a function of MXNet's, which it gets as its first argument."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        return around(original, *arguments, **options)

    setattr(owner, name, wrapped)


def _watch_saving(mx: Any) -> None:
    """Every way of MXNet's to write parameters (`module_checkpoint`, `Module.save_checkpoint` take `save_params`)."""
    ways: List[Tuple[Any, str, Callable[..., Iterable[str]]]] = [
        (mx.gluon.Block, "save_parameters", lambda it, *_, **__: it.collect_params()),
        (mx.gluon.HybridBlock, "export", lambda it, *_, **__: it.collect_params()),
        (mx.gluon.ParameterDict, "save", lambda it, *_, **__: it),
        (mx.mod.BaseModule, "save_params", lambda it, *_, **__: it.get_params()[0]),
        *((module, "save_checkpoint", lambda prefix, epoch, symbol, arg_params, *_, **__: arg_params)
          for module in (mx.model, mx.callback))]
    for owner, name, names in ways:
        wrap(owner, name, functools.partial(_save, names))


def install_when_imported(create: Create) -> None:
    """`install` once MXNet is imported, with all that must be so before; until then this costs nothing."""
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == "mxnet" else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            from kvstore.engine import _before  # noqa: F401
            run(module)
            install(module, create)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    sys.meta_path.insert(0, types.SimpleNamespace(find_spec=find_spec))


def _ours(mx: Any, create: Create, store: Any, **options: Any) -> Any:
    """A store for one of our names, with options; anything else unchanged. ConfigError for an unknown name."""
    if not _is_ours(mx, store) or (options and _is_mxnets(store)):  # MXNet says that it takes no options
        return store
    if _is_mxnets(store):
        return _stand_in(create, store.lower())
    from kvstore import methods
    from kvstore.fronts import choice
    name, colon, written = store.partition(":")
    with choice.errors_in_a_job_end_it():
        methods.find(name.lower(), also=[*MXNETS, *mx.kvstore.KVStoreBase.kv_registry])
    return create(name.lower() + colon + written, **options)


def _is_ours(mx: Any, store: Any) -> bool:
    return isinstance(store, str) and store.lower() not in mx.kvstore.KVStoreBase.kv_registry \
        and (not _is_mxnets(store) or bool(environment.stand_in()))


def _is_store(store: Any) -> bool:
    """Whether this is one of our stores, and no name."""
    return type(store).__module__.startswith("kvstore.")


def _becomes_ours(mx: Any, store: Any) -> bool:
    """Whether this is one of our stores, or a name that makes one."""
    return _is_ours(mx, store) or _is_store(store)


def _is_mxnets(store: str) -> bool:
    return set(store.lower().split("_")) <= _WORDS


def _stand_in(create: Create, name: str) -> Any:
    """The job's store in place of MXNet's `name`. If `name` is for several workers, the store takes that name."""
    from kvstore.fronts import choice
    asked = choice.stand_in(environment.stand_in())
    store = create(asked.kvstore, asked.transport, **asked.in_place_of(name))
    if "dist" in name:
        store.stands_for = name
    if store.rank == 0:
        print(f"{environment.who()}: `{asked.kvstore}` in place of `{name}`, which the script asks for",
              file=sys.stderr)
    return store


def _create(mx: Any, ours: Create, original: Create, name: Any = "local", **options: Any) -> Any:
    """``mx.kv.create`` with our names."""
    store = ours(name, **options)
    if store is not name:
        return store
    idle = _idle_store()
    if idle is not None and isinstance(name, str) and "dist" in name.lower() \
            and name.lower() not in mx.kvstore.KVStoreBase.kv_registry:
        raise ConfigError(f"`{name}` is MXNet's own store, whose workers would wait for servers that this job does not "
                          f"have: it has the store `{idle.name}`; give the trainer kvstore=store")
    return original(name, **options)


def _create_for_module(mx: Any, ours: Create, original: Callable[..., Any], kvstore: Any, *arguments: Any) -> Any:
    """``mx.model._create_kvstore``, which makes Module's store, with our names.

    Where the store's type says so, Module divides its gradients by the number of workers.
    """
    if _becomes_ours(mx, kvstore):
        _check_updates("Module", None)
    store, updates = original(ours(kvstore), *arguments)
    name = getattr(store, "stands_for", None) or ""
    if "dist" in name and "_sync" in name:
        store._multiply_back()
    return store, updates


def _init_trainer(mx: Any, ours: Create, init: Callable[..., None], trainer: Any, *arguments: Any, **options: Any
                  ) -> None:
    """``Trainer.__init__``, where a trainer gets its store at once, and not with its first step."""
    init(trainer, *arguments, **options)
    asked = trainer._kvstore_params
    if _becomes_ours(mx, asked["kvstore"]):
        _check_updates("Trainer", asked["update_on_kvstore"])
        asked["update_on_kvstore"] = True  # row-sparse gradients would otherwise leave it to the name of the store
        store = asked["kvstore"] = ours(asked["kvstore"])
        store.session.lr_given = trainer._optimizer.lr  # before a schedule of the script's
        store._has_trainer = True
    else:
        _tell_alone(trainer, _idle_store())


def _init_kvstore(init: Callable[..., None], trainer: Any) -> None:
    """``Trainer._init_kvstore``, with the first step: by now a store may have been given another network."""
    optimizer, theirs = trainer._optimizer, trainer._optimizer.param_dict
    if _is_store(trainer._kvstore_params["kvstore"]):
        optimizer.param_dict = dict(enumerate(trainer._params))  # a trainer made since may share the optimizer
    try:
        init(trainer)
    finally:
        optimizer.param_dict = theirs
    _tell_alone(trainer, next((store for store in _made() if store.num_workers > 1 and not store._closed), None))


def _tell_alone(trainer: Any, beside: Any) -> None:
    """Warn once of a trainer with a store of MXNet's while `beside` has several workers; kvstore=None is no mistake."""
    asked = trainer._kvstore_params["kvstore"]
    if None in (beside, asked) or _is_store(asked) or hasattr(trainer, "_told_alone"):
        return
    trainer._told_alone = True
    beside._warn(f"a gluon.Trainer with the store `{getattr(asked, 'type', asked)}` trains a network of this worker's "
                 f"own; to train one on all workers, by `{beside.name}`, give it kvstore=store; kvstore=None "
                 "leaves it as it is, without this line")


def _create_sparse(original: Callable[..., Any], store: Any) -> Any:
    """``_create_sparse_kvstore``, which makes a Trainer's store where weights are row-sparse; ours is made already."""
    return (store, True) if _is_store(store) else original(store)


def _made() -> Iterable[Any]:
    """The stores of this process."""
    made: Any = getattr(sys.modules.get("kvstore.fronts.gluon.store"), "made", None)
    refs = () if made is None else tuple(made.data)  # at once: threads of a virtual cluster add to it
    return [store for store in (ref() for ref in refs) if store is not None]


def _idle_store() -> Any:
    """A store that has not been given a model yet; None if there is none."""
    return next((store for store in _made() if store._awaits_model), None)


def _save(names: Callable[..., Iterable[str]], save: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """A function of MXNet's that saves parameters, with a line of warning where they are one worker's own."""
    own = [store for store in _made() if store.holds_own(names(*arguments, **options))]
    if own:
        from kvstore.fronts.base import warn_of_own  # which imports MXNet
        warn_of_own(own[0].name, ", or by odsgd.callbacks")
    return save(*arguments, **options)


def _check_updates(who: str, asked: Any) -> None:
    """ConfigError where a Trainer or a Module would update the weights itself."""
    unset = asked is None
    if (os.environ.get("MXNET_UPDATE_ON_KVSTORE") == "0") if unset else not asked:
        where = "MXNET_UPDATE_ON_KVSTORE=0 in the environment" if unset else "update_on_kvstore=False"
        raise ConfigError(f"the {who} is made with {where}, and these stores update the weights themselves; leave it "
                          "out, and clip gradients before the step (gluon.utils.clip_global_norm), or have a store "
                          "without an optimizer sum them by pushpull (docs/how-to/mxnet-kvstore.md)")
