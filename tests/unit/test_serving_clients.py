"""The packages that people have already, against a real server on loopback: each must see the offline scores. And plain
curl.

The packages are tools for tests (extra 'dev'); where one is missing its test is skipped and says so.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrank.reranking.reranker import HeadRankReranker
from tests.serving_client import DOCUMENTS, PATIENCE, QUERY, Running, running_server, tiny_settings

KEY = "correct-horse-battery"


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """With keys: clients that leave theirs out would fail."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(KEY)
    path.chmod(0o600)
    with running_server(tiny_settings(model, api_key_file=str(path))) as running:
        yield running


@pytest.fixture(scope="module")
def expected(model: Path) -> list[tuple[int, float]]:
    """(index, score) best first, without a server."""
    scores = HeadRankReranker.from_pretrained(str(model), "all").score(QUERY, DOCUMENTS)
    return [(int(index), float(scores[index])) for index in np.argsort(-scores, kind="stable")]


def test_cohere(served: Running, expected: list[tuple[int, float]]) -> None:
    cohere = pytest.importorskip("cohere")
    client = cohere.ClientV2(KEY, base_url=served.url)
    answer = client.rerank(model="rerank-v3.5", query=QUERY, documents=DOCUMENTS, max_tokens_per_doc=4000)
    assert [(row.index, row.relevance_score) for row in answer.results] == expected
    assert answer.id and answer.meta.billed_units.search_units == 1
    assert [row.index for row in client.rerank(model="x", query=QUERY, documents=DOCUMENTS, top_n=1).results] == [
        expected[0][0]
    ]


def test_cohere_v1_speaks_to_v1(served: Running, expected: list[tuple[int, float]]) -> None:
    cohere = pytest.importorskip("cohere")
    answer = cohere.Client(KEY, base_url=served.url).rerank(
        model="rerank-english-v3.0", query=QUERY, documents=DOCUMENTS, return_documents=True, max_chunks_per_doc=3
    )
    assert [(row.index, row.relevance_score) for row in answer.results] == expected
    assert answer.results[0].document.text == DOCUMENTS[expected[0][0]]


def test_cohere_raises_its_own_errors(served: Running) -> None:
    cohere = pytest.importorskip("cohere")
    client = cohere.ClientV2(KEY, base_url=served.url)
    with pytest.raises(cohere.BadRequestError) as refused:
        client.rerank(model="x", query=QUERY, documents=DOCUMENTS, top_n=0)
    assert refused.value.body["message"].startswith("top_n: ")
    with pytest.raises(cohere.UnauthorizedError):
        cohere.ClientV2("a-wrong-key-of-sixteen", base_url=served.url).rerank(
            model="x", query=QUERY, documents=DOCUMENTS
        )


async def _async_cohere(url: str) -> Any:
    import cohere

    return await cohere.AsyncClientV2(KEY, base_url=url).rerank(model="x", query=QUERY, documents=DOCUMENTS)


def test_cohere_async(served: Running, expected: list[tuple[int, float]]) -> None:
    pytest.importorskip("cohere")
    import asyncio

    answer = asyncio.run(_async_cohere(served.url))
    assert [(row.index, row.relevance_score) for row in answer.results] == expected


def test_langchain(served: Running, expected: list[tuple[int, float]]) -> None:
    CohereRerank = pytest.importorskip("langchain_cohere").CohereRerank
    from langchain_core.documents import Document

    compressor = CohereRerank(model="x", base_url=served.url, cohere_api_key=KEY, top_n=2)
    found = compressor.compress_documents(
        [Document(text, metadata={"n": n}) for n, text in enumerate(DOCUMENTS)], QUERY
    )
    assert [(document.metadata["n"], document.metadata["relevance_score"]) for document in found] == expected[:2]


@pytest.mark.parametrize(
    "dialect", ["cohere_rerank.CohereRerank", "jinaai_rerank.JinaRerank", "tei_rerank.TextEmbeddingInference"]
)
def test_llama_index(served: Running, expected: list[tuple[int, float]], dialect: str) -> None:
    module, _, name = dialect.partition(".")
    client = getattr(pytest.importorskip(f"llama_index.postprocessor.{module}"), name)
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

    address = {
        "CohereRerank": {"base_url": served.url, "api_key": KEY},
        "JinaRerank": {"base_url": f"{served.url}/v1", "api_key": KEY},
        "TextEmbeddingInference": {"base_url": served.url, "auth_token": f"Bearer {KEY}"},
    }[name]
    nodes = [NodeWithScore(node=TextNode(text=text, id_=str(number))) for number, text in enumerate(DOCUMENTS)]
    found = client(top_n=3, **address).postprocess_nodes(nodes, QueryBundle(QUERY))
    assert [(int(node.node.node_id), node.score) for node in found] == expected


