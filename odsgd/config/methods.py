"""The options of all methods as flags, YAML keys and rows of the docs: one of each for every name."""
from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Optional, Tuple

from kvstore.methods import METHODS, find
from kvstore.methods.common import Options
from kvstore.options import Kind, as_text, option, plain

COMMON = tuple(field.name for field in dataclasses.fields(Options))
"""Options that every method has."""

MXNETS = {**dict.fromkeys(("dist_sync", "dist_device_sync", "dist"), "ssgd"),
          **dict.fromkeys(("dist_async", "dist_device_async"), "asgd"), "device": "local"}
"""MXNet's name of a store -> ours; with a local optimizer ssgd is odsgd."""

Defaults = Dict[str, Tuple["dataclasses.Field[Any]", List[str]]]
"""By a default of an option, in words: a field with this default, and the stores that have it."""


def store_named(asked: str, optimizer_local: Optional[str]) -> str:
    """Our name of the store that a user asks for, perhaps in MXNet's words."""
    if asked in MXNETS:
        return "odsgd" if MXNETS[asked] == "ssgd" and optimizer_local is not None else MXNETS[asked]
    return find(asked, "kvstore", also=MXNETS).name


def takers(name: str) -> List[str]:
    """The stores with an option of this name."""
    return [store for store, method in METHODS.items() if name in method.option_names()]


def fields() -> Dict[str, dataclasses.Field[Any]]:
    """Name -> a field for all options of this name. Its help says what the option means to each store."""
    made = {}
    for name, by_text in meanings().items():
        found = [field for defaults in by_text.values() for field, _ in defaults.values()]
        kinds = {field.metadata["kind"].expected: field.metadata["kind"] for field in found}
        kind = next(iter(kinds.values())) if len(kinds) == 1 else Kind("X", " or ".join(kinds), as_text)
        help = "; ".join(_help(name, text, defaults) for text, defaults in by_text.items())
        made[name] = option(None, kind, help, group="Run" if name in COMMON else "Algorithm")
    named = dataclasses.make_dataclass("MethodOptions", [(name, Any, field) for name, field in made.items()])
    return {field.name: field for field in dataclasses.fields(named)}


def meanings() -> Dict[str, Dict[str, Defaults]]:
    """Every option by its name; of each, what it means, in the words of its help, and the defaults that it has then."""
    found: Dict[str, Dict[str, Defaults]] = {}
    for store, method in METHODS.items():
        for field in dataclasses.fields(method.Options):
            defaults = found.setdefault(field.name, {}).setdefault(field.metadata["help"], {})
            _, stores = defaults.setdefault(_default(field), (field, []))
            stores.append(store)
    return found


def _help(name: str, text: str, defaults: Defaults) -> str:
    """``easgd, eamsgd: what it is (default: 4)``, or with each default's stores beside it."""
    if len(defaults) > 1:
        shown = "; ".join(f"{', '.join(stores)}: {default}" for default, (_, stores) in defaults.items())
        return f"{text} (defaults: {shown})"
    (default, (_, stores)), = defaults.items()
    off = f"; --no-{name.replace('_', '-')} turns it off" if default == "true" else ""
    return f"{'' if name in COMMON else ', '.join(stores) + ': '}{text} (default: {default}{off})"


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.metadata["otherwise"] if field.default is None else plain(field.default)
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
