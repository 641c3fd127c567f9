"""Upload an exported model or adapter to the Hugging Face hub, with what was measured in its model card.

  headrank push exported/ org/name --metrics results/nfcorpus/metrics.json

The results stand in the card as the hub's model-index; HeadRankReranker.from_pretrained("org/name") loads the model
back. Log in with 'hf auth login', or set HF_TOKEN. --output writes the folder that would be uploaded, and uploads
nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from headrank.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `headrank push`."""
    parser.add_argument("folder", metavar="DIR", help="a folder that 'headrank export-hf' wrote")
    parser.add_argument("repo_id", metavar="REPO", help="organisation/name on the hub")
    parser.add_argument(
        "--metrics", metavar="FILE", nargs="+", default=[], help="metrics.json of 'headrank evaluate --write-metrics'"
    )
    parser.add_argument(
        "--base", metavar="NAME", help="an adapter's base model on the hub, where the export names a local folder"
    )
    parser.add_argument(
        "--private", action="store_true", help="make the repository private (where it is not there yet)"
    )
    parser.add_argument("--revision", metavar="BRANCH", help="the branch to commit to (default main)")
    parser.add_argument("--create-pr", action="store_true", help="open a pull request instead of committing")
    parser.add_argument("--output", metavar="DIR", help="write the folder there instead, and upload nothing")


def run(args: argparse.Namespace) -> int:
    """Upload, or write what would be uploaded."""
    from headrank.integrations.hub import prepare_folder, push_to_hub

    if args.output:
        output = Path(args.output)
        if output.exists():
            raise InputError(f"--output {output}: already exists; remove it or choose another")
        prepare_folder(Path(args.folder), output, args.repo_id, metrics=args.metrics, base=args.base)
        print(f"{output}: what would be {args.repo_id}")
        return 0
    commit = push_to_hub(
        args.folder,
        args.repo_id,
        metrics=args.metrics,
        base=args.base,
        private=args.private or None,
        revision=args.revision,
        create_pr=args.create_pr,
    )
    print(f"{args.repo_id}: uploaded, {commit}")
    return 0
