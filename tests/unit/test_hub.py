"""push_to_hub and back: what is uploaded, its model card, and from_pretrained by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import ModelCard

from headrank import HeadRankReranker, InputError
from headrank.commands import main
from headrank.integrations.hub import card_with_results, prepare_folder, read_results
from headrank.method.heads import HeadSet
from headrank.reranking.exported_model import write_headrank_files
from tests.hub_server import running_hub
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
QUERY, TEXTS = (
    "how long do fleas live",
    ["Fleas live two to three months.", "Rosin is made from resin.", "A floor of concrete."],
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model as export-hf lays it out."""
    folder = make_tiny_model(tmp_path_factory.mktemp("hub") / "exported")
    heads = HeadSet(((0, 1), (2, 3)), "headrank", "tiny", 4, 8)
    write_headrank_files(
        folder, heads, {"iteration": 7}, name="exported", base=folder, base_name="org/base", num_bytes=1
    )
    return folder


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.json"
    values = {"format": "headrank-metrics/1", "benchmark": "nfcorpus", "depth": 40, "num_queries": 308}
    path.write_text(json.dumps({**values, "measures": {"nDCG@10": 0.337549, "R@5": 0.25}}))
    return path


def test_results_are_the_hubs_model_index_and_a_table(exported: Path, metrics: Path, tmp_path: Path) -> None:
    prepare_folder(exported, tmp_path / "out", "org/name", metrics=[metrics])
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.pipeline_tag, card.data.library_name, card.data.base_model) == (
        "text-ranking",
        "headrank",
        "org/base",
    )
    found = {result.metric_type: result for result in card.data.eval_results}
    assert found["ndcg_at_10"].metric_value == 0.33755 and found["ndcg_at_10"].task_type == "text-ranking"
    assert found["ndcg_at_10"].dataset_type == "nfcorpus" and "40 candidates" in found["r_at_5"].dataset_name
    assert (
        "| nDCG@10 | 0.3375 |" in card.text
        and 'from_pretrained("org/name")' in card.text
        and "\n# org/name\n" in card.text
    )
    again = ModelCard(card_with_results(str(card), "org/name", read_results(metrics)[:1]))
    assert len(again.data.eval_results) == 1 and again.text.count("## Results") == 1, (
        "results are replaced, not repeated"
    )


def test_without_results_none_are_claimed_and_the_export_stays_as_it_is(exported: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in exported.iterdir()}
    assert main(["push", str(exported), "org/name", "--output", str(tmp_path / "out")]) == 0
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.eval_results is None and "Results" not in card.text
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == before


def test_an_adapter_gets_a_base_that_others_can_load(exported: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(exported)})
    )
    about = json.loads((exported / "headrank.json").read_text())
    (adapter / "headrank.json").write_text(json.dumps({"base": str(exported), **about}))
    with pytest.raises(InputError, match="a folder that nobody else has"):
        prepare_folder(adapter, tmp_path / "out", "org/name")
    prepare_folder(adapter, tmp_path / "named", "org/name", base="org/base")
    for name, key in (("adapter_config.json", "base_model_name_or_path"), ("headrank.json", "base")):
        assert json.loads((tmp_path / "named" / name).read_text())[key] == "org/base"
        assert json.loads((adapter / name).read_text())[key] == str(exported)


@pytest.mark.parametrize(
    ("folder", "flags", "message"),
    [
        ("empty", [], "no headrank.json there"),
        ("exported", ["--base", "org/base"], "needs no other"),
        ("exported", ["--metrics", "config.json"], "not a metrics.json"),
    ],
)
def test_what_cannot_be_pushed_is_one_line(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str, flags: list[str], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    source = exported if folder == "exported" else tmp_path / folder
    flags = [str(exported / flag) if flag.endswith(".json") else flag for flag in flags]
    assert main(["push", str(source), "org/name", "--output", str(tmp_path / "out"), *flags]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


_PUSH_AND_LOAD = """
import json, sys
from headrank import HeadRankReranker
from headrank.commands import main
folder, texts = sys.argv[1], json.loads(sys.argv[2])
code = main(["push", folder, "org/name"])
scores = HeadRankReranker.from_pretrained("org/name", device="cpu").score(texts[0], texts[1:])
print(json.dumps([code, [float(score) for score in scores]]))
"""
_LOAD_OFFLINE = _PUSH_AND_LOAD.replace('main(["push", folder, "org/name"])', "0")


def test_what_was_pushed_loads_back_by_its_name_and_from_the_cache_without_a_network(
    exported: Path, tmp_path: Path
) -> None:
    expected = HeadRankReranker.from_pretrained(exported, device="cpu").score(QUERY, TEXTS)
    with running_hub() as hub:
        common = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_HOME": str(tmp_path / "hf"),
            "HF_ENDPOINT": hub.address,
            "NO_PROXY": "127.0.0.1",
        }
        found = _run(
            _PUSH_AND_LOAD, exported, common | {"HF_TOKEN": "none", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        )
        assert set(hub.repositories["org/name"]) >= {
            "headrank.json",
            "README.md",
            "config.json",
            "model.safetensors",
            "tokenizer.json",
        }
    assert found[0] == 0
    np.testing.assert_array_equal(np.array(found[1], np.float32), expected)
    # the cache alone is a hub-like folder
    assert _run(_LOAD_OFFLINE, exported, common | {"HF_HUB_OFFLINE": "1"}) == found


def _run(code: str, folder: Path, environment: dict[str, str]) -> list:
    command = [sys.executable, "-c", code, str(folder), json.dumps([QUERY, *TEXTS])]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
