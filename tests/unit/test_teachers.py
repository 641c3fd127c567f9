"""Teachers give the scores that their models give: against a plain forward, a sum by hand, and the reranker itself."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from data_tools.teachers.teacher import TeacherSpec, kind_of, open_teacher, passage_text
from headrank.commands import main
from headrank.errors import InputError
from headrank.formats import Document, read_run
from tests.toy_collections import make_collection

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "flea", "host", "warm", "cycle", "stone", "river", "salt", "harbour"]
CLOSE = 1e-5  # one forward of float32 against batches with padding
LISTS = [
    (
        "warm host",
        [Document("a", "flea", "cycle host warm"), Document("b", "", "stone river salt salt river stone harbour")],
    ),
    ("river", [Document("c", "", "salt")]),
    ("flea cycle", [Document("d", "", ""), Document("e", "stone", "river"), Document("f", "", "warm " * 30)]),
]


def word_tokenizer() -> Tokenizer:
    """One id per word, [CLS] query [SEP] passage [SEP] as BERT."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random cross-encoder of two layers, as transformers saves one."""
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("teacher") / "tiny-bert"
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        num_labels=1,
    )
    model = BertForSequenceClassification(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    model.save_pretrained(folder)
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=word_tokenizer(), model_max_length=64, **special).save_pretrained(folder)
    return folder


def field(number: int, content: bytes | int) -> bytes:
    """One field of a protocol buffer: a varint, or bytes with their length."""

    def varint(value: int) -> bytes:
        parts = bytearray()
        while value > 0x7F:
            parts.append(value & 0x7F | 0x80)
            value >>= 7
        return bytes([*parts, value])

    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    return varint(number << 3 | 2) + varint(len(content)) + content


def sum_of_ids_model() -> bytes:
    """A real ONNX model, logits [B, 1] = sum over tokens of input_ids * attention_mask, written field by field."""

    def value(name: str, kind: int, *dimensions: str) -> bytes:
        shape = b"".join(field(1, field(2, dimension.encode())) for dimension in dimensions)
        return field(1, name.encode()) + field(2, field(1, field(1, kind) + field(2, shape)))

    def node(kind: str, inputs: list[str], output: str, *attributes: bytes) -> bytes:
        named = (
            b"".join(field(1, name.encode()) for name in inputs) + field(2, output.encode()) + field(4, kind.encode())
        )
        return field(1, named + b"".join(field(5, attribute) for attribute in attributes))

    def integer(name: str, number: int) -> bytes:
        return field(1, name.encode()) + field(3, number) + field(20, 2)

    axes = field(1, b"axes") + field(8, 1) + field(20, 7)
    graph = node("Mul", ["input_ids", "attention_mask"], "kept") + node("Cast", ["kept"], "real", integer("to", 1))
    graph += node("ReduceSum", ["real"], "logits", axes, integer("keepdims", 1)) + field(2, b"sum")
    graph += b"".join(field(11, value(name, 7, "B", "S")) for name in ("input_ids", "attention_mask"))
    graph += field(12, value("logits", 1, "B", "one"))
    return field(1, 7) + field(7, graph) + field(8, field(1, b"") + field(2, 11))


@pytest.fixture(scope="module")
def onnx_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("onnx")
    (folder / "model.onnx").write_bytes(sum_of_ids_model())
    word_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def by_hand(query: str, document: Document, max_tokens: int) -> float:
    """[CLS] query [SEP] passage [SEP], the longer of the two cut until all fit, every token its number."""
    query_words, passage_words = query.split(), passage_text(document).split()
    while len(query_words) + len(passage_words) > max_tokens - 3:
        (query_words if len(query_words) > len(passage_words) else passage_words).pop()
    return float(sum(map(WORDS.index, ["[CLS]", *query_words, "[SEP]", *passage_words, "[SEP]"])))


@pytest.mark.parametrize("batch_size", [1, 2, 16])
@pytest.mark.parametrize("max_tokens", [12, 320])
def test_an_onnx_folders_scores_equal_a_sum_by_hand_whatever_the_batch(
    onnx_folder: Path, batch_size: int, max_tokens: int
) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra 'teacher'")
    teacher = open_teacher(TeacherSpec(str(onnx_folder), batch_size=batch_size, max_tokens=max_tokens))
    expected = [[by_hand(query, document, max_tokens) for document in documents] for query, documents in LISTS]
    assert [scores.tolist() for scores in teacher.score_lists(LISTS)] == expected


