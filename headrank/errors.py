"""Mistakes that the user can mend are one line and exit code 2: in files and values, and in the call itself."""

from __future__ import annotations

import argparse
from typing import NoReturn


class InputError(ValueError):
    """Bad input from outside: a file, a parameter, a checkpoint.

    The message is one line that names the place (file and line, or parameter), the value found and the remedy. Commands
    print it without a traceback and exit with code 2; library callers can catch it, also as the ValueError it is.
    """


class OneLineParser(argparse.ArgumentParser):
    """A parser that says what is wrong with a call; argparse's own prints the whole usage before it."""

    def error(self, message: str) -> NoReturn:
        """Say it and exit with 2."""
        self.exit(2, f"{self.prog}: {message}; see '{self.prog} --help'\n")
