"""Command-line flags of a configuration, derived from its fields."""
from __future__ import annotations

import argparse
import dataclasses
from typing import Any, Dict, Mapping, NoReturn, Optional, Sequence, Tuple

from kvstore.errors import ConfigError, unknown
from kvstore.options import FLAG, Span, convert

ALSO = {"T": "interval", "K": "pipeline-depth", "n": "updates-per-round", "m": "mean-square-decay",
        "epochs": "epoch", "momentum_local": "mom-local"}
"""Options with a second flag: words for the papers' letters, and the words of the OD-SGD authors' scripts."""


class Parser(argparse.ArgumentParser):
    """Complaints are one line, as ConfigErrors, and end with `hint`: where to read on."""

    def __init__(self, hint: str = "", **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self._hint = hint

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message + self._hint)


def parse_flags(fields: Mapping[str, dataclasses.Field[Any]], program: str, argv: Sequence[str],
                description: Optional[str] = None) -> Tuple[Dict[str, Any], Optional[str]]:
    """Options given on a command line, converted, and the file after ``--config``.

    Every flag of two words may be written with ``-`` or ``_``. `description`: what ``--help`` says first, by default
    of training.
    """
    parser = _parser(fields, program, description or _TRAINING)
    known, rest = parser.parse_known_args([_dashed(argument) for argument in argv])
    if rest:
        raise _unknown_flag(rest[0], parser, program)
    values = vars(known)
    config_file = values.pop("config", None)
    return {key: convert(fields[key], value, "--" + key.replace("_", "-"))
            for key, value in values.items()}, config_file


def given(argv: Sequence[str], flag: str) -> Optional[str]:
    """The value of one flag, before the others are looked at."""
    parser = Parser(add_help=False)
    parser.add_argument(flag, dest="value")
    value: Optional[str] = parser.parse_known_args([_dashed(argument) for argument in argv])[0].value
    return value


def _parser(fields: Mapping[str, dataclasses.Field[Any]], program: str, description: str) -> Parser:
    parser = Parser(prog=program, usage=f"{program} [--config FILE.yaml] [--option value ...]",
                    argument_default=argparse.SUPPRESS, description=description,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", metavar="FILE", help="YAML file with the same options (lr_local: 0.5); flags win")
    groups: Dict[str, Any] = {}
    for field in fields.values():
        title = field.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        also = ALSO.get(field.name, "")
        _add(groups[title], field, ["--" + also] if also and also.replace("-", "_") not in fields else [])
    return parser


_TRAINING = """\
Train a Gluon model with one-step-delay SGD, synchronously, or asynchronously, on MXNet's parameter server. Start
it on several workers with `odsgd launch -n WORKERS -s SERVERS odsgd train ...`; alone it takes `--kvstore local`.
Flags may be written with - or _ (--lr-local, --lr_local)."""


def _add(group: Any, field: dataclasses.Field[Any], also: Sequence[str]) -> None:
    flag, kind = "--" + field.name.replace("_", "-"), field.metadata["kind"]
    help = (field.metadata["help"] + _shown_default(field)).replace("%", "%%")
    if kind is FLAG:
        group.add_argument(flag, dest=field.name, action="store_const", const=True, help=help)
        group.add_argument("--no" + flag[1:], dest=field.name, action="store_const", const=False,
                           help=argparse.SUPPRESS)
    else:
        group.add_argument(flag, *also, dest=field.name, metavar=kind.metavar, help=help)


def _shown_default(field: dataclasses.Field[Any]) -> str:
    default = field.default
    if default is True:
        return f" (default; --no-{field.name.replace('_', '-')} turns it off)"
    shown = default if isinstance(default, (str, int, float, Span)) and default is not False else None
    return f" (default: {shown or field.metadata['otherwise']})" if shown or field.metadata["otherwise"] else ""


def _dashed(argument: str) -> str:
    """``--lr_local=1e_3`` -> ``--lr-local=1e_3``: underscores of the flag, not of its value."""
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value


def _unknown_flag(argument: str, parser: Parser, program: str) -> ConfigError:
    if not argument.startswith("-"):
        return ConfigError(f"unexpected argument `{argument}`: options are written --option value; "
                           f"`{program} --help` lists them")
    return unknown("option", argument.partition("=")[0], parser._option_string_actions,
                   listed=f"`{program} --help` lists all")
