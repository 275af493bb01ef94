"""Command-line flags of a configuration, derived from its fields."""
from __future__ import annotations

import argparse
import dataclasses
import difflib
from typing import Any, Callable, Dict, Iterable, List, Mapping, NoReturn, Optional, Sequence, Tuple

from kvstore.errors import ConfigError, shown
from kvstore.options import FLAG, Span, convert

ALSO = {"T": "interval", "K": "pipeline-depth", "n": "updates-per-round", "m": "mean-square-decay",
        "epochs": "epoch", "momentum_local": "mom-local"}
"""Options with a second flag: words for the papers' letters, and the words of the OD-SGD authors' scripts."""

of_commands: Dict[str, Callable[[], Iterable[str]]] = {}
"""The flags of each command, for hints about one that was given to another."""


class Parser(argparse.ArgumentParser):
    """Complaints are one line, as ConfigErrors, and end with `hint`: where to read on."""

    def __init__(self, hint: str = "", **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self._hint = hint

    def parse_args(self, *arguments: Any) -> Any:  # type: ignore[override]
        known, rest = self.parse_known_args(*arguments)
        if rest:
            raise _unknown_flag(rest[0], self, self.prog)
        return known

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


def given(argv: Sequence[str], *flags: str) -> List[Optional[str]]:
    """The values of some flags, before the others are looked at."""
    parser = Parser(add_help=False)
    for flag in flags:
        parser.add_argument(flag, dest=flag)
    values = vars(parser.parse_known_args([_dashed(argument) for argument in argv])[0])
    return [values[flag] for flag in flags]


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


LIKE = 0.6
"""How like each other a flag and the one that was meant are, from 0 to 1."""

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
    return unknown_flag(argument.partition("=")[0], program, parser._option_string_actions)


def unknown_flag(flag: str, program: str, known: Iterable[str]) -> ConfigError:
    """The error for a flag that `program` does not have: the nearest that it has, or the command whose flag it is."""
    flags = {program: known, **{command: list_flags() for command, list_flags in of_commands.items()
                                if command != program}}
    alike, own, one, command = max((_likeness(flag, one), command == program, one, command)
                                   for command, its in flags.items() for one in its if "_" not in one)
    hint = "." if alike < LIKE else f"; did you mean `{one}`{'' if own else f', an option of `{command}`'}?"
    return ConfigError(f"unknown option `{shown(flag)}`{hint} `{program} --help` lists all")


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, _dashed(one).lstrip("-"), _dashed(other).lstrip("-")).ratio()
