"""One JSON request to a server, repeated while the server is busy or away; the key travels in a header and in no
message.
"""

from __future__ import annotations

import http.client
import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from headrank.errors import InputError

_log = logging.getLogger(__name__)
_RETRIED_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_LONGEST_PAUSE = 30.0


class RefusedRequest(InputError):
    """The server understood and said no: asking again would not help."""

    def __init__(self, url: str, status: int, reason: str) -> None:
        """``reason`` is what the server wrote, in one line."""
        super().__init__(f"{url}: HTTP {status}: {reason}")
        self.status = status


def post_json(
    url: str, body: Mapping[str, Any], *, key: str | None = None, timeout: float = 600.0, retries: int = 5
) -> Any:
    """Send until the server answers: busy or broken is tried again with growing pauses, a refusal is a
    RefusedRequest.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    payload = json.dumps(body).encode()
    for attempt in range(retries + 1):
        pause: float | None = None
        try:
            with urllib.request.urlopen(urllib.request.Request(url, payload, headers), timeout=timeout) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            if error.code not in _RETRIED_STATUS:
                raise RefusedRequest(url, error.code, _words_of(error)) from error
            problem, pause = f"HTTP {error.code}: {_words_of(error)}", _retry_after(error)
        except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
            problem = f"{type(error).__name__}: {getattr(error, 'reason', error)}"
        if attempt < retries:
            pause = min(_LONGEST_PAUSE, 0.5 * 2**attempt if pause is None else pause)
            _log.warning("%s: %s; trying again in %.1f s", url, problem, pause)
            time.sleep(pause)
    raise InputError(f"{url}: no answer after {retries + 1} tries ({problem}); is the server running?")


def _words_of(error: urllib.error.HTTPError) -> str:
    """The server's words in one line."""
    return " ".join(error.read(2000).decode(errors="replace").split())[:300] or str(error.reason)


def _retry_after(error: urllib.error.HTTPError) -> float | None:
    try:
        return max(0.0, float(error.headers.get("Retry-After", "")))
    except ValueError:
        return None
