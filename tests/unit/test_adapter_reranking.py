"""Reranking with an adapter's folder, without peft: the scores of the model that peft merged, on both ways of
loading.
"""

from __future__ import annotations

import json
import shutil
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("peft", reason="peft (headrank[dev]) makes and merges the adapters to compare with")

from headrank import HeadRankReranker
from headrank.errors import InputError
from headrank.method.heads import HeadSet
from headrank.reranking.decoder import Decoder
from headrank.reranking.model_sources import base_of
from tests.adapters import make_tiny_adapter
from tests.tiny_models import make_tiny_model

HEADS = HeadSet(((1, 3), (2, 5)), "headrank", "tiny", 4, 8)
QUERY, PASSAGES = "how long do fleas live", ["Fleas live two months.", "Rosin is resin.", "A host is warm."]
SAME = 1e-5  # relative: one product in another order


def scores(model, **options):
    return HeadRankReranker.from_pretrained(model, HEADS, device="cpu", **options).score(QUERY, PASSAGES)


@pytest.fixture(scope="module", params=["qwen3", "mistral"])
def folders(request, tmp_path_factory):
    """A base, its adapter, and the model that peft made of both; mistral's window leaves it to transformers."""
    import transformers
    from peft import PeftModel

    root = tmp_path_factory.mktemp(request.param)
    base = make_tiny_model(root / "base", request.param)
    adapter = make_tiny_adapter(root / "adapter", base)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged = PeftModel.from_pretrained(plain, adapter).merge_and_unload()
    shutil.copytree(base, root / "merged")
    merged.save_pretrained(root / "merged")
    return root


def test_an_adapter_folder_scores_as_the_model_that_peft_merged(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)  # importing it would fail
    found, expected = scores(folders / "adapter", dtype="float32"), scores(folders / "merged", dtype="float32")
    assert np.allclose(found, expected, rtol=SAME, atol=0)
    assert not np.allclose(found, scores(folders / "base", dtype="float32"), rtol=100 * SAME, atol=0), (
        "the adapter must matter"
    )
    reader = HeadRankReranker.from_pretrained(folders / "adapter", HEADS, device="cpu").reader
    assert isinstance(reader.model, Decoder) == (folders.name.startswith("qwen3"))


def test_in_bfloat16_the_sum_is_rounded_once(folders):
    assert np.array_equal(scores(folders / "adapter", dtype="bfloat16"), scores(folders / "merged", dtype="bfloat16"))


def test_the_base_is_found_beside_the_adapter_and_in_headrank_json_first(folders, tmp_path):
    adapter = shutil.copytree(folders / "adapter", tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "../base"}))
    shutil.copytree(folders / "base", tmp_path / "base")
    assert np.array_equal(scores(adapter), scores(folders / "adapter"))
    (adapter / "headrank.json").write_text(json.dumps({"base": str(folders / "base")}))
    assert base_of(adapter) == str(folders / "base")


@pytest.mark.parametrize("name", ["", "/nowhere/at/all", None])
def test_a_base_that_is_not_there_is_named_with_the_remedy(folders, tmp_path, name):
    adapter = shutil.copytree(folders / "adapter", tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": name}))
    with pytest.raises(InputError, match="adapter_config.json: base_model_name_or_path .* is not a model; write there"):
        scores(adapter)


def test_an_adapter_of_another_model_is_refused(folders, tmp_path):
    other = make_tiny_model(tmp_path / "other", "qwen3", intermediate_size=80)
    adapter = shutil.copytree(folders / "adapter", tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(other)}))
    with pytest.raises(InputError, match="was it trained on another model"):
        scores(adapter)
