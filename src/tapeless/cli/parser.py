"""The command line's parser: one-line errors with the hint that helps, and a --help of the common options alone.

Tested by: tests/cli/test_main.py, tests/cli/test_other_names.py."""

import argparse
import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from tapeless.config import nearest, preset_names
from tapeless.config.other_names import COMMAND_NAMES, other_name
from tapeless.errors import UNKNOWN_FLAG, WRONG_TYPE, UsageError

EXACT = 2**53  # up to here every whole number is a float
FLAG = re.compile(r"--[a-z][\w-]*")


def integer(text: str) -> int:
    """Also 1e3, where that is exact."""
    try:
        return int(text)
    except ValueError:
        value = float(text)
        if not value.is_integer() or abs(value) > EXACT:
            raise
        return int(value)


class HelpAll(argparse.Action):
    def __call__(self, parser: Any, *_: object) -> None:
        parser.shows_all = True
        parser.print_help()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """argparse, but an unknown flag is an error with a hint, and only common options are in --help."""

    def __init__(self, **options: object):
        super().__init__(allow_abbrev=False, **options)  # type: ignore[arg-type]
        self.register("type", int, integer)
        self.shows_all = False  # also the options that are marked `advanced`

    def format_help(self) -> str:
        hidden = [] if self.shows_all else [action for action in self._actions if getattr(action, "advanced", False)]
        shown, epilog = [action.help for action in hidden], self.epilog
        if hidden:
            self.epilog = f"{len(hidden)} more options: {self.prog} --help-all"
        for action in hidden:
            action.help = argparse.SUPPRESS
        text = super().format_help()
        self.epilog = epilog
        for action, help in zip(hidden, shown, strict=True):
            action.help = help
        return text

    def error(self, message: str) -> NoReturn:
        if unknown := re.match(r"unrecognized arguments: (--?[\w.-]+)", message):
            raise UNKNOWN_FLAG(flag=unknown[1], nearest=self._hint(unknown[1]), program=self.prog)
        if stray := re.match(r"unrecognized arguments: (.*)", message):
            raise UsageError(f"{message}; {self._place_of(stray[1].split()[0])} (see {self.prog} --help)")
        if wrong := re.match(r"argument (--[\w-]+)\S*: invalid (\w+) value: '(.*)'$", message):
            raise WRONG_TYPE(name=wrong[1], expected=wrong[2], got=wrong[3])
        if command := re.match(r"argument (COMMAND|ACTION): invalid choice: '(.*?)'", message):
            raise UsageError(f"{self.prog} {command[2]}: no such command; {self._command(command[2])} (see {self.prog} --help)")
        if message.endswith("required: ACTION"):
            message += f": {', '.join(self._commands())}"
        elif message.endswith("required: RUN"):
            message += f", a run's directory {_runs_here()}"
        raise UsageError(f"{message} (see {self.prog} --help)")

    def parse_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """As argparse's, but an unknown flag is reported by the command it was given to, which knows the valid ones, or stored
        in `passed_on` by a command that passes it to another program."""
        namespace, rest = self.parse_known_args(args, namespace)
        if hasattr(namespace, "passed_on"):
            namespace.passed_on = rest
        elif rest:
            command = getattr(namespace, "parser", self)
            command.error(f"unrecognized arguments: {' '.join(rest)}")
        return namespace

    def _flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings if "_" not in flag]

    def _hint(self, flag: str) -> str:
        """What to give instead of an unknown flag: its name here, the command that has it, or the nearest one."""
        own, known = self._flags(), other_name(flag)
        if known is not None:
            wanted = FLAG.search(known)
            owners = [] if wanted is None or wanted[0] in own else owners_of(wanted[0])
            return known + (f", of `{owners[0]}`" if owners else "")
        plain = flag.replace("_", "-")
        if owners := owners_of(plain):
            return f"{plain} is a flag of `{owners[0]}`"
        last = plain.rpartition(".")[2].lstrip("-")
        if f"--{last}" in own:
            return f"did you mean '--{last}'?"
        close = get_close_matches(plain.lstrip("-"), [name.lstrip("-") for name in own], n=1, cutoff=0.7)
        return f"did you mean '--{close[0]}'?" if close else "no flag of this command is similar"

    def _place_of(self, word: str) -> str:
        """Which flag a word may have been meant for."""
        own = self._flags()
        if "--preset" in own and word in preset_names():
            return f"did you mean --preset {word}?"
        if "--config" in own and word.endswith(".toml"):
            return f"did you mean --config {word}?"
        if "--dataset-path" in own:
            return f"did you mean --dataset-path {word}? One path, a directory or a pattern in quotes, such as '*.txt'"
        if any(action.metavar == "SOURCE" for action in self._actions):
            return "SOURCE is one path: a directory, or a pattern in quotes, such as '*.txt'"
        return "leave it out"

    def _commands(self) -> list[str]:
        return [name for action in self._actions if isinstance(action.choices, dict) for name in action.choices]

    def _command(self, word: str) -> str:
        names = self._commands()
        if word in COMMAND_NAMES:
            return f"did you mean `tapeless {COMMAND_NAMES[word]}`?"
        if "new" in names and not get_close_matches(word, names, cutoff=0.7):
            return f"did you mean `{self.prog} new`? The others are {', '.join(names[1:])}"
        return nearest(word, names)


def owners_of(flag: str) -> list[str]:
    """The commands that have a flag."""
    from tapeless.cli.main import build_parser

    def leaves(parser: Parser) -> Iterator[Parser]:
        inner = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        for choices in inner:
            for command in choices.values():
                yield from leaves(command)
        if not inner:
            yield parser

    return [parser.prog for parser in leaves(build_parser()) if flag in parser._flags()]


def _runs_here() -> str:
    """The newest run below runs/, as an example."""
    found = [path.parent for path in Path("runs").glob("*/config.toml")]
    return f"such as {max(found, key=lambda run: run.stat().st_mtime)}" if found else "that `tapeless train new` made"
