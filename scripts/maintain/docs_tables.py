#!/usr/bin/env python3
"""Write the tables of options in docs/reference/configuration.md and docs/how-to/virtual.md anew, from the fields that
declare them."""
import dataclasses
import re
import sys
from pathlib import Path
from typing import Any, Dict, Sequence

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvstore.options import plain  # noqa: E402  (the path comes first)
from odsgd.config import launch, methods  # noqa: E402
from odsgd.config.flags import default_of, spellings  # noqa: E402
from odsgd.config.train import own_fields  # noqa: E402
from odsgd.virtual import description  # noqa: E402

VIRTUAL = ROOT / "docs" / "how-to" / "virtual.md"
PAGE = ROOT / "docs" / "reference" / "configuration.md"
HEAD = ["| option | default | value | meaning |", "|---|---|---|---|"]
HEAD_OF_METHODS = ["| option | stores | default | value | meaning |", "|---|---|---|---|---|"]


def run_table(fields: Sequence["dataclasses.Field[Any]"]) -> str:
    """The options of a run that are no method's."""
    rows = []
    for field in fields:
        default = "" if field.default in (None, (), dataclasses.MISSING) else f"`{plain(field.default)}`"
        default = default.replace("`True`", "`true`").replace("`False`", "`false`") or field.metadata["otherwise"]
        rows.append(f"| `{field.name}` | {default} | {field.metadata['kind'].expected} | {field.metadata['help']} |")
    return "\n".join([*HEAD, *rows]) + "\n"


def launch_table() -> str:
    """The options of `odsgd launch`."""
    rows = []
    for field in launch.fields().values():
        flags = ", ".join(f"`{flag}`" for flag in spellings(field))
        kind = field.metadata["kind"]
        value = kind.expected if kind.metavar else ""
        rows.append(f"| {flags} | {default_of(field)} | {value} | {field.metadata['help']} |")
    return "\n".join([*HEAD, *rows]) + "\n"


def method_table() -> str:
    """The options of all methods, a row for each meaning and default."""
    rows = []
    for name, meanings in methods.meanings().items():
        for text, defaults in meanings.items():
            for default, (field, stores) in defaults.items():
                listed = "all" if name in methods.COMMON else ", ".join(f"`{store}`" for store in stores)
                shown = default if field.default is None else f"`{default}`"
                rows.append(f"| `{name}` | {listed} | {shown} | {field.metadata['kind'].expected} | {text} |")
    return "\n".join([*HEAD_OF_METHODS, *rows]) + "\n"


def key_table() -> str:
    """The keys of a virtual cluster, those of its parts with the part before them."""
    rows = []
    parts: Dict[str, Any] = {"": description.VirtualCluster}
    parts.update({f"{key}.": kind for key, kind in description.PARTS.items()})
    for prefix, kind in parts.items():
        for field in dataclasses.fields(kind):
            if "kind" in field.metadata:
                default = plain(field.default) if field.default_factory is dataclasses.MISSING else "none"
                shown = f"{default:.3g}" if isinstance(default, float) else default
                rows.append(f"| `{prefix}{field.name}` | {shown} | {field.metadata['kind'].expected} | "
                            f"{field.metadata['help']} |")
    rows.append("| `hosts` | none | hosts by name, each with keys of `links` | links that differ from the others |")
    return "\n".join(["| key | default | value | meaning |", "|---|---|---|---|", *rows]) + "\n"


def described(page: str) -> str:
    """docs/how-to/virtual.md with its table as it should be."""
    return re.sub(r"(<!-- description -->\n).*?(<!-- end -->)", lambda match: match[1] + key_table() + match[2], page,
                  flags=re.DOTALL)


def written(page: str) -> str:
    """The page with its tables as they should be."""
    for name, table in (("run", run_table(own_fields())), ("methods", method_table()), ("launch", launch_table())):
        page, count = re.subn(rf"(<!-- {name}: .*? -->\n).*?(<!-- end -->)",
                              lambda match, table=table: match[1] + table + match[2], page, flags=re.DOTALL)  # type: ignore[misc]
        if count != 1:
            raise SystemExit(f"{PAGE}: expected one table `{name}`, found {count}")
    return page


if __name__ == "__main__":
    VIRTUAL.write_text(described(VIRTUAL.read_text(encoding="utf-8")), encoding="utf-8")
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
