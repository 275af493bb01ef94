"""The options of all methods as flags, YAML keys and rows of the docs: one of each for every name."""
from __future__ import annotations

import dataclasses
from typing import Any, Dict, List

from kvstore.algorithms import METHODS
from kvstore.algorithms.method import Options
from kvstore.options import Kind, as_text, option, plain

COMMON = tuple(field.name for field in dataclasses.fields(Options))
"""Options that every method has."""


def takers(name: str) -> List[str]:
    """The stores with an option of this name."""
    return [store for store, method in METHODS.items() if name in method.option_names()]


def fields() -> Dict[str, dataclasses.Field[Any]]:
    """Name -> a field that stands for the options of this name. Its help says what each store makes of it."""
    made = {}
    for name, variants in _variants().items():
        kinds = {field.metadata["kind"].expected: field.metadata["kind"] for field in variants}
        kind = next(iter(kinds.values())) if len(kinds) == 1 else Kind("X", " or ".join(kinds), as_text)
        stores = {text: "" if name in COMMON else ", ".join(its) + ": " for text, its in _texts(variants).items()}
        made[name] = option(None, kind, "; ".join(stores[text] + text for text in stores),
                            group="Run" if name in COMMON else "Algorithm")
    return {field.name: field for field in dataclasses.fields(dataclasses.make_dataclass(
        "MethodOptions", [(name, Any, field) for name, field in made.items()]))}


def table() -> str:
    """The Markdown table of docs: option, stores, default, value, meaning."""
    rows = ["| option | stores | default | value | meaning |", "|---|---|---|---|---|"]
    for name, variants in _variants().items():
        for stores in _texts(variants).values():
            field = next(field for field, its in variants.items() if its[0] == stores[0])
            listed = "all" if name in COMMON else ", ".join(f"`{store}`" for store in stores)
            rows.append(f"| `{name}` | {listed} | {_default(field, '`')} | {field.metadata['kind'].expected} | "
                        f"{field.metadata['help']} |")
    return "\n".join(rows) + "\n"


def _variants() -> Dict[str, Dict[dataclasses.Field[Any], List[str]]]:
    """Name of an option -> the fields of that name, each with its stores."""
    found: Dict[str, Dict[dataclasses.Field[Any], List[str]]] = {}
    for store, method in METHODS.items():
        for field in dataclasses.fields(method.Options):
            found.setdefault(field.name, {}).setdefault(field, []).append(store)
    return found


def _texts(variants: Dict[dataclasses.Field[Any], List[str]]) -> Dict[str, List[str]]:
    """Help and default -> the stores of which they are true."""
    texts: Dict[str, List[str]] = {}
    for field, stores in variants.items():
        texts.setdefault(f"{field.metadata['help']} (default: {_default(field)})", []).extend(stores)
    return texts


def _default(field: dataclasses.Field[Any], quote: str = "") -> str:
    if field.default is None:
        return str(field.metadata["otherwise"])
    value = plain(field.default)
    return quote + (str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float)
                    else str(value)) + quote
