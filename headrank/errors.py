"""Mistakes that the user can mend are one line and exit code 2: in files and values, and in the call itself."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterator
from typing import Any, NoReturn


class InputError(ValueError):
    """Bad input from outside: a file, a parameter, a checkpoint.

    The message is one line that names the place (file and line, or parameter), the value found and the remedy. It
    writes parameters as a Python caller knows them, in backticks: `max_words`. Commands print it in the words of their
    flags (``OneLineParser.in_flags``), without a traceback, and exit with code 2; library callers can catch it, also as
    the ValueError it is.
    """


def first_line(error: BaseException) -> str:
    """What an exception says, on one line."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


class OneLineParser(argparse.ArgumentParser):
    """A parser that says what is wrong with a call; argparse's own prints the whole usage before it."""

    def in_flags(self, message: str) -> str:
        """A library's message for somebody at the command line: `max_words` becomes --max-words, where this parser
        has the flag.
        """
        known = set(_options_of(self))

        def flag(found: re.Match[str]) -> str:
            name = found[1].replace("_", "-")
            # a query or a file name may hold backticks too: only what the parser knows is a parameter
            return next((option for option in (f"--{name}", f"--headrank-{name}") if option in known), found[0])

        return re.sub(r"`([a-z][a-z_]*)`", flag, message)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """A flag's value; an InputError of its type function keeps its words, where argparse has its own."""
        try:
            return self._registry_get("type", action.type, action.type)(arg_string)
        except InputError:
            raise
        except (argparse.ArgumentTypeError, TypeError, ValueError):
            return super()._get_value(action, arg_string)  # says what is wrong, as argparse does

    def error(self, message: str) -> NoReturn:
        """Say it and exit with 2."""
        # without argparse's usage, which hides the one line that matters
        self.exit(2, f"{self.prog}: {message}{self._nearest(message)}; see '{self.prog} --help'\n")

    def _nearest(self, message: str) -> str:
        """; did you mean --depth? after a misspelt flag or choice; '' where nothing is near."""
        wrong = re.search(r"invalid choice: '(.+?)' \(choose from (.+)\)|unrecognized arguments: (--[a-z-]+)", message)
        if wrong is None:
            return ""
        known = re.findall(r"'(.+?)'", wrong[2]) if wrong[2] else list(_options_of(self))
        near = difflib.get_close_matches(wrong[1] or wrong[3], known, 1, cutoff=0.75)
        return f"; did you mean {near[0]}?" if near else ""


def _options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Every flag of a parser and of its actions ('prepare', 'run', ...)."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _options_of(inner)