def test_a_jina_client_that_looks_for_detail_finds_it(served: Running) -> None:
    answer = served.ask("/v1/rerank", {"query": QUERY}, key=KEY).json
    assert answer["detail"] == answer["message"] and answer["detail"].startswith("documents: ")


@pytest.mark.parametrize("raw_scores", [True, False])
def test_text_embeddings_inference_shapes_over_httpx(
    served: Running, expected: list[tuple[int, float]], raw_scores: bool
) -> None:
    """The request as the README of text-embeddings-inference has it, and its answer: a bare list, best first."""
    import httpx

    body = {
        "query": QUERY,
        "texts": DOCUMENTS,
        "raw_scores": raw_scores,
        "truncate": True,
        "truncation_direction": "Right",
        "return_text": True,
    }
    answer = httpx.post(f"{served.url}/rerank", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=PATIENCE)
    assert answer.status_code == 200
    assert answer.json() == [{"index": index, "score": score, "text": DOCUMENTS[index]} for index, score in expected]


def test_plain_curl(served: Running, expected: list[tuple[int, float]]) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    command = [
        curl,
        "-sS",
        f"{served.url}/rerank",
        "-H",
        "Content-Type: application/json",
        "-H",
        f"Authorization: Bearer {KEY}",
        "-d",
        "@-",
    ]
    body = json.dumps({"query": QUERY, "documents": DOCUMENTS})
    environment = os.environ | {"NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        command, input=body, capture_output=True, text=True, check=True, timeout=PATIENCE, env=environment
    )
    assert [(row["index"], row["relevance_score"]) for row in json.loads(done.stdout)["results"]] == expected


def test_mcp(model: Path, expected: list[tuple[int, float]]) -> None:
    """The real client: connect, list, call, and a call that is refused in words."""
    pytest.importorskip("mcp.client.client")
    import asyncio

    with running_server(tiny_settings(model, has_mcp=True)) as running:
        names, answer, refused = asyncio.run(_agent(f"{running.url}/mcp"))
        assert names == ["rerank"]
        assert [(row["index"], row["relevance_score"]) for row in answer.structured_content["results"]] == expected
        assert json.loads(answer.content[0].text) == answer.structured_content
        assert refused.is_error and refused.content[0].text.startswith("documents: ")


async def _agent(url: str) -> tuple[list[str], Any, Any]:
    from mcp.client.client import Client

    async with Client(url) as client:
        names = [tool.name for tool in (await client.list_tools()).tools]
        answer = await client.call_tool("rerank", {"query": QUERY, "documents": DOCUMENTS})
        return names, answer, await client.call_tool("rerank", {"query": QUERY, "documents": []})


@pytest.mark.parametrize(
    ("message", "status", "code"),
    [
        ({"jsonrpc": "2.0", "id": 1, "method": "nothing"}, 200, -32601),
        ({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "other"}}, 200, -32602),
        ({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": []}, 200, -32602),
        ({"jsonrpc": "2.0", "id": [], "method": "ping"}, 400, -32600),
        ({"jsonrpc": "2.0", "id": 1}, 400, -32600),
        ([], 400, -32600),
    ],
)
def test_mcp_by_hand(mcp: Running, message: Any, status: int, code: int) -> None:
    answer = mcp.ask("/mcp", message)
    assert (answer.status, answer.json["error"]["code"]) == (status, code)


def test_mcp_keeps_the_protocols_rules(mcp: Running) -> None:
    ping = {"jsonrpc": "2.0", "id": "a", "method": "ping"}
    assert mcp.ask("/mcp", ping).json == {"jsonrpc": "2.0", "id": "a", "result": {}}
    assert mcp.ask("/mcp", {"jsonrpc": "2.0", "method": "notifications/initialized"}).status == 202
    assert mcp.ask("/mcp").status == 405 and mcp.ask("/mcp", raw=b"{").json["error"]["code"] == -32700
    start = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": "2025-06-18"}}
    assert mcp.ask("/mcp", start).json["result"]["protocolVersion"] == "2025-06-18"
    assert mcp.ask("/mcp", ping, Origin="https://elsewhere.example").status == 403
    assert mcp.ask("/mcp", ping, Origin=mcp.url).status == 200
    assert mcp.ask("/mcp", ping, **{"MCP-Protocol-Version": "1999-01-01"}).status == 400


@pytest.fixture(scope="module")
def mcp(served: Running) -> Iterator[Running]:
    engine = served.state.engine
    assert engine is not None
    with running_server(tiny_settings(Path("unused"), has_mcp=True), lambda settings: engine) as running:
        yield running
