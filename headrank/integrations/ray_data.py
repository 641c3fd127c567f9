"""Ray Data: lists scored by a pool of processes, one per GPU or core, on this machine or on a cluster.

``score_lists`` adds a column of scores to a dataset; 'headrank rerank --ray' and 'headrank index --ray' use the same
pool. A list is one row and is never divided. A process that dies is started again and its rows are scored again.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrank.errors import InputError, first_line
from headrank.integrations import needs
from headrank.integrations.shared_reranker import RerankerSettings
from headrank.placement import available_cores
from headrank.reranking import shipped_readouts
from headrank.reranking.model_sources import EMBEDDED

with needs("ray[data]"):
    import pyarrow
    import ray
    import ray.data

BLOCK_BYTES = 1 << 20  # of rows that one process takes at a time: what is lost, and done again, when it dies
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Workers:
    """Processes that each hold the model."""

    count: int
    on_gpu: bool
    cores: float = 1.0  # that each asks for, on a CPU

    @property
    def device(self) -> str:
        """Where each of them computes: Ray shows a process its own GPU only."""
        return "cuda" if self.on_gpu else "cpu"

    def map(self, dataset: Any, worker: type, *arguments: Any) -> Any:
        """The dataset with ``worker(*arguments)`` called on whole blocks of it, as Arrow tables."""
        return dataset.map_batches(
            worker,
            fn_constructor_args=arguments,
            batch_size=None,
            batch_format="pyarrow",
            zero_copy_batch=True,
            compute=ray.data.ActorPoolStrategy(size=self.count),
            **({"num_gpus": 1} if self.on_gpu else {"num_cpus": self.cores}),
        )


def connect(address: str | None = None, workers: int | None = None) -> None:
    """Join the cluster at ``address`` (or RAY_ADDRESS), or start one of this machine's cores that ends with the
    process.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # as the next release has it; this one warns
    is_told = _LOG.isEnabledFor(logging.DEBUG)
    quiet: dict[str, Any] = {"log_to_driver": is_told, "logging_level": "INFO" if is_told else "ERROR"}
    address = address or os.environ.get("RAY_ADDRESS")
    if not ray.is_initialized():
        try:
            if address:
                ray.init(address, **quiet)
            else:
                cores = max(available_cores(), workers or 0)
                ray.init(num_cpus=cores, include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
        except (ConnectionError, TimeoutError, ValueError) as error:
            place = f"`ray` {address or 'local'}: no Ray cluster there ({first_line(error)[:200]})"
            raise InputError(
                f"{place}; start one with 'ray start --head' and give its address, or leave the address out"
            ) from error
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.target_max_block_size = BLOCK_BYTES


def find_workers(device: str | None, count: int | None, *, spare: int = 0) -> Workers:
    """A process for every GPU of the cluster, or for every core where it has none; ``spare`` cores are left to
    others.
    """
    resources = ray.cluster_resources()
    gpus, cores = int(resources.get("GPU", 0)), int(resources.get("CPU", 1))
    if device is not None and device not in ("cpu", "cuda"):
        raise InputError(f"`device` {device!r}: with `ray` it is cpu or cuda; every process gets a GPU of its own")
    if device == "cuda" and not gpus:
        raise InputError("`device` cuda: this Ray cluster has no GPU; leave it out, or add nodes that have one")
    on_gpu = bool(gpus) and device != "cpu"
    most = gpus if on_gpu else max(1, cores - spare)
    if count is not None and count > (gpus if on_gpu else cores):
        raise InputError(
            f"`ray_workers` {count}: this Ray cluster has {gpus if on_gpu else cores} {'GPUs' if on_gpu else 'cores'}"
        )
    chosen = count or most
    # tasks that read files ask for a whole core; without a free one they would wait for ever for processes that wait
    # for them
    return Workers(chosen, on_gpu, min(1.0, (cores - 1) / chosen))


def whole_path(name: str | None) -> str | None:
    """A local path as a process finds it that begins in another folder; names of models and heads stay."""
    is_name = name is None or name in (EMBEDDED, "all", *shipped_readouts.NAMES)
    return name if is_name or not Path(str(name)).exists() else str(Path(str(name)).absolute())


def score_lists(
    dataset: Any,
    model: str = "embedded",
    *,
    heads: str | None = None,
    query: str = "query",
    documents: str = "documents",
    scores: str = "scores",
    device: str | None = None,
    dtype: str | None = None,
    max_length: int | None = None,
    workers: int | None = None,
) -> Any:
    """The Ray dataset with a column of scores: for each row one number per document, in the order of its documents.

    ``documents`` is a column of lists of texts, or of {"title", "text"}. Nothing is computed before the result is
    consumed. The model must be where every node finds it: a hub name, 'embedded', or a path on a shared disk.
    """
    connect()
    found = find_workers(device, workers, spare=1)
    settings = RerankerSettings(
        whole_path(model) or model, whole_path(heads), found.device, dtype, max_length=max_length
    )
    return found.map(dataset, _ColumnScorer, settings, query, documents, scores)


class _ColumnScorer:
    """One process of ``score_lists``."""

    def __init__(self, settings: RerankerSettings, query: str, documents: str, scores: str) -> None:
        self.reranker = settings.load()
        self.query, self.documents, self.scores = query, documents, scores

    def __call__(self, rows: pyarrow.Table) -> pyarrow.Table:
        """The rows with their scores."""
        for column in (self.query, self.documents):
            if column not in rows.column_names:
                raise InputError(
                    f"no column {column!r} among {', '.join(rows.column_names)}; name it with `query` or `documents`"
                )
        lists = list(zip(rows[self.query].to_pylist(), map(_documents, rows[self.documents].to_pylist()), strict=True))
        filled = [item for item in lists if item[1]]
        found = iter(self.reranker.score_batch(filled) if filled else ())
        scores = [[float(score) for score in next(found).scores] if documents else [] for _, documents in lists]
        return rows.append_column(self.scores, pyarrow.array(scores, pyarrow.list_(pyarrow.float32())))


def _documents(listed: Any) -> list[Any]:
    """Texts, or titles with texts; what is null is empty."""
    return [
        {"title": item.get("title") or "", "text": item.get("text") or ""} if isinstance(item, dict) else item or ""
        for item in listed or []
    ]
