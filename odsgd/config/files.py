"""Files that others have written: read up to a bound, with complaints in one line."""
import os
import re
from pathlib import Path
from typing import Any, Type, Union

import yaml

from kvstore.errors import ConfigError, shown
from odsgd.virtual import description
from odsgd.virtual.description import VirtualCluster

YAML_NBYTES, YAML_DEPTH, YAML_SCALAR = 1 << 18, 20, 4096


def read_text(path: Union[str, Path], what: str, most_nbytes: int, encoding: str = "utf-8-sig") -> str:
    """The text of a file; ConfigError if it cannot be read, is too large for `what`, or is no text."""
    try:
        with open(os.path.expanduser(path), "rb") as file:
            content = file.read(most_nbytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read `{shown(path)}`, {what}: {why}") from None
    if len(content) > most_nbytes:
        raise ConfigError(f"`{shown(path)}`: more than {most_nbytes} bytes; expected {what}")
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise ConfigError(f"`{shown(path)}` is no text: byte {error.start} is {content[error.start]:#04x}; expected "
                          f"{what}") from None


class _Loader(yaml.SafeLoader):
    """Refuses aliases (a few lines of them can stand for more than a machine holds), deep nests, and a key that stands
    twice (YAML would take the last)."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias (`*name`); write the value again")
        self.depth += 1
        if self.depth > YAML_DEPTH:
            raise yaml.YAMLError(f"more than {YAML_DEPTH} levels")
        if self.check_event(yaml.ScalarEvent):
            scalar = self.peek_event()  # type: ignore[no-untyped-call]
            if len(scalar.value) > YAML_SCALAR:  # PyYAML takes long to make a number of many digits
                raise yaml.YAMLError(f"a value of more than {YAML_SCALAR} characters")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        mapping, seen = super().construct_mapping(node, deep), set()
        for key, _ in node.value:
            label = self.construct_object(key, deep=True)
            if label in seen:
                raise yaml.YAMLError(f"`{label}` stands twice, in line {key.start_mark.line + 1}; leave one out")
            seen.add(label)
        return mapping


INTEGER, DATE = "tag:yaml.org,2002:int", "tag:yaml.org,2002:timestamp"


class OptionsLoader(_Loader):
    """Whole numbers have decimal digits, as after a flag. YAML 1.1 would make 8 of ``010``, 90 of ``1:30``, and a
    number or a date of a folder ``2026_11_29`` or ``2026-11-29``; here they are text, and the option's kind says what
    it takes."""

    yaml_implicit_resolvers = {
        first: [(tag, regexp) for tag, regexp in resolvers if tag not in (INTEGER, DATE)]
        for first, resolvers in _Loader.yaml_implicit_resolvers.items()}


OptionsLoader.add_implicit_resolver(INTEGER, re.compile("[-+]?(0|[1-9][0-9]*)$"), list("-+0123456789"))


def read_cluster(path: str, **given: Any) -> VirtualCluster:
    """The cluster that a YAML file describes; errors name the file and the key. `given` wins over the file."""
    values = read_yaml_file(path, "the description of a cluster in YAML", OptionsLoader)
    try:
        return description.of({} if values is None else values, **given)
    except ConfigError as error:
        raise ConfigError(f"`{shown(path)}`: {error}") from None


def read_yaml_file(path: str, what: str = "a configuration in YAML", loader: Type[_Loader] = _Loader) -> Any:
    text = read_text(path, what, YAML_NBYTES)
    try:
        return yaml.load(text, loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError,
            RecursionError) as error:  # PyYAML's constructors raise whatever int(), datetime and dicts do
        raise ConfigError(f"`{shown(path)}` is not YAML: {shown(' '.join(str(error).split()))}") from None
