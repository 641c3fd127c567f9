"""What an operator decides about a server: the model, who may ask, and how much."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from headrank.errors import InputError


@dataclass(frozen=True)
class ServeSettings:
    """The flags of `headrank serve`, checked. A ``max_batch_tokens`` of None is chosen by the device."""

    model: str = "embedded"
    heads: str | None = None
    store: str | None = None
    store_add: bool = False
    key_cache_mb: int | None = None
    collections: tuple[str, ...] = ()  # folders whose queries the playground offers
    has_mcp: bool = False
    has_playground: bool = True
    logs_requests: bool = False
    logs_texts: bool = False
    served_name: str | None = None
    relevance: str | None = None
    device: str | None = None
    dtype: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: str | None = None
    is_open_to_anyone: bool = False
    max_batch_tokens: int | None = None
    max_queue: int = 256
    max_body_bytes: int = 8 << 20
    max_documents: int = 1000
    max_list_tokens: int = 1 << 17
    max_query_tokens: int = 1024
    max_chunks_per_doc: int = 8
    request_seconds: float = 60.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.key_cache_mb is not None and self.key_cache_mb < 0:
            raise InputError(f"`key_cache_mb` {self.key_cache_mb} must be at least 0")
        if self.collections and not self.has_playground:
            raise InputError("`collection` is for the page at /, and `no_playground` leaves it out; drop one of them")
        if not self.is_loopback and self.api_key_file is None and not self.is_open_to_anyone:
            raise InputError(
                f"`host` {self.host} can be reached from other machines and nothing would ask them for a key; give "
                "`api_key_file` FILE, "
                "or `open_to_anyone` where something else keeps strangers out"
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def name(self) -> str:
        """The model's name in answers and metrics: never a path of this machine."""
        return self.served_name or self.model.rstrip("/").rpartition("/")[2] or self.model
