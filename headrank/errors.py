"""The one exception that means "the user can mend this": shown as one line, exit code 2."""

from __future__ import annotations


class InputError(Exception):
    """Bad input from outside: a file, a flag, a checkpoint.

    The message is one line that names the place (file and line, or flag), the value found and the remedy. Commands
    print it without a traceback and exit with code 2; library callers can catch it.
    """
