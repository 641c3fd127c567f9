"""What is installed, what will be used, and whether model, heads, store and tokenizer fit together; a remedy for each
problem.

The first thing to run, and to send along, when something is wrong: secrets of the environment are not shown. Exit code
0 without a problem, 1 with one. Files are only read, nothing is downloaded and no torch is imported, unless --try or a
machine's check needs it.
"""

from __future__ import annotations

import argparse
import json

from headrank.commands import build_verb_parser, options
from headrank.doctor.finding import Finding, as_lines

_PARTS = ("installation", "environment", "machine", "model")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `headrank doctor`."""
    options.add_model_arguments(parser)
    group = parser.add_argument_group("what to look at")
    group.add_argument("--heads", metavar="FILE", help="heads.json, or 'all' (default: the model's headrank.json)")
    group.add_argument("--store", metavar="DIR", help="a passage store that this model should read; implies --try")
    group.add_argument(
        "--part", action="append", choices=_PARTS, help="only this part; may be given several times (default: all)"
    )
    group.add_argument(
        "--try", dest="is_tried", action="store_true", help="also load the model and rank three passages"
    )
    group.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Look, print; 1 if there is a problem."""
    findings = look(args)
    problems = sum(finding.status == "problem" for finding in findings)
    if args.json:
        print(json.dumps({"problems": problems, "findings": [finding.to_dict() for finding in findings]}, indent=1))
    else:
        print(build_verb_parser("doctor").in_flags("\n".join(as_lines(findings))))
        print(f"{problems} problem{'' if problems == 1 else 's'} found" if problems else "no problem found")
    return 1 if problems else 0


def look(args: argparse.Namespace) -> list[Finding]:
    """The findings of every part asked for, each imported only then."""
    wanted, found = args.part or _PARTS, list[Finding]()
    if "installation" in wanted:
        from headrank.doctor.installation import look_at_installation

        found += look_at_installation()
    if "environment" in wanted:
        from headrank.doctor.environment import look_at_environment

        found += look_at_environment()
    if "machine" in wanted:
        from headrank.doctor.machine import look_at_machine

        found += look_at_machine(args.device, args.dtype)
    if "model" in wanted:
        from headrank.doctor.model_files import look_at_model

        found += look_at_model(args.model, args.heads)
    if args.store:
        from headrank.doctor.store_files import look_at_store

        found += look_at_store(args.store)
    if args.is_tried or args.store:
        from headrank.doctor.trial import try_reranking

        found += try_reranking(args.model, args.heads, args.device, args.dtype, args.store)
    return found
