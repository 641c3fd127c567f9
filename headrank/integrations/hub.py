"""The Hugging Face hub: an exported reranker as a repository, its model card with what was measured.

``push_to_hub`` uploads a folder of 'headrank export-hf'; ``HeadRankReranker.from_pretrained("org/name")`` loads it
back. Results come from metrics.json files ('headrank evaluate --write-metrics') and stand in the card as the hub's
model-index.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrank.artifacts import atomic_folder
from headrank.errors import InputError, first_line
from headrank.files import read_json, write_json
from headrank.reranking.exported_model import read_headrank_json
from headrank.reranking.model_sources import ADAPTER_CONFIG, is_adapter_folder, read_adapter_config

_TASK = "text-ranking"
_RESULTS = "## Results"


def push_to_hub(
    folder: str | Path,
    repo_id: str,
    *,
    metrics: Sequence[str | Path] = (),
    base: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    token: str | None = None,
    commit_message: str = "Upload a HeadRank reranker",
) -> str:
    """Upload an exported folder, making the repository if need be; the address of the commit.

    ``metrics`` are metrics.json files whose measures go into the card. ``base`` is the name on the hub of the model
    that an adapter changes, where the folder names a local one: nobody else has that path. The folder itself stays as
    it is.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    folder = Path(folder)
    with tempfile.TemporaryDirectory() as place:
        staged = Path(place) / "model"
        prepare_folder(folder, staged, repo_id, metrics=metrics, base=base)
        try:
            api = HfApi(token=token)
            api.create_repo(repo_id, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=staged,
                revision=revision,
                create_pr=create_pr or None,
                commit_message=commit_message,
            )
        except HFValidationError as error:
            raise InputError(
                f"`repo_id` {repo_id!r} is not a repository's name ({error}); give organisation/name"
            ) from error
        except (HfHubHTTPError, OSError) as error:
            raise InputError(
                f"{repo_id}: the hub did not take it ({first_line(error)}); check the name, the network, and 'hf "
                "auth login'"
            ) from error
    return str(commit)


def prepare_folder(
    folder: Path, output: Path, name: str, *, metrics: Sequence[str | Path] = (), base: str | None = None
) -> None:
    """What is uploaded, as a local folder: the export under the repository's name, with results in its card and no
    local path.
    """
    about = read_headrank_json(folder)
    if about is None:
        raise InputError(f"{folder}: no headrank.json there; give a folder that 'headrank export-hf' wrote")
    results = [entry for path in metrics for entry in read_results(path)]
    is_adapter = is_adapter_folder(folder)
    if base is not None and not is_adapter:
        raise InputError(f"`base` {base}: {folder} is a whole model and needs no other; leave it out")
    with atomic_folder(output) as partial:
        shutil.copytree(folder, partial, copy_function=_link_or_copy, dirs_exist_ok=True)
        if is_adapter:
            _name_base(partial, about, base)
        card = partial / "README.md"
        text = (
            _renamed(card.read_text(encoding="utf-8"), folder.resolve().name, name) if card.is_file() else f"# {name}\n"
        )
        _write_new(card, card_with_results(text, name, results))


def _link_or_copy(source: str, target: str) -> str:
    """Weights are large and are only read from here."""
    try:
        os.link(Path(source).resolve(), target)  # of a symbolic link in the cache: the file
    except OSError:
        shutil.copy2(source, target)
    return target


def _write_new(path: Path, text: str) -> None:
    """Beside, not into: the file may be a link to the export's."""
    path.unlink(missing_ok=True)
    path.write_text(text, encoding="utf-8")


def _name_base(output: Path, about: Mapping[str, Any], base: str | None) -> None:
    """An adapter's base under a name that everybody can load."""
    config = read_adapter_config(output)
    found = base or str(about.get("base") or config.get("base_model_name_or_path") or "")
    if os.path.isabs(found) or Path(found).is_dir():
        raise InputError(
            f"`base`: the adapter names {found}, a folder that nobody else has; give the model's name on the hub"
        )
    public = found if found != "embedded" else str(config.get("base_model_name_or_path") or found)
    for path, values in (
        (output / ADAPTER_CONFIG, {**config, "base_model_name_or_path": public}),
        (output / "headrank.json", {**about, "base": found}),
    ):
        path.unlink()
        write_json(path, values)


def _renamed(card: str, old: str, name: str) -> str:
    """The card under the repository's name: its heading and its snippet."""
    return card.replace(f"# {old}\n", f"# {name}\n", 1).replace(
        f'from_pretrained("{old}")', f'from_pretrained("{name}")'
    )


def read_results(path: str | Path) -> list[dict[str, Any]]:
    """The measures of a metrics.json: benchmark, depth and queries they are of, name and value."""
    values = read_json(path)
    measures = values.get("measures") if isinstance(values, dict) else None
    if (
        not isinstance(values, dict)
        or not isinstance(measures, dict)
        or not str(values.get("format", "")).startswith("headrank-metrics/")
    ):
        raise InputError(f"{path}: not a metrics.json; make it with 'headrank evaluate --write-metrics'")
    common = {
        "benchmark": str(values.get("benchmark", "")),
        "depth": values.get("depth"),
        "num_queries": values.get("num_queries"),
    }
    return [{**common, "measure": str(name), "value": float(value)} for name, value in measures.items()]


def card_with_results(card: str, name: str, results: Iterable[Mapping[str, Any]]) -> str:
    """The card with results as the hub's model-index, and as a table for people; those of an earlier card of ours
    are replaced.
    """
    from huggingface_hub import EvalResult, ModelCard

    found = ModelCard(card)
    listed = list(results)
    data: Any = found.data
    data.pipeline_tag = _TASK
    if listed:
        data.model_name = name
        data.eval_results = [
            EvalResult(
                task_type=_TASK,
                task_name="Reranking",
                dataset_type=_slug(result["benchmark"]),
                dataset_name=_dataset(result),
                metric_type=_slug(result["measure"]),
                metric_name=result["measure"],
                metric_value=round(result["value"], 5),
            )
            for result in listed
        ]
        rows = [f"| {_dataset(result)} | {result['measure']} | {result['value']:.4f} |" for result in listed]
        table = "\n".join([_RESULTS, "", "| benchmark | measure | value |", "|---|---|---|", *rows])
        found.text = found.text.partition(_RESULTS)[0].rstrip() + f"\n\n{table}\n"
    return str(found)


def _dataset(result: Mapping[str, Any]) -> str:
    depth = f", the first {result['depth']} candidates reranked" if result.get("depth") else ""
    return f"{result['benchmark']}{depth}"


def _slug(text: str) -> str:
    """As the hub spells names: nDCG@10 is ndcg_at_10."""
    return "".join(
        letter if letter.isalnum() or letter in "-_." else "_" for letter in text.lower().replace("@", "_at_")
    )
