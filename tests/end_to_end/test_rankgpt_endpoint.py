"""RankGPT over HTTP against a real OpenAI-compatible server: `transformers serve` with a tiny model."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrank.errors import InputError
from headrank.generation.generation import EndpointGenerator, LocalGenerator
from headrank.generation.rankgpt import ranking_messages
from headrank.methods import build_ranker
from tests.tiny_models import make_tiny_model

START_SECONDS = 180  # importing and loading on a busy machine


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("endpoint") / "tiny", "llama")


@pytest.fixture(scope="module")
def api_base(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a running server; it is stopped afterwards."""
    pytest.importorskip("fastapi", reason="needs the extra 'serving' of transformers (fastapi, uvicorn, openai)")
    pytest.importorskip("openai", reason="needs the extra 'serving' of transformers (fastapi, uvicorn, openai)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("log") / "server.log"
    program = "from transformers.cli.transformers import main; main()"
    command = [
        sys.executable,
        "-c",
        program,
        "serve",
        str(model_directory),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--device",
        "cpu",
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with open(log, "w") as stream:
        server = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)
    try:
        _wait_until_healthy(f"http://127.0.0.1:{port}/health", server, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            server.kill()


def _wait_until_healthy(url: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            pytest.fail(f"the server ended: {log.read_text()[-2000:]}")
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                if response.status == 200:
                    return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"the server did not start: {log.read_text()[-2000:]}")


def test_the_server_writes_what_the_local_model_writes(api_base: str, model_directory: Path) -> None:
    prompts = [
        ranking_messages(query, ["a flea", "the floor", "rosin"])
        for query in ("how long does a flea live", "cost of a floor")
    ]
    local = LocalGenerator.load(model_directory, batch_size=1, max_new_tokens=16).generate(prompts, num_identifiers=3)
    served = EndpointGenerator(api_base, str(model_directory), concurrency=2, max_new_tokens=16).generate(
        prompts, num_identifiers=3
    )
    assert [answer.text for answer in served] == [answer.text for answer in local]
    assert all(answer.num_tokens > 16 for answer in served)


def test_lists_are_ranked_completely_through_the_server(api_base: str, model_directory: Path) -> None:
    ranker = build_ranker(
        "rankgpt", model_directory, api_base=api_base, window=4, stride=2, max_new_tokens=16, device="cpu"
    )
    lists = [("flea", ["a flea", "the floor", "rosin", "a bow", "a host"]), ("floor", ["a flea", "the floor"])]
    results = ranker.score_batch(lists)
    assert [sorted(result.scores) for result in results] == [[1, 2, 3, 4, 5], [1, 2]]
    assert ranker.success["num_windows"] == 3 and ranker.success["strict"] is not None


def test_a_wrong_address_is_one_clear_error_at_once(api_base: str) -> None:
    generator = EndpointGenerator(f"{api_base}/nowhere", "tiny", retries=0)
    with pytest.raises(InputError, match="HTTP 404"):
        generator.generate([ranking_messages("q", ["a", "b"])], num_identifiers=2)
