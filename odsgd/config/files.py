"""Files that others have written, read no further than they can be good for."""
from __future__ import annotations

from pathlib import Path
from typing import Any, Union

import yaml

from kvstore.errors import ConfigError, shown

YAML_NBYTES, YAML_DEPTH, YAML_SCALAR = 1 << 18, 20, 4096


def read_text(path: Union[str, Path], what: str, most_nbytes: int, encoding: str = "utf-8-sig") -> str:
    """The text of a file; ConfigError if it cannot be read, is larger than `what` ever is, or is no text."""
    try:
        with open(path, "rb") as file:
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
    """Safe, and with neither aliases, of which a few lines can stand for more than a machine holds, nor deep nests."""

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


def read_yaml_file(path: str) -> Any:
    """What a YAML file holds."""
    text = read_text(path, "a configuration in YAML", YAML_NBYTES)
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError,
            RecursionError) as error:  # PyYAML's constructors raise whatever int(), datetime and dicts do
        raise ConfigError(f"`{shown(path)}` is not YAML: {shown(' '.join(str(error).split()))}") from None
