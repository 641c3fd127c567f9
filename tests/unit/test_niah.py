"""NIAH: decoding with positions against eager attention without cache, copy events by hand, needles, right answers
only.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from headrank.errors import InputError
from headrank.selection.needles import Needle, make_needles
from headrank.selection.niah import NiahSelection, copy_score, decode, is_right
from tests.tiny_models import make_tiny_model

STEPS = 6


@pytest.fixture(scope="module", params=["qwen3", "mistral", "gemma3"])
def model_directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("niah") / request.param, request.param)


def slow_decode(directory: Path, prompt_ids: list[int]) -> tuple[list[int], np.ndarray]:
    """Greedy decoding without cache; the position with the largest eager attention weight in the last row, by loops."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    ids, steps = list(prompt_ids), []
    for _ in range(STEPS):
        with torch.no_grad():
            output = model(torch.tensor([ids]), output_attentions=True, use_cache=False)
        layers = []
        for layer in output.attentions:
            layers.append(
                [max(range(len(ids)), key=lambda position, row=head[-1]: float(row[position])) for head in layer[0]]
            )
        steps.append(layers)
        ids.append(int(output.logits[0, -1].argmax()))
    return ids[len(prompt_ids) :], np.array(steps)


def test_positions_equal_eager_attention_without_cache_also_past_a_sliding_window(model_directory: Path) -> None:
    selection = NiahSelection.load(model_directory)
    prompt_ids = [3 + (7 * n * n + n) % 400 for n in range(130)]  # longer than the window of 96
    written, positions = decode(selection.generator.model, prompt_ids, max_new_tokens=STEPS, stop_ids=())
    slow_written, slow_positions = slow_decode(model_directory, prompt_ids)
    assert written == slow_written
    assert positions.shape == slow_positions.shape == (STEPS, 4, 8)
    assert (positions == slow_positions).mean() > 0.99  # two weights may be equal to the last bit


def test_decoding_ends_at_the_stop_token_and_does_not_count_it(tmp_path: Path) -> None:
    model = NiahSelection.load(make_tiny_model(tmp_path / "tiny")).generator.model
    prompt_ids = list(range(5, 40))
    written, _ = decode(model, prompt_ids, max_new_tokens=STEPS, stop_ids=())
    stop = written[-1]
    shorter, positions = decode(model, prompt_ids, max_new_tokens=STEPS, stop_ids={stop})
    assert shorter == written[: written.index(stop)] and len(positions) == len(shorter)


def test_a_copy_event_needs_the_right_place_and_the_right_token() -> None:
    prompt_ids = [9, 5, 6, 7, 5]  # the answer is tokens 1-3
    positions = np.array(
        [  # step -> one layer of five heads
            [[1, 4, 0, 2, 1]],
            [[2, 2, 2, 3, 1]],
        ]
    )
    # step 1 writes 5: heads 0 and 4 copy; head 1 looks at a 5 outside the needle. Step 2 writes 6: heads 0, 1, 2 copy
    assert copy_score(prompt_ids, (1, 4), [5, 6], positions).tolist() == [[2 / 3, 1 / 3, 1 / 3, 0.0, 1 / 3]]


def test_copy_scores_equal_loops(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    prompt_ids, written = list(rng.integers(0, 4, 30)), list(rng.integers(0, 4, 9))
    positions = rng.integers(0, 39, (9, 3, 2))  # 30 and above: tokens written before
    start, end = 8, 20
    expected = np.zeros((3, 2))
    for step, token in enumerate(written):
        for layer in range(3):
            for head in range(2):
                place = positions[step, layer, head]
                if start <= place < end and prompt_ids[place] == token:
                    expected[layer, head] += 1 / (end - start)
    assert expected.sum() > 0 and np.allclose(copy_score(prompt_ids, (start, end), written, positions), expected)


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("The best thing is to paint the old bridge with a kettle.", True),
        ("Paint the old bridge!", True),
        ("paint the bridge", False),
        ("the the the the a a a a", False),
        ("", False),
    ],
)
def test_an_answer_is_right_when_more_than_half_of_its_words_come_back(response: str, right: bool) -> None:
    assert is_right("paint the old bridge with a kettle", response) is right


def test_only_right_answers_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    selection = NiahSelection.load(make_tiny_model(tmp_path / "tiny"), max_new_tokens=4)
    needle = make_needles(1, haystack_words=20)[0]
    selection.ask(needle)  # a random model does not know
    assert selection.settings()["needles"] == 1 and selection.settings()["answered"] == 0
    with pytest.raises(InputError, match="none of 1 needle questions"):
        selection.columns()
    tokens = selection.generator.tokenizer(f" {needle.answer}")["input_ids"]
    position = selection._encode(f"{needle.text}\n\n{needle.question}", needle)[1][0]
    monkeypatch.setattr(
        "headrank.selection.niah.decode",
        lambda *_, **__: (tokens, np.full((len(tokens), 4, 8), position)),
    )
    assert needle.answer in selection.ask(needle)
    assert selection.settings()["answered"] == 1 and selection.columns()["copy_score"].shape == (4, 8)


def test_the_answer_span_holds_exactly_the_answer(tmp_path: Path) -> None:
    selection = NiahSelection.load(make_tiny_model(tmp_path / "tiny"))
    for needle in make_needles(5, haystack_words=30, seed=1):
        ids, (start, end) = selection._encode(f"{needle.text}\n\n{needle.question}", needle)
        assert selection.generator.tokenizer.decode(ids[start:end]).strip() == needle.answer


def test_needles_lie_at_all_depths_of_generated_or_given_text() -> None:
    needles = make_needles(5, haystack_words=60, seed=2)
    places = [needle.text.index(needle.sentence) / (len(needle.text) - len(needle.sentence)) for needle in needles]
    assert places[0] == 0.0 and places[-1] == 1.0 and places == sorted(places)
    for needle in needles:
        assert needle.text.count(needle.sentence) == 1 and needle.sentence.count(needle.answer) == 1
        assert len(needle.text.split()) == 60 + len(needle.sentence.split())
    assert needles == make_needles(5, haystack_words=60, seed=2) != make_needles(5, haystack_words=60, seed=3)
    passages = ["alpha beta gamma", "delta epsilon"]
    texts = [
        needle.text.replace(needle.sentence, "") for needle in make_needles(3, haystack_words=5, passages=passages)
    ]
    assert all(set(text.split()) == {"alpha", "beta", "gamma", "delta", "epsilon"} for text in texts)
    assert isinstance(needles[0], Needle)


def test_several_lengths_share_the_needles_and_each_has_all_depths() -> None:
    needles = make_needles(6, haystack_words=[40, 400], seed=1)
    lengths = [len(needle.text.split()) - len(needle.sentence.split()) for needle in needles]
    assert lengths == [40, 400] * 3
    for of_a_length in (needles[::2], needles[1::2]):
        places = [each.text.index(each.sentence) / (len(each.text) - len(each.sentence)) for each in of_a_length]
        assert (places[0], places[2]) == (0.0, 1.0) and 0.3 < places[1] < 0.7
