"""The late layout: against transformers' eager attention with an explicit mask, and what makes it late: lists do not
matter.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from headrank.errors import InputError
from headrank.method.heads import HeadSet
from headrank.method.late_layout import (
    PassageKeys,
    QueryVectors,
    key_pairs,
    late_head_values,
    late_scores,
    passage_log_sums,
)
from headrank.method.late_prompt import LateEncoder, late_limit
from headrank.method.prompt import PromptTemplate
from headrank.method.readout import Readout
from headrank.reranking.late_reader import LateReader
from headrank.reranking.reader import AttentionReader
from tests.tiny_models import make_tiny_model, tiny_config, tiny_tokenizer

OF_A_LISTS_DEVIATION = 1e-4  # float32, another order of summation
QUERY = "how long does a flea live"
DOCUMENTS = [
    ("Flea", "The flea lives for two to three months."),
    ("", "Concrete floors cost six dollars."),
    ("Violin", "Rosin makes the bow grip the string."),
    ("", "A"),
]
PROMPT = PromptTemplate(
    opening="<|im_start|>user\n",
    instruction="Query: ",
    use_chat_template=False,
    document_layout="late",
    branch_position=64,
)
EXACT_FAMILIES = ("qwen3", "qwen2", "llama", "gemma3")
WINDOW = 160


def random_case(seed: int = 0) -> tuple[QueryVectors, PassageKeys, tuple[int, ...]]:
    """Two queries of 3 and 2 rows, three passages of 4, 2 and 0 tokens, three heads on two key pairs."""
    generator = torch.Generator().manual_seed(seed)
    weights_UR = torch.tensor([[1 / 3, 1 / 3, 1 / 3], [0.5, 0.5, 0.0]])
    queries = QueryVectors(
        torch.randn(2, 3, 3, 8, generator=generator), torch.randn(2, 3, 3, generator=generator), weights_UR
    )
    return queries, PassageKeys(torch.randn(3, 2, 4, 8, generator=generator), torch.tensor([4, 2, 0])), (1, 0, 1)


def test_scores_equal_a_loop_over_heads_rows_and_tokens() -> None:
    queries, passages, pair_of_head = random_case()
    weights_K, offsets_K, floor = torch.tensor([0.7, -2.0, 1.5]), torch.tensor([0.1, 0.2, -0.3]), 0.1
    scores_UN = late_scores(queries, passages, pair_of_head, weights_K, offsets_K, floor)
    for query, num_rows in enumerate((3, 2)):
        for passage, length in enumerate((4, 2)):
            expected = 0.0
            for head, pair in enumerate(pair_of_head):
                for row in range(num_rows):
                    vector = queries.vectors_UKRD[query, head, row].tolist()
                    keys = passages.keys_NATD[passage, pair, :length].tolist()
                    mass = math.fsum(
                        math.exp(math.fsum(q * k for q, k in zip(vector, key, strict=True))) for key in keys
                    )
                    ratio = mass * math.exp(-float(queries.opening_UKR[query, head, row]) - float(offsets_K[head]))
                    expected += float(weights_K[head]) * math.log(ratio + floor) / num_rows
            assert float(scores_UN[query, passage]) == pytest.approx(expected, abs=1e-4)
    assert (scores_UN[:, 2] == 0).all(), "an empty passage says nothing; who ranks puts it last"


def test_a_hand_computed_late_score() -> None:
    """q.k = 1 and 2 on two tokens, 0 over the opening, weight 2: 2 log(e + e^2)."""
    queries = QueryVectors(torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1), torch.ones(1, 1))
    passages = PassageKeys(torch.tensor([[[[1.0], [2.0], [77.0]]]]), torch.tensor([2]))
    assert float(late_scores(queries, passages, (0,), torch.tensor([2.0]))) == pytest.approx(
        2 * math.log(math.e + math.e**2)
    )


def test_heads_sharded_over_ranks_add_up_and_gradients_are_finite() -> None:
    queries, passages, pair_of_head = random_case(1)
    weights_K = torch.tensor([0.7, -2.0, 1.5])
    keys_NATD = passages.keys_NATD.clone().requires_grad_()
    whole = late_scores(queries, PassageKeys(keys_NATD, passages.lengths_N), pair_of_head, weights_K, floor=0.1)
    parts = []
    for heads in ([0, 2], [1]):
        own = QueryVectors(queries.vectors_UKRD[:, heads], queries.opening_UKR[:, heads], queries.weights_UR)
        parts.append(late_scores(own, passages, [pair_of_head[head] for head in heads], weights_K[heads], floor=0.1))
    assert torch.allclose(whole.detach(), sum(parts), atol=1e-5)
    whole.sum().backward()
    assert keys_NATD.grad is not None and torch.isfinite(keys_NATD.grad).all()
    assert (keys_NATD.grad[1, :, 2:] == 0).all() and (keys_NATD.grad[2] == 0).all(), "padding carries no gradient"


def test_padding_and_other_passages_change_no_bit_of_a_score() -> None:
    queries, passages, pair_of_head = random_case(2)
    scores_UN = late_scores(queries, passages, pair_of_head, torch.ones(3), floor=0.1)
    for passage in (0, 1):
        alone = PassageKeys(passages.keys_NATD[passage : passage + 1], passages.lengths_N[passage : passage + 1])
        assert torch.equal(
            late_scores(queries, alone, pair_of_head, torch.ones(3), floor=0.1)[:, 0], scores_UN[:, passage]
        )


def test_key_pairs_name_each_group_once() -> None:
    pairs, pair_of_head = key_pairs([(3, 5), (1, 0), (3, 3), (1, 2)], group_size=3)
    assert pairs == ((1, 0), (3, 1)) and pair_of_head == (1, 0, 1, 0)


def every_head(num_layers: int = 4, num_heads: int = 8, prompt: PromptTemplate = PROMPT) -> HeadSet:
    """All heads of a tiny model in a shuffled order, with weights of both signs."""
    heads = [(layer, head) for layer in range(num_layers) for head in range(num_heads)]
    random.Random(0).shuffle(heads)
    weights = tuple(random.Random(1).uniform(-1, 1) for _ in heads)
    readout = Readout(weights=weights, floor=0.1, offsets=tuple(0.01 * place for place in range(len(heads))))
    return HeadSet(tuple(heads), "readout", "tiny", num_layers, num_heads, prompt=prompt, readout=readout)


def late_reader(directory: Path, heads: HeadSet | None = None) -> LateReader:
    return LateReader(AttentionReader.load(directory), heads or every_head())


def scores_of(reader: LateReader, query: str, documents: list[tuple[str, str]]) -> list[float]:
    passages, vectors = (
        reader.encoder.encode_passages(documents),
        reader.query_vectors(reader.encoder.encode_query(query)),
    )
    scores = [0.0] * len(documents)
    for indices, keys in reader.passage_keys(passages):
        for index, score in zip(indices, reader.scores(vectors, keys).tolist(), strict=True):
            scores[index] = score
    return scores


@pytest.fixture(scope="module", params=EXACT_FAMILIES)
def model_directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"sliding_window": WINDOW} if request.param == "gemma3" else {}
    return make_tiny_model(tmp_path_factory.mktemp(request.param), request.param, **changes)


def eager_head_values(directory: Path, query: str, document: tuple[str, str], heads: HeadSet) -> list[list[float]]:
    """[layer][head] of mean_i log(passage mass / opening mass), from transformers' eager attention over one sequence.

    [opening | passage | branch]; the branch's mask hides the passage in every layer but the one that is measured, so
    that what is measured was mixed with no passage.
    """
    model = AutoModel.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()
    encoder = LateEncoder(AutoTokenizer.from_pretrained(directory), heads.prompt)
    passage, branch = encoder.encode_passages([document])[0], encoder.encode_query(query)
    parts = [encoder.opening_ids, passage.input_ids, branch.input_ids]
    opening, second = len(parts[0]), len(parts[0]) + len(parts[1])
    length = second + len(parts[2])
    positions = [*range(second), *(heads.prompt.branch_position + step for step in range(len(parts[2])))]
    lowest = torch.finfo(torch.float32).min
    hidden = torch.full((length, length), lowest).triu(1)
    measured = hidden.clone()
    hidden[second:, opening:second] = lowest

    def mask(values: torch.Tensor) -> Any:
        is_mixed = "sliding_attention" in (getattr(model.config, "layer_types", None) or [])
        return (
            dict.fromkeys(("full_attention", "sliding_attention"), values[None, None])
            if is_mixed
            else values[None, None]
        )

    values = []
    for layer in range(model.config.num_hidden_layers):
        hook = model.layers[layer].self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: (args, kwargs | {"attention_mask": measured[None, None]}), with_kwargs=True
        )
        with torch.no_grad():
            ids = torch.tensor([[int(token) for part in parts for token in part]])
            output = model(
                ids,
                position_ids=torch.tensor([positions]),
                attention_mask=mask(hidden),
                output_attentions=True,
                use_cache=False,
            )
        hook.remove()
        rows = output.attentions[layer][0].double()[:, second + branch.first_row :]
        values.append((rows[..., opening:second].sum(-1).log() - rows[..., :opening].sum(-1).log()).mean(-1).tolist())
    return values


def test_every_head_equals_eager_attention_with_an_explicit_mask(model_directory: Path) -> None:
    heads = every_head()
    plain = HeadSet(
        heads.heads,
        "readout",
        "tiny",
        4,
        8,
        prompt=PROMPT,
        readout=Readout(weights=heads.readout.weights if heads.readout else ()),
    )
    reader = late_reader(model_directory, plain)
    vectors = reader.query_vectors(reader.encoder.encode_query(QUERY))
    values_NK = np.zeros((len(DOCUMENTS), len(heads.heads)))
    for indices, keys in reader.passage_keys(reader.encoder.encode_passages(DOCUMENTS)):
        values_NK[indices] = late_head_values(vectors, keys, reader.pair_of_head)[0].numpy()
    expected_NK = np.array(
        [
            [values[layer][head] for layer, head in heads.heads]
            for values in (eager_head_values(model_directory, QUERY, document, plain) for document in DOCUMENTS)
        ]
    )
    deviation_K = expected_NK.std(0)
    assert (
        np.abs((values_NK - values_NK.mean(0)) - (expected_NK - expected_NK.mean(0)))
        < 5 * OF_A_LISTS_DEVIATION * deviation_K + 2e-5
    ).all()
    weights = np.array(plain.readout.weights if plain.readout else ())
    scores, expected = scores_of(reader, QUERY, DOCUMENTS), expected_NK @ weights
    assert np.abs(scores - expected).max() < OF_A_LISTS_DEVIATION * expected.std()


def test_a_score_is_the_same_bits_alone_in_any_list_and_in_any_order(model_directory: Path) -> None:
    reader = late_reader(model_directory)
    words = "the flea lives for two months and a floor costs six dollars".split()
    documents = [
        ("", " ".join(random.Random(number).choices(words, k=random.Random(number).randint(1, 12))))
        for number in range(14)
    ]
    together = scores_of(reader, QUERY, documents)
    assert len(set(together)) > 7, "the scores differ"
    for seed in range(3):
        order = random.Random(seed).sample(range(14), 5 + seed)
        assert scores_of(reader, QUERY, [documents[index] for index in order]) == [together[index] for index in order]
    assert scores_of(reader, QUERY, documents[3:4]) == together[3:4]


def test_a_passage_that_reaches_the_branch_is_cut_and_flagged(model_directory: Path) -> None:
    reader = late_reader(model_directory)
    short, long = reader.encoder.encode_passages([("", "a flea"), ("", "a flea lives " * 60)])
    assert not short.is_shortened and long.is_shortened
    assert len(long.input_ids) == PROMPT.branch_position - len(reader.encoder.opening_ids)
    assert np.isfinite(scores_of(reader, QUERY, [("", "a flea lives " * 60)])).all()


def test_a_query_that_does_not_fit_is_named_with_its_remedy() -> None:
    encoder = LateEncoder(tiny_tokenizer(), PROMPT, max_length=100)
    with pytest.raises(InputError, match="shorten the query"):
        encoder.encode_query("flea " * 60)
    with pytest.raises(InputError, match="empty query"):
        encoder.encode_query("  ")


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("gemma3", {"sliding_window": 80}, "sliding window of 80"),
        ("mistral", {"sliding_window": 72}, "sliding window of 72"),
        ("llama", {"max_position_embeddings": 90}, "context of 90"),
        (
            "llama",
            {
                "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
                "max_position_embeddings": 90,
            },
            "90",
        ),
    ],
)
def test_a_model_without_room_for_the_branch_is_refused_with_the_reason(
    family: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        late_limit(tiny_config(family, **changes), PROMPT, "tiny")


def test_long_rope_counts_its_original_context() -> None:
    config = tiny_config("llama", max_position_embeddings=2048)
    config.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 80, "factor": 4.0}
    with pytest.raises(InputError, match="original context of its longrope"):
        late_limit(config, PROMPT, "tiny")
    config.rope_parameters = {"rope_type": "default"}
    assert late_limit(config, PROMPT, "tiny") == 2048
    assert late_limit(tiny_config("qwen2"), PROMPT, "tiny") == 2048, "qwen2 names a window that it does not use"


def test_the_short_prompt_opens_the_users_turn_and_nothing_else(model_directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    template = PromptTemplate.short(tokenizer, document_layout="late")
    assert (template.opening, template.instruction) == ("<|im_start|>user\n", "Query: ")
    tokenizer.chat_template = None
    assert PromptTemplate.short(tokenizer).opening == "\n", (
        "without a template there is still something to compare with"
    )


def test_log_sums_of_an_empty_passage_are_minus_infinity() -> None:
    queries, passages, pair_of_head = random_case()
    sums_UNKR = passage_log_sums(queries, passages, pair_of_head)
    assert torch.isneginf(sums_UNKR[:, 2]).all() and torch.isfinite(sums_UNKR[:, :2]).all()
