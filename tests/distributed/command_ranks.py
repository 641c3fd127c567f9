"""What the ranks of test_convert_commands.py run: the `headrank` command itself."""

from __future__ import annotations

import contextlib
import io


def run_commands(commands: list[list[str]]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each command, run one after the other in this process."""
    from headrank.commands import main

    results = []
    for command in commands:
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            code = main(command)
        results.append((code, output.getvalue(), errors.getvalue()))
    return results