def test_an_onnx_folder_is_labelled_from_the_command_line(onnx_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra 'teacher'")
    make_collection(tmp_path / "web", {"q1": [None] * 3})
    words = [
        "label",
        "--collection",
        str(tmp_path / "web"),
        "--teacher",
        str(onnx_folder),
        "--output",
        str(tmp_path / "run.trec"),
    ]
    assert main(words) == 0 and len(read_run(tmp_path / "run.trec")["q1"]) == 3
    known = json.loads((tmp_path / "run.trec.json").read_text())["inputs"]["teacher"]
    assert known["kind"] == "onnx" and known["max_tokens"] == 320 and len(known["model_sha256"]) == 16


def test_a_broken_onnx_file_is_one_line(onnx_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra 'teacher'")
    (tmp_path / "model.onnx").write_bytes(sum_of_ids_model()[:40])
    (tmp_path / "tokenizer.json").write_bytes((onnx_folder / "tokenizer.json").read_bytes())
    with pytest.raises(InputError, match="cannot be loaded"):
        open_teacher(TeacherSpec(str(tmp_path)))


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_cross_encoders_scores_equal_the_logits_of_its_own_forward(bert: Path, batch_size: int) -> None:
    pytest.importorskip("sentence_transformers", reason="needs the extra 'teacher'")
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(bert), AutoTokenizer.from_pretrained(bert)
    teacher = open_teacher(TeacherSpec(str(bert), batch_size=batch_size, max_tokens=24, device="cpu"))
    for (query, documents), scores in zip(LISTS, teacher.score_lists(LISTS), strict=True):
        for document, score in zip(documents, scores, strict=True):
            # as a list of pairs: tokenizer(query, "") would take an empty passage for none at all
            inputs = tokenizer([(query, passage_text(document))], truncation=True, max_length=24, return_tensors="pt")
            with torch.no_grad():
                assert score == pytest.approx(float(model(**inputs).logits[0, 0]), abs=CLOSE)
    assert teacher.identity()["kind"] == "cross-encoder" and teacher.identity()["name"] == "tiny-bert"
    assert any(abs(score) > 1 for scores in teacher.score_lists(LISTS) for score in scores), "logits, not probabilities"


def test_a_classifier_of_three_classes_is_no_teacher(bert: Path, tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers", reason="needs the extra 'teacher'")
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=48,
        num_labels=3,
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="3 output classes"):
        open_teacher(TeacherSpec(str(tmp_path), device="cpu"))


def test_a_headrank_models_scores_are_those_of_its_reranker(tiny_model: Callable[[str], Path]) -> None:
    from headrank import HeadRankReranker

    folder = tiny_model("qwen3")
    teacher = open_teacher(TeacherSpec(str(folder), heads="all", device="cpu"))
    reranker = HeadRankReranker.from_pretrained(folder, "all", device="cpu")
    lists = [(query, [document for document in documents if document.text]) for query, documents in LISTS]
    for (query, documents), scores in zip(lists, teacher.score_lists(lists), strict=True):
        ranked = reranker.rank(query, [{"title": document.title, "text": document.text} for document in documents])
        assert {row["corpus_id"]: row["score"] for row in ranked} == pytest.approx(dict(enumerate(scores)), abs=CLOSE)
    assert teacher.identity()["kind"] == "headrank"


@pytest.mark.parametrize(
    ("name", "files", "kind"),
    [
        ("https://example.org/v2/rerank", [], "endpoint"),
        ("embedded", [], "headrank"),
        ("{folder}", ["headrank.json"], "headrank"),
        ("{folder}", ["model.onnx"], "onnx"),
        ("{folder}", ["onnx/model.onnx"], "onnx"),
        ("{folder}", ["config.json"], "cross-encoder"),
        ("someone/some-reranker", [], "cross-encoder"),
    ],
)
def test_the_kind_follows_from_the_name_and_the_folder(tmp_path: Path, name: str, files: list[str], kind: str) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("{}")
    assert kind_of(TeacherSpec(name.format(folder=tmp_path))) == kind


def test_a_title_is_a_line_of_its_own_and_words_are_cut_after_it() -> None:
    assert passage_text(Document("d", "A title", "one two three"), 2) == "A title\none two"
    assert passage_text(Document("d", "", "one  two")) == "one  two"


def test_the_real_cross_encoder_grades_as_its_card_says() -> None:
    """The published int8 model: about 9 for an answer, below -10 for something else."""
    pytest.importorskip("onnxruntime", reason="needs the extra 'teacher'")
    folder = Path(os.environ.get("HEADRANK_TEST_TEACHER", Path.home() / ".cache" / "hr-models" / "minilm-l12"))
    if not (folder / "model.onnx").is_file():
        pytest.skip(f"no cross-encoder in {folder}; HEADRANK_TEST_TEACHER can name an ONNX folder")
    query = "How many people live in Berlin?"
    answer = "Berlin had a population of 3,520,031 registered inhabitants in an area of 891.82 square kilometers."
    other = "New York City is famous for the Metropolitan Museum of Art."
    lists: list[Any] = [(query, [Document("a", "", answer), Document("b", "", other)])]
    ((good, bad),) = open_teacher(TeacherSpec(str(folder))).score_lists(lists)
    assert good > 5 and bad < -5
