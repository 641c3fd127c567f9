"""API keys from a file, compared in constant time; a key's holder is a client of the fair queue."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import stat
from pathlib import Path

from headrank.errors import InputError
from headrank.formats import read_lines
from headrank.serving.problems import Problem

_log = logging.getLogger(__name__)
_SHORTEST_KEY = 16


class ApiKeys:
    """The keys that are let in. Without keys everybody is, and a client is the address it calls from."""

    def __init__(self, keys: tuple[str, ...] = ()) -> None:
        self._digests = tuple(_digest(key) for key in keys)

    @classmethod
    def read(cls, path: str | Path | None) -> ApiKeys:
        """One key per line; empty lines and lines that begin with # say nothing. No key is ever quoted in a message."""
        if path is None:
            return cls()
        keys = []
        for number, line in read_lines(path):
            key = line.strip()
            if not key or key.startswith("#"):
                continue
            if len(key) < _SHORTEST_KEY or not key.isascii() or " " in key:
                raise InputError(
                    f"{path}:{number}: a key has at least {_SHORTEST_KEY} ASCII characters and no spaces; make a "
                    "longer one"
                )
            keys.append(key)
        if not keys:
            raise InputError(f"{path}: holds no key; write one per line, or leave `api_key_file` out")
        if os.stat(path).st_mode & (stat.S_IRGRP | stat.S_IROTH):
            _log.warning("%s can be read by other users of this machine; chmod 600 keeps the keys to yourself", path)
        return cls(tuple(keys))

    @property
    def are_needed(self) -> bool:
        """Whether a key must be shown."""
        return bool(self._digests)

    def client(self, authorization: str | None, address: str) -> str:
        """The name of the client for the queue, or a 401. Every key is compared, whichever fits."""
        if not self.are_needed:
            return address
        scheme, _, key = (authorization or "").partition(" ")
        shown = _digest(key.strip())
        matches = [hmac.compare_digest(shown, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise Problem(401, "an API key is needed, as the header 'Authorization: Bearer KEY'", field="Authorization")
        return f"key {matches.index(True)}"


def require_own_name(host: str) -> None:
    """Without keys a server on loopback is asked by an address or as localhost: a 403 for any other name.

    A page from elsewhere may make its own name mean this machine (DNS rebinding), and then the browser lets it read the
    answers.
    """
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if not host or name.lower() == "localhost" or name.lower().endswith(".localhost"):
        return
    try:
        ipaddress.ip_address(name)
    except ValueError:
        words = "not an address of this machine; behind a proxy, start the server with keys or with --open-to-anyone"
        raise Problem(403, words, field="Host") from None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
