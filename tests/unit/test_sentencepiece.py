"""A model that brings only sentencepiece's tokenizer.model, as older Mistral and Llama do: converted at loading,
spans and all.
"""

from __future__ import annotations

import io

import pytest

from headrank.errors import InputError
from headrank.method.prompt import PromptTemplate
from headrank.method.spans import PromptEncoder
from headrank.reranking.model_sources import load_tokenizer, require_tokenizer_reader
from tests.tiny_models import _TEXT

sentencepiece = pytest.importorskip("sentencepiece", reason="needs the package sentencepiece (extra dev)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama's folder as it was before tokenizer.json."""
    from tests.tiny_models import tiny_config

    place = tmp_path_factory.mktemp("older")
    tiny_config("llama").save_pretrained(place)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_TEXT * 20),
        model_writer=model,
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        pad_id=-1,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    (place / "tokenizer.model").write_bytes(model.getvalue())
    (place / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}'
    )
    return place


def test_a_prompt_has_its_documents_where_their_tokens_are(folder) -> None:
    tokenizer = load_tokenizer(folder, "the older model")
    documents = [("", "The flea needs a warm host."), ("Violin", "Rosin makes the bow grip; 37 strings, café.")]
    encoded = PromptEncoder(tokenizer, PromptTemplate()).encode("how long does a flea live", documents)
    found = [tokenizer.decode(encoded.input_ids[start:end]).strip() for start, end in encoded.document_spans]
    assert len(found) == 2
    assert found[0].endswith("flea needs a warm host.") and "37 strings, café." in found[1]


def test_without_the_package_the_remedy_is_said(folder, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        InputError, match=r"tokenizer\.model only, which needs the package sentencepiece: pip install sentencepiece"
    ):
        require_tokenizer_reader(str(folder))


def test_a_folder_with_tokenizer_json_needs_nothing_more(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in ("tokenizer.model", "tokenizer.json"):
        (tmp_path / name).touch()
    require_tokenizer_reader(str(tmp_path))
