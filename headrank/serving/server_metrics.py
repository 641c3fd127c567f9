"""Which numbers the server shows: text-embeddings-inference's and vLLM's names where they mean the same, headrank_
for the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from headrank.serving.prometheus import COUNTS, SECONDS, TOKENS, Histogram, Metric, counters, exposition


class ServerMetrics:
    """All metrics of one server."""

    def __init__(self) -> None:
        count = counters(
            {
                "te_request_count": "Rerank requests received.",
                "te_request_success": "Rerank requests answered with 200.",
                "te_request_failure": "Rerank requests answered with anything else, by status.",
                "vllm:prompt_tokens_total": "Tokens read by the model for answered requests.",
                "headrank_documents_total": "Documents scored.",
                "headrank_documents_cut_total": "Documents that lost text to a limit.",
                "headrank_batches_total": "Batches computed.",
                "headrank_out_of_memory_total": "Batches that ran out of memory and were halved.",
                "headrank_failed_alone_total": "Requests whose own computation failed.",
                "headrank_abandoned_total": "Requests whose client left, or whose time was up, before they were "
                "computed.",
            }
        )
        self.counters = count
        self.request_seconds = Histogram(
            "te_request_duration", "Seconds from a request's last byte to its answer.", SECONDS
        )
        self.queue_seconds = Histogram(
            "te_request_queue_duration", "Seconds that requests waited for their batch.", SECONDS
        )
        self.vllm_queue_seconds = Histogram(
            "vllm:request_queue_time_seconds", "Seconds that requests waited for their batch.", SECONDS
        )
        self.inference_seconds = Histogram(
            "te_request_inference_duration", "Seconds that the request's batch took.", SECONDS
        )
        self.tokenization_seconds = Histogram(
            "te_request_tokenization_duration", "Seconds of measuring and cutting texts.", SECONDS
        )
        self.input_tokens = Histogram("te_request_input_length", "Tokens of a request.", TOKENS)
        self.batch_requests = Histogram("te_batch_next_size", "Requests of a batch.", COUNTS)
        self.batch_tokens = Histogram("te_batch_next_tokens", "Tokens of a batch, as estimated before it.", TOKENS)
        self._asked: list[Metric] = []
        self.ask(
            "process_start_time_seconds", "When the server started, in seconds since the epoch.", _constant(time.time())
        )

    def ask(self, name: str, text: str, read: Callable[[], float], kind: str = "gauge") -> None:
        """A number that somebody else keeps, read at each scrape."""
        self._asked.append(Metric(name, kind, text, read=read))

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        self.counters[name].add(amount, **labels)

    def waited(self, seconds: float) -> None:
        """A request left the queue for its batch."""
        self.queue_seconds.observe(seconds)
        self.vllm_queue_seconds.observe(seconds)

    def answered(self, status: int, seconds: float) -> None:
        """A rerank request got its answer."""
        self.count("te_request_count")
        self.request_seconds.observe(seconds)
        if status == 200:
            self.count("te_request_success")
        else:
            self.count("te_request_failure", err=str(status))

    def page(self) -> str:
        """Everything, as Prometheus scrapes it."""
        own = [value for value in vars(self).values() if isinstance(value, Histogram)]
        return exposition([*self.counters.values(), *own, *self._asked])


def _constant(value: float) -> Callable[[], float]:
    return lambda: value
