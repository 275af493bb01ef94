"""Kinds of options that only a training run has."""
import dataclasses
import re
from typing import Any, Dict

import yaml

from kvstore.errors import ConfigError, shown
from kvstore.options import LARGEST, Kind, as_text, integers, items
from odsgd.virtual.description import DRAWS, TIME


@dataclasses.dataclass(frozen=True)
class Compute:
    """How long an emulated accelerator computes per iteration, written ``200ms`` or ``0.2s,lognormal:0.1``.

    `spread` : sigma of the lognormal distribution of that time, whose mean is `seconds`; 0: always the same
    """

    seconds: float
    spread: float = 0.0

    def plain(self) -> str:
        """The value as YAML has it; reading it back gives this Compute."""
        return f"{1000 * self.seconds:.12g}ms" + (f",lognormal:{self.spread:.12g}" if self.spread else "")

    __str__ = plain


def _compute(value: Any) -> Compute:
    if isinstance(value, Compute):
        return value
    time, comma, draws = as_text(value).partition(",")
    seconds, drawn = TIME.convert(time), DRAWS.convert(draws if comma else "constant")
    if not 0 < seconds < LARGEST or drawn.kind not in ("constant", "lognormal"):
        raise ValueError
    return Compute(float(seconds), *drawn.values)


BOOLEANS: Dict[str, bool] = yaml.SafeLoader.bool_values
"""true, yes, on and their opposites."""


def keyword_value(value: Any) -> Any:
    """A number or truth value where a text is one; YAML 1.1 takes ``1e-4`` for a string, so floats are tried first."""
    if not isinstance(value, str):
        return value
    for convert in (int, float):
        try:
            return convert(value)
        except ValueError:
            pass
    return BOOLEANS.get(value.strip().lower(), value)


def _keywords(value: Any) -> Dict[str, Any]:
    if isinstance(value, dict):
        if not all(isinstance(one, (str, int, float)) for one in value.values()):
            raise ValueError
        return {str(key): keyword_value(v) for key, v in value.items()}
    pairs = [str(part).partition("=") for part in items(value)]
    if not all(key.strip().isidentifier() and equals for key, equals, _ in pairs):
        raise ValueError
    found: Dict[str, Any] = {}
    for key, _, text in pairs:
        if key.strip() in found:
            raise ConfigError(f"`{shown(key.strip())}` stands twice; leave one of them out")
        found[key.strip()] = keyword_value(text.strip())
    return found


def _umask(value: Any) -> str:
    if not re.fullmatch("0?0[0-7]{2}", as_text(value)):
        raise ValueError
    return str(value)


UMASK = Kind("MASK", "three octal digits, the first 0, e.g. 027", _umask)
COMPUTE = Kind("TIME", "a time (200ms, 0.2s), perhaps with a spread (200ms,lognormal:0.2)", _compute)
KEYWORDS = Kind("K=V,...", "keywords as key=value,key=value", _keywords)
SHAPE = integers(1, length=3, expected="channels,height,width, e.g. 3,32,32")
