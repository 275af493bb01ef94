"""Command-line flags of a configuration, derived from its fields."""
from __future__ import annotations

import argparse
import dataclasses
import difflib
import shutil
import textwrap
from typing import Any, Dict, Iterable, List, Mapping, NoReturn, Optional, Sequence, Tuple

from kvstore.errors import ConfigError, shown
from kvstore.options import FLAG, PATH, TEXT, TrainingLength, convert

ALSO = {"T": "interval", "K": "pipeline-depth", "n": "updates-per-round", "m": "mean-square-decay",
        "epochs": "epoch", "momentum_local": "mom-local"}
"""Options with a second flag: a word for a paper's letter, or the word of the OD-SGD authors' scripts."""

ELSEWHERE = {
    "odsgd launch": {
        **dict.fromkeys(("--nproc-per-node", "--nproc", "--np", "--num-proc", "--ntasks", "--worker", "--workers"),
                        "-n, the number of workers"),
        **dict.fromkeys(("--server", "--servers"), "-s, the number of servers"),
        **dict.fromkeys(("--nnodes", "--hosts", "--host-file", "--machinefile"), "-H FILE, a line for each host"),
        "--master-addr": "--host-ip", "--master-port": "--port", "--rdzv-endpoint": "--host-ip and --port",
        "--cluster": "--launcher", "--network-interface": "--host-ip, an address in that network"},
    "odsgd train": {
        "--learning-rate": "--lr", "--weight-decay": "--wd", "--mom": "--momentum", "--warmup-epochs": "--lr-warmup",
        "--local-optimizer": "--optimizer-local", "--network": "--model", "--disp-batches": "--log-interval",
        "--fp16": "--dtype float16", "--device": "--num-gpus or --num-cpus",
        **dict.fromkeys(("--data-path", "--rec-train", "--rec-val"), "--data-dir, a folder"),
        **dict.fromkeys(("--model-dir", "--output-dir", "--save-dir", "--logging-dir"), "--out, a folder"),
        **dict.fromkeys(("--save-frequency", "--checkpoint-interval"), "--checkpoint-every, in iterations")}}
"""Flags of torchrun, mpirun, horovodrun, srun and dmlc's tracker, of the training scripts of MXNet, GluonCV and
PyTorch, and what the command has for them."""

NEVER_EMPTY = ("gpus", "optimizer_params")
"""Lists whose flag refuses an empty value: it is an empty variable, and would be taken for the default."""

LIKE = 0.6
"""A flag that is at least this like the given one, from 0 to 1, is suggested."""


class Parser(argparse.ArgumentParser):
    """Takes flags of two words with ``-`` or ``_``. Complaints are one line, as ConfigErrors, and end with `hint`.

    `first`: the options that matter first. ``--help`` then explains these and names the others, ``--help-all`` explains
    all.
    """

    def __init__(self, hint: str = "", first: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self._hint = hint
        self._fields: Dict[str, dataclasses.Field[Any]] = {}
        self._first = first
        if first:
            self.add_argument("--help-all", action=_HelpAll, nargs=0, default=argparse.SUPPRESS,
                              help="explain all options and exit")

    def format_help(self) -> str:
        if not self._first:
            return super().format_help()
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, [], [])
        formatter.add_text(self.description)
        formatter.start_section("options that matter first")
        formatter.add_arguments(one for name in self._first for one in self._actions if one.dest == name)
        formatter.end_section()
        width = shutil.get_terminal_size().columns - 2
        for group in self._action_groups:
            names = [max(one.option_strings, key=len) for one in group._group_actions if one.option_strings
                     and one.help != argparse.SUPPRESS and one.dest not in (*self._first, "help", "help_all")]
            if names:
                title = "Others" if group is self._optionals else group.title
                formatter.add_text(textwrap.fill(f"{title}: {', '.join(names)}", width, subsequent_indent="  ",
                                                 break_on_hyphens=False))
        formatter.add_text(f"`{self.prog} --help-all` explains all of them.")
        return formatter.format_help()

    def add_fields(self, fields: Mapping[str, dataclasses.Field[Any]]) -> None:
        """A flag for each field of a configuration, in its group."""
        self._fields.update(fields)
        groups: Dict[str, Any] = {"": self}
        for field in fields.values():
            title, kind = field.metadata["group"], field.metadata["kind"]
            if title not in groups:
                groups[title] = self.add_argument_group(title)
            also = ALSO.get(field.name, "")
            flags = [*spellings(field), *(["--" + also] if also and also.replace("-", "_") not in fields else [])]
            how = ({"action": "store_const", "const": True} if kind is FLAG else
                   {"action": "append" if field.metadata.get("repeated") else "store", "metavar": kind.metavar})
            groups[title].add_argument(*flags, dest=field.name, default=argparse.SUPPRESS, **how,
                                       help=(field.metadata["help"] + _shown_default(field)).replace("%", "%%"))

    def read(self, argv: Sequence[str]) -> Dict[str, Any]:
        """The values given on a command line. Values of fields are converted."""
        values = vars(self.parse_args(argv))
        for key, value in values.items():
            field = self._fields.get(key)
            expected = PATH.expected if field is None else field.metadata["kind"].expected
            needed = expected in (PATH.expected, TEXT.expected) and (field is None or field.default is None)
            if value == "" and (needed or key in NEVER_EMPTY):
                flag = f"--{key}" if field is None else flag_of(field)
                off = "; `,` takes back what a file says" if key in NEVER_EMPTY else ""
                raise ConfigError(f"{flag}: expected {expected}, got nothing; is a variable empty?{off}")
        return {key: convert(self._fields[key], value, flag_of(self._fields[key])) if key in self._fields else value
                for key, value in values.items()}

    def parse_args(self, *arguments: Any) -> Any:  # type: ignore[override]
        known, rest = self.parse_known_args(*arguments)
        if rest:
            raise _unknown_flag(_dashed(rest[0]), self)
        return known

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message + self._hint)

    def _parse_optional(self, arg_string: str) -> Any:
        return super()._parse_optional(_dashed(arg_string))


