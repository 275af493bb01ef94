#!/usr/bin/env python3
"""Write the lists of options in docs/reference/configuration.md and docs/how-to/virtual.md anew, from the fields that
declare them."""
import dataclasses
import json
import sys
import textwrap
from pathlib import Path
from typing import Any, Dict, Mapping, Sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvstore.options import plain
from odsgd.config import methods
from odsgd.config.flags import default_of, spellings
from odsgd.config.launch import LaunchOptions
from odsgd.config.train_options import TrainOptions
from odsgd.virtual import description

ROOT = Path(__file__).resolve().parents[2]
VIRTUAL = ROOT / "docs" / "how-to" / "virtual.md"
PAGE = ROOT / "docs" / "reference" / "configuration.md"


def entry(names: str, facts: Sequence[str], meaning: str) -> str:
    """An item of a list, its lines as long as the others of a page."""
    known = "; ".join(fact for fact in facts if fact)
    parts = (f"- {names}" + f" ({known})" * bool(known) + f": {meaning}").split("`")
    text = "`".join(part if number % 2 else part.replace("[", r"\[") for number, part in enumerate(parts))  # no links
    return textwrap.fill(text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def run_list() -> str:
    """The options of a run that are no method's."""
    rows = []
    for field in dataclasses.fields(TrainOptions):
        default = "" if field.default in (None, (), dataclasses.MISSING) else f"`{plain(field.default)}`"
        default = default.replace("`True`", "`true`").replace("`False`", "`false`") or field.metadata["otherwise"]
        rows.append(entry(f"`{field.name}`", [field.metadata["kind"].expected, default and f"default {default}"],
                          field.metadata["help"]))
    return "\n".join(rows) + "\n"


def launch_list() -> str:
    """The options of `odsgd launch`."""
    rows = []
    for field in dataclasses.fields(LaunchOptions):
        flags = ", ".join(f"`{flag}`" for flag in spellings(field))
        kind = field.metadata["kind"]
        value = kind.expected if kind.metavar else ""
        default = default_of(field)
        rows.append(entry(flags, [value, default and f"default {default}"], field.metadata["help"]))
    return "\n".join(rows) + "\n"


def method_list() -> str:
    """The options of all methods, a row for each meaning and default."""
    rows = []
    for name, meanings in methods.meanings().items():
        for text, defaults in meanings.items():
            for default, (field, stores) in defaults.items():
                listed = "all stores" if name in methods.COMMON else ", ".join(f"`{store}`" for store in stores)
                shown = default if field.default is None else f"`{default}`"
                rows.append(entry(f"`{name}`", [listed, field.metadata["kind"].expected, shown and f"default {shown}"],
                                  text))
    return "\n".join(rows) + "\n"


def key_list() -> str:
    """The keys of a virtual cluster, those of its parts with the part before them."""
    rows = []
    parts: Dict[str, Any] = {"": description.VirtualCluster}
    parts.update({f"{key}.": kind for key, kind in description.PARTS.items()})
    for prefix, kind in parts.items():
        for field in dataclasses.fields(kind):
            if "kind" in field.metadata:
                default = plain(field.default) if field.default_factory is dataclasses.MISSING else "none"
                shown = f"{default:.3g}" if isinstance(default, float) else default
                rows.append(entry(f"`{prefix}{field.name}`", [field.metadata["kind"].expected, f"default {shown}"],
                                  field.metadata["help"]))
    rows.append(entry("`hosts`", ["hosts by name, each with keys of `links`"], "links that differ from the others"))
    return "\n".join(rows) + "\n"


def described(page: str) -> str:
    """docs/how-to/virtual.md with its list as it should be."""
    return put(page, "<!-- description -->", f"\n{key_list()}\n")


def written(page: str) -> str:
    """The page with its lists as they should be."""
    for name, items in (("run", run_list()), ("methods", method_list()), ("launch", launch_list())):
        page = put(page, f"<!-- {name}: written by scripts/maintain/docs_tables.py -->", f"\n{items}\n")
    return page


def put(page: str, mark: str, text: str) -> str:
    """The page with a text between its mark and the next end."""
    before, begin, rest = page.partition(f"{mark}\n")
    _, end, after = rest.partition("<!-- end -->")
    if not (begin and end):
        raise SystemExit(f"expected `{mark}` in the page, and `<!-- end -->` behind it")
    return f"{before}{begin}{text}{end}{after}"


def put_into(path: Path, mark: str, text: str) -> None:
    """The same in the file of a page."""
    path.write_text(put(path.read_text(encoding="utf-8"), mark, text), encoding="utf-8")


def by_line(content: Mapping[str, Any]) -> str:
    """JSON with a line for each entry of the tables and lists in `content`."""
    def block(value: Any) -> str:
        if isinstance(value, dict):
            return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(one)}" for key, one in value.items()) + "\n }"
        if isinstance(value, list):
            return "[\n" + ",\n".join(f"  {json.dumps(one)}" for one in value) + "\n ]"
        return json.dumps(value)

    return "{\n" + ",\n".join(f" {json.dumps(name)}: {block(value)}" for name, value in content.items()) + "\n}\n"


if __name__ == "__main__":
    VIRTUAL.write_text(described(VIRTUAL.read_text(encoding="utf-8")), encoding="utf-8")
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
