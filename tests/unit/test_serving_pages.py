"""What the server shows to people, /docs and /, and whom it shows it to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrank.errors import InputError
from headrank.serving.app import build_app
from headrank.serving.settings import ServeSettings
from tests.serving_client import DOCUMENTS, QUERY, Running, running_server, tiny_settings

BODY = {"query": QUERY, "documents": DOCUMENTS}


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Running]:
    with running_server(tiny_settings(model)) as running:
        yield running


def test_the_api_page_names_every_endpoint_and_loads_nothing_from_elsewhere(served: Running) -> None:
    page = served.ask("/docs")
    text = page.body.decode()
    for path in served.ask("/openapi.json").json["paths"]:
        assert f"{path}</code></h2>" in text
    assert (
        "list of (string or object), needed" in text
        and "http" not in text
        and "default-src 'none'" in page.headers["content-security-policy"]
    )


def test_the_page_at_the_root_is_the_servers_own(served: Running) -> None:
    page = served.ask("/")
    assert (
        page.headers["content-type"] == "text/html; charset=utf-8"
        and "script-src 'self';" in page.headers["content-security-policy"]
    )
    for name in ("viewer.js", "viewer.css", "playground.js", "playground.css"):
        assert f'"/playground/{name}"' in page.body.decode() and served.ask(f"/playground/{name}").status == 200
    assert served.ask("/playground/index.html").status == served.ask("/playground/..%2fapp.py").status == 404
    assert served.ask("/playground/collections").json == []
    for path in ("queries?collection=x", "candidates?collection=x&query=y"):
        assert served.ask(f"/playground/{path}").json["error"]["param"] == "collection"
    assert served.ask("/playground/queries").json["error"]["param"] == "collection"
    answer = served.ask("/playground/view", {"query": QUERY, "documents": ["a", {"text": "b", "grade": "c"}]})
    assert answer.status == 400 and answer.json["error"]["param"] == "documents[1].grade"


def test_without_a_playground_there_is_no_page(model: Path, served: Running) -> None:
    engine = served.state.engine
    assert engine is not None
    with running_server(tiny_settings(model, has_playground=False), lambda settings: engine) as running:
        assert running.ask("/").status == running.ask("/playground/collections").status == 404
    with pytest.raises(InputError, match="`no_playground`"):
        ServeSettings(has_playground=False, collections=("x",))


def test_collections_of_the_page_are_read_before_the_server_listens(model: Path, embedded_collection: Path) -> None:
    for folders, said in (
        (("/nowhere",), "no such collection folder"),
        ((str(embedded_collection),) * 2, "a second collection named"),
    ):
        with pytest.raises(InputError, match=said):
            build_app(tiny_settings(model, collections=folders))


@pytest.mark.parametrize(
    ("host", "status"), [("localhost", 200), ("[::1]:8000", 200), ("127.0.0.1", 200), ("evil.example", 403), ("[", 403)]
)
def test_without_keys_only_this_machines_names_are_answered(served: Running, host: str, status: int) -> None:
    for path, body in (("/rerank", BODY), ("/playground/collections", None), ("/info", None)):
        answer = served.ask(path, body, Host=host)
        assert answer.status == status and (status == 200 or answer.json["error"]["param"] == "Host")
    assert served.ask("/ready", Host=host).status == 200
