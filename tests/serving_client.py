"""A real server on loopback in a thread of the test's process, and a plain HTTP client that shows status, headers
and JSON.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from headrank.method.heads import HeadSet
from headrank.method.prompt import PromptTemplate
from headrank.method.readout import Readout
from headrank.serving.app import build_app
from headrank.serving.batcher import Passages
from headrank.serving.engine import RerankerEngine
from headrank.serving.run import DrainingServer, bind
from headrank.serving.settings import ServeSettings
from headrank.serving.state import LoadEngine, ServerState

PATIENCE = 60.0
QUERY = "how long does a flea live"
DOCUMENTS = [
    "The flea lives for two to three months.",
    "Concrete floors cost six dollars.",
    "Rosin makes the bow grip the string.",
]


@dataclass
class Answer:
    """One HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def message(self) -> str:
        return self.json["message"]


@dataclass
class Running:
    """A server and its address."""

    url: str
    state: ServerState
    server: DrainingServer

    def ask(
        self, path: str, body: Any = None, *, key: str | None = None, raw: bytes | None = None, **headers: str
    ) -> Answer:
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **headers} if data is not None else dict(headers)
        if key is not None:
            sent["Authorization"] = f"Bearer {key}"
        try:
            with urllib.request.urlopen(
                urllib.request.Request(self.url + path, data, sent), timeout=PATIENCE
            ) as response:
                return Answer(
                    response.status, {name.lower(): value for name, value in response.headers.items()}, response.read()
                )
        except urllib.error.HTTPError as error:
            return Answer(error.code, {name.lower(): value for name, value in error.headers.items()}, error.read())

    def ask_many(self, path: str, bodies: Sequence[Any], **more: Any) -> list[Answer]:
        """All at once, each in a thread."""
        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(lambda body: self.ask(path, body, **more), bodies))

    def metric(self, name: str) -> float:
        """One sample of /metrics, with its labels as they are printed."""
        page = self.ask("/metrics").body.decode()
        return next(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.rpartition(" ")[0] == name)


@contextlib.contextmanager
def running_server(
    settings: ServeSettings, load: LoadEngine = RerankerEngine.load, *, wait: bool = True
) -> Iterator[Running]:
    """A server on a port of the system's choice; ready when ``wait``, and gone afterwards."""
    app = build_app(settings, load)
    state: ServerState = app.state.server
    with bind(settings) as listener:
        config = uvicorn.Config(app, log_config=None, access_log=False, ws="none", timeout_graceful_shutdown=2)
        server = DrainingServer(config, state)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        running = Running(f"http://127.0.0.1:{listener.getsockname()[1]}", state, server)
        try:
            wait_until(lambda: server.started and (not wait or state.phase != "loading"))
            yield running
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
    assert not thread.is_alive()


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.01)


def tiny_settings(model: Path, **changes: Any) -> ServeSettings:
    return ServeSettings(**{"model": str(model), "heads": "all", "port": 0, "served_name": "tiny", **changes})


def late_heads(folder: Path, room: int = 64, least: float = -1.0) -> str:
    """A heads.json of the late layout for the tiny models: all heads, weights of both signs unless ``least`` is
    positive.
    """
    prompt = PromptTemplate(
        opening="<|im_start|>user\n",
        instruction="Query: ",
        use_chat_template=False,
        document_layout="late",
        branch_position=room,
    )
    heads = [(layer, head) for layer in range(4) for head in range(8)]
    weights = tuple(random.Random(1).uniform(least, 1) for _ in heads)
    HeadSet(tuple(heads), "readout", "tiny", 4, 8, prompt=prompt, readout=Readout(weights=weights, floor=0.1)).save(
        folder / "heads.json"
    )
    return str(folder / "heads.json")


class MoodyEngine(RerankerEngine):
    """The real engine with accidents: it can wait, run out of memory above a number of lists, and fail on chosen
    queries.
    """

    gate: threading.Event | None = None
    most_lists = 1 << 30
    poison: Exception | None = None
    calls: list[list[str]]

    def score(self, lists: Sequence[tuple[str, Passages]]) -> list[Any]:
        self.calls.append([query for query, _ in lists])
        if self.gate is not None:
            assert self.gate.wait(PATIENCE)
        if len(lists) > self.most_lists:
            raise MemoryError
        if self.poison is not None and any("poison" in query for query, _ in lists):
            raise self.poison
        return super().score(lists)


def moody(engine: RerankerEngine, **mood: Any) -> LoadEngine:
    """A loader that gives the same model in a mood."""
    made = MoodyEngine(engine.reranker, engine.name, engine.relevance)
    made.calls = []
    for name, value in mood.items():
        setattr(made, name, value)
    return lambda settings: made
