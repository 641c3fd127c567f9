"""What the ranks of test_convert_commands.py run: the `headrank` command itself."""

from __future__ import annotations

import contextlib
import io
import resource


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


def run_commands_on_a_full_disk(commands: list[list[str]], largest_file: int) -> list[tuple[int, str, str]]:
    """The same where no file can grow beyond ``largest_file`` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
    results = run_commands(commands)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return results
