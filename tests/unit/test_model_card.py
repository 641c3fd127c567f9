"""The model card states what was handed in and nothing else."""

from __future__ import annotations

import dataclasses

import pytest
import yaml

from headrank.method.heads import HeadSet
from headrank.method.prompt import PromptTemplate
from headrank.reranking.model_card import model_card

HEADS = HeadSet(((11, 2), (3, 0)), "headrank", "base", 28, 16)


def card(**changes) -> str:
    options = {
        "is_truncated": False,
        "training": {"iteration": 7, "config": {"lr": 1e-5, "list": [1], "note": "a|b"}},
        **changes,
    }
    return model_card("org/model", "Qwen/Qwen3-0.6B", HEADS, **options)


def front_matter(text: str) -> dict:
    assert text.startswith("---\n")
    return yaml.safe_load(text.split("---\n")[1])


def test_the_front_matter_is_yaml_with_the_hubs_ranking_task():
    values = front_matter(card(license_name="apache-2.0"))
    assert (values["pipeline_tag"], values["base_model"], values["license"]) == (
        "text-ranking",
        "Qwen/Qwen3-0.6B",
        "apache-2.0",
    )
    assert "license" not in front_matter(card())


def test_the_snippet_is_python_that_names_the_model():
    snippet = card().split("```python\n")[1].split("```")[0]
    compile(snippet, "card", "exec")
    assert 'from_pretrained("org/model")' in snippet


@pytest.mark.parametrize(
    ("is_truncated", "words"), [(True, "only the 12 of 28 layers"), (False, "All 28 layers are here")]
)
def test_the_depth_is_stated(is_truncated, words):
    assert words in card(is_truncated=is_truncated)


def test_passages_that_are_read_side_by_side_are_said_to_be():
    heads = dataclasses.replace(HEADS, prompt=PromptTemplate(document_layout="parallel"))
    said = "It uses the parallel layout"
    assert said in model_card("org/model", "base", heads, is_truncated=False, training={}) and said not in card()


def test_training_facts_become_a_table_and_none_are_made_up():
    text = card()
    assert (
        "| iteration | 7 |" in text
        and "| config.lr | 1e-05 |" in text
        and "| config.note | a\\|b |" in text
        and "config.list" not in text
    )
    assert "No training facts" in card(training={})