class _Once(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, value: Any, flag: Any = None) -> None:
        if hasattr(namespace, self.dest):
            raise ConfigError(f"{flag} stands twice, with `{shown(getattr(namespace, self.dest))}` and "
                              f"`{shown(value)}`; leave one of them out")
        setattr(namespace, self.dest, value)


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any) -> None:
        assert isinstance(parser, Parser)
        parser._first = ()
        parser.print_help()
        parser.exit()


def parse_flags(fields: Mapping[str, dataclasses.Field[Any]], program: str, argv: Sequence[str],
                description: str = "", first: Sequence[str] = ()) -> Tuple[Dict[str, Any], Optional[str]]:
    """Options given on a command line, converted, and the file after ``--config``.

    `description` and `first`: for ``--help``.
    """
    parser = Parser(first=first, prog=program, usage=f"{program} [--config FILE.yaml] [--option value ...]",
                    argument_default=argparse.SUPPRESS, description=description,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", metavar="FILE", action=_Once,
                        help="YAML file with the same options, as lr_local: 0.5; flags win over it")
    parser.add_fields(fields)
    for field in fields.values():
        if field.metadata["kind"] is FLAG:  # the file may have turned it on
            parser.add_argument("--no" + flag_of(field)[1:], dest=field.name, action="store_const", const=False,
                                help=argparse.SUPPRESS)
    values = parser.read(argv)
    config_file = values.pop("config", None)
    return values, config_file


def given(argv: Sequence[str], *flags: str) -> List[Optional[str]]:
    """The values of some flags, whatever the others are."""
    parser = Parser(add_help=False)
    for flag in flags:
        parser.add_argument(flag, dest=flag)
    values = vars(parser.parse_known_args(argv)[0])
    return [values[flag] for flag in flags]


def flag_of(field: dataclasses.Field[Any]) -> str:
    """The flag of an option, as messages name it."""
    return next(flag for flag in spellings(field) if flag.startswith("--"))


def spellings(field: dataclasses.Field[Any]) -> Sequence[str]:
    return field.metadata.get("spellings") or ["--" + field.name.replace("_", "-")]


def default_of(field: dataclasses.Field[Any]) -> str:
    """The default of an option in words; empty where it says nothing."""
    value = field.default if isinstance(field.default, (str, int, float, TrainingLength)) and field.default else ""
    return field.metadata["otherwise"] or (f"{value:g}" if isinstance(value, float) else str(value))


def _shown_default(field: dataclasses.Field[Any]) -> str:
    if field.default is True:
        return f" (default; --no{flag_of(field)[1:]} turns it off)"
    return f" (default: {default_of(field)})" if default_of(field) else ""


def _dashed(argument: str) -> str:
    """``--lr_local=1e_3`` -> ``--lr-local=1e_3``: underscores of the flag, not of its value."""
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value


def _unknown_flag(argument: str, parser: Parser) -> ConfigError:
    """The error for a flag that no option has: with the nearest one, perhaps of another command."""
    program = parser.prog
    if not argument.startswith("-"):
        return ConfigError(f"unexpected argument `{argument}`: options are written --option value; "
                           f"`{program} --help` lists them")
    from odsgd.config.launch import LaunchOptions
    from odsgd.config.train import option_fields
    flags: Dict[str, Iterable[str]] = {
        "odsgd launch": map(flag_of, LaunchOptions.__dataclass_fields__.values()),
        "odsgd train": map(flag_of, option_fields().values()), program: parser._option_string_actions}
    flag = argument.partition("=")[0]
    here = ELSEWHERE.get(program, {}).get(flag)
    if here:
        return ConfigError(f"unknown option `{flag}`: here it is {here}. `{program} --help` lists all")
    alike, own, one, command = max((_likeness(flag, one), command == program, one, command)
                                   for command, its in flags.items() for one in its)
    hint = ("." if alike < LIKE else f": it is an option of `{command}`." if alike == 1 else
            f"; did you mean `{one}`{'' if own else f', an option of `{command}`'}?")
    return ConfigError(f"unknown option `{shown(flag)}`{hint} `{program} --help` lists all")


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, _dashed(one).lstrip("-"), _dashed(other).lstrip("-")).ratio()
