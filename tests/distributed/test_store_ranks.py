"""`headrank index` on several processes: the passages are shared, every process writes segments of its own, readers
see one store.
"""

from __future__ import annotations

import numpy as np

from headrank.passage_store.content import passage_digest
from headrank.passage_store.store import PassageStore
from headrank.passage_store.upkeep import verify
from tests.distributed.command_ranks import run_commands
from tests.distributed.launcher import run_ranks
from tests.tiny_models import make_tiny_model
from tests.unit.test_index_command import write_corpus
from tests.unit.test_late_reranker import HEADS, texts


def test_processes_share_the_passages_and_make_the_store_that_one_would(tmp_path):
    model, passages = make_tiny_model(tmp_path / "model", "llama"), texts(60)
    HEADS.save(tmp_path / "heads.json")
    write_corpus(tmp_path / "first.jsonl", passages[:20])
    write_corpus(tmp_path / "corpus.jsonl", [*passages, *passages[:5]])
    command = [
        "index",
        "--model",
        str(model),
        "--heads",
        str(tmp_path / "heads.json"),
        "--device",
        "cpu",
        "--dtype",
        "fp32",
    ]
    alone, shared = ([*command, "--store", str(tmp_path / name)] for name in ("alone", "shared"))
    (done,) = run_commands([[*alone, "--corpus", str(tmp_path / "corpus.jsonl")]])
    assert done[0] == 0, done
    begin, go_on = ([*shared, "--corpus", str(tmp_path / name)] for name in ("first.jsonl", "corpus.jsonl"))
    first, second = run_ranks(run_commands, 2, [begin])[0], run_ranks(run_commands, 2, [go_on])
    assert first[0][0] == 0 and "(this process's share)" in first[0][1]
    assert [results[0][0] for results in second] == [0, 0]
    assert "20 were there" in second[0][0][1] and second[1][0][1] == "", "the first process speaks"
    store = PassageStore(tmp_path / "shared")
    assert len(store.segments) == 4 and all(len(segment) > 0 and segment.is_sealed for segment in store.segments), (
        "two processes, two runs"
    )
    assert verify(tmp_path / "shared") == (60, [])
    digests = [passage_digest(("", text)) for text in passages]
    for one, other in zip(store.find(digests), PassageStore(tmp_path / "alone").find(digests), strict=True):
        assert one is not None and other is not None and np.array_equal(one.keys_ATD, other.keys_ATD)


def test_a_refusal_ends_all_processes_with_the_reason(tmp_path):
    model = make_tiny_model(tmp_path / "model", "llama")
    HEADS.save(tmp_path / "heads.json")
    write_corpus(tmp_path / "corpus.jsonl", texts(6))
    command = [
        "index",
        "--model",
        str(model),
        "--heads",
        str(tmp_path / "heads.json"),
        "--store",
        str(tmp_path / "store"),
        "--device",
        "cpu",
    ]
    command += ["--corpus", str(tmp_path / "corpus.jsonl")]
    (made,) = run_commands([command])
    assert made[0] == 0
    for results in run_ranks(run_commands, 2, [[*command, "--dtype", "bf16"]]):
        assert results[0][0] == 2
    assert "was made with dtype int8" in run_commands([[*command, "--dtype", "bf16"]])[0][2]
