"""What one option of a configuration is: its kind (how text becomes a value), default, unit and help, said once.

The command line, the YAML keys, the checks and the table of the docs are all derived from these fields, whether they
belong to a method (`kvstore.methods`) or to a training run (`odsgd.config`).
A kind accepts its own values unchanged, so a configuration can be checked again and again:

    >>> LENGTH.convert("2epochs"), LENGTH.convert(LENGTH.convert("2epochs"))
    (TrainingLength(count=2, unit='epochs'), TrainingLength(count=2, unit='epochs'))
"""
from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import re
from typing import Any, Callable, Optional, Tuple

from kvstore.errors import ConfigError, shown, unknown

DEFAULT_TIMEOUT_S = 600.0

LARGEST = 2 ** 31
"""Whole numbers are smaller: MXNet's seeds and sizes are C integers."""


@dataclasses.dataclass(frozen=True)
class TrainingLength:
    """A length of training in iterations or in epochs, written ``200`` (or ``200iterations``) and ``2epochs``."""

    count: int
    unit: str = "iterations"

    def iterations(self, batches_per_epoch: Optional[int] = None) -> int:
        """The same length in iterations of one worker."""
        if self.unit == "iterations":
            return self.count
        if batches_per_epoch is None:
            raise ConfigError(f"`{self}`: only a training run knows how long an epoch is; give a number of iterations")
        return self.count * batches_per_epoch

    def plain(self) -> Any:
        """The value as YAML has it; reading it back gives this TrainingLength."""
        return self.count if self.unit == "iterations" else f"{self.count}epoch{'s' * (self.count != 1)}"

    def __str__(self) -> str:
        return str(self.plain())


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a value of an option is written: the word in the help, what is expected, and the conversion.

    `convert` raises ValueError for what it does not take.
    """

    metavar: str
    expected: str
    convert: Callable[[Any], Any]


def as_text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, numbers.Integral, float)):  # NumPy's whole numbers, too
        raise ValueError
    return str(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def items(value: Any) -> Tuple[Any, ...]:
    """The items of ``[0, 2]``, ``"0,2"`` or a single ``0``."""
    if isinstance(value, (list, tuple)):
        return tuple(value)
    return tuple(part for part in as_text(value).split(",") if part.strip())


def _whole(value: Any) -> int:
    if isinstance(value, float) and not value.is_integer():
        raise ValueError
    return int(value) if isinstance(value, float) else int(as_text(value))


def _training_length(value: Any) -> TrainingLength:
    if isinstance(value, TrainingLength):
        return value
    match = re.fullmatch(r"([0-9][0-9_]{0,12}) ?(e|epochs?|iterations?)?", as_text(value).strip())
    if not match or not int(match.group(1)) < LARGEST:
        raise ValueError
    return TrainingLength(int(match.group(1)), "epochs" if (match.group(2) or "").startswith("e") else "iterations")


def _path(value: Any) -> str:
    path = as_text(value)
    if "\0" in path:
        raise ValueError
    return path


def integer(at_least: int) -> Kind:
    """A whole number, `at_least` or more, of 31 bits."""
    def convert(value: Any) -> int:
        number = _whole(value)
        if not at_least <= number < LARGEST:
            raise ValueError
        return number
    return Kind("N", f"a whole number, {at_least} or more and below 2^31", convert)


def real(at_least: float = -math.inf, above: float = -math.inf, at_most: float = math.inf,
         below: float = math.inf) -> Kind:
    """A finite number within the bounds."""
    named = {"at least": at_least, "above": above, "at most": at_most, "below": below}
    bounds = [f"{word} {bound:g}" for word, bound in named.items() if math.isfinite(bound)]

    def convert(value: Any) -> float:
        number = float(as_text(value) if isinstance(value, (str, bool)) else value)
        if not (math.isfinite(number) and at_least <= number <= at_most and above < number < below):
            raise ValueError
        return number
    return Kind("X", "a number" + (", " + " and ".join(bounds) if bounds else ""), convert)


def integers(at_least: int, length: Optional[int] = None, expected: str = "") -> Kind:
    """Several whole numbers, each `at_least` or more."""
    def convert(value: Any) -> Tuple[int, ...]:
        numbers = tuple(_whole(part) for part in items(value))
        if length not in (None, len(numbers)) or not all(at_least <= number < LARGEST for number in numbers):
            raise ValueError
        return numbers
    expected = expected or f"whole numbers, {at_least} or more, separated by commas"
    return Kind(",".join(["N"] * (length or 2)) + ("" if length else ",..."), expected, convert)


def several(kind: Kind) -> Kind:
    """Values of another kind, separated by commas."""
    def convert(value: Any) -> Tuple[Any, ...]:
        return tuple(kind.convert(part.strip() if isinstance(part, str) else part) for part in items(value))
    return Kind(f"{kind.metavar},...", f"{kind.expected}, separated by commas", convert)


def name(what: str, names: Tuple[str, ...]) -> Kind:
    """One of `names`; another gives its versions or the nearest of them (of a long list, those and not the rest)."""
    few = len(names) <= 30

    def convert(value: Any) -> str:
        if as_text(value) in names:
            return str(value)
        versions = [one for one in names if one.startswith(f"{value}_v")][:2]
        near = versions or difflib.get_close_matches(shown(value), names, n=3)
        raise unknown(what, value, names) if few or not near else ConfigError(
            f"unknown {what} `{shown(value)}`; did you mean {' or '.join(f'`{other}`' for other in near)}?")
    metavar = "NAME" if len(names) > 6 else "{" + ",".join(names) + "}"
    return Kind(metavar, f"the name of a{'n' * (what[0] in 'aeiou')} {what}", convert)


TEXT = Kind("TEXT", "text", as_text)
PATH = Kind("PATH", "a path", _path)
FLAG = Kind("", "true or false", _flag)
LENGTH = Kind("SPAN", "iterations (200) or epochs (2epochs)", _training_length)


def option(default: Any, kind: Kind, help: str, *, group: str = "Method", otherwise: str = "", result: bool = True,
           tunable: bool = False, method_specific: bool = False) -> Any:
    """A field of a configuration.

    `otherwise`: the default in words, where it is None and depends on something else.
    `result`: whether another value gives another result; a run can be resumed only with the same ones.
    `tunable`: whether another value may mend a run that diverges.
    `method_specific`: whether a value that is good for one method may be bad for another that has this option, too.
    """
    metadata = {"group": group, "kind": kind, "help": help, "otherwise": otherwise, "result": result,
                "tunable": tunable, "method_specific": method_specific}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def convert(field: dataclasses.Field[Any], value: Any, where: str) -> Any:
    """`value` as the type of `field`; `where` names the option as its user wrote it."""
    if value is None and field.default is None:
        return None
    kind: Kind = field.metadata["kind"]
    try:
        return kind.convert(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except (ValueError, TypeError, OverflowError):
        raise ConfigError(f"{where}: expected {kind.expected}, got `{shown(value)}`") from None


def plain(value: Any) -> Any:
    """The value of an option as JSON and YAML have it."""
    if hasattr(value, "plain"):
        return value.plain()
    return list(value) if isinstance(value, tuple) else value
