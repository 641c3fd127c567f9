"""The plain decoder and tokenizer give what transformers gives, and rerank without importing it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from headrank.errors import InputError
from headrank.reranking.decoder import Decoder, load_decoder
from headrank.reranking.decoder_files import DecoderShape
from headrank.reranking.plain_tokenizer import PlainTokenizer
from headrank.reranking.reader import AttentionReader
from tests.tiny_models import make_tiny_model

PLAIN = ("qwen3", "qwen2", "llama")
TEXTS = ["why is <|im_start|> the sea salty’s 12 é 🙂", "a\n\nb  c", ""]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plain")
    families = (*PLAIN, "mistral", "gemma3", "gpt_neox")
    return {family: make_tiny_model(folder / family, family) for family in families}


def sdpa(module, query, key, value, mask, headrank=None, **_):
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2), None


def hidden_states(
    folder: Path, dtype: torch.dtype, ids: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the plain decoder and transformers have behind the last layer, before the final norm."""
    shape = DecoderShape.read(folder)
    assert shape is not None
    ours = load_decoder(folder, shape, shape.num_hidden_layers, dtype)
    ours.attend = sdpa
    theirs = AutoModel.from_pretrained(folder, attn_implementation="sdpa", dtype=dtype)
    theirs.norm = torch.nn.Identity()
    with torch.inference_mode():
        return ours(ids, positions), theirs(input_ids=ids, position_ids=positions).last_hidden_state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", PLAIN)
def test_hidden_states_are_those_of_transformers_to_the_last_bit(models, family, dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 416, (2, 40), generator=generator)
    positions = torch.stack([torch.arange(40), torch.arange(40) + 700])  # also far positions: bf16 cannot count them
    ours, theirs = hidden_states(models[family], dtype, ids, positions)
    assert torch.equal(ours, theirs)


def test_attention_biases_are_loaded(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama", attention_bias=True)
    ours, theirs = hidden_states(folder, torch.float32, torch.arange(30)[None], torch.arange(30)[None])
    assert torch.equal(ours, theirs)


def test_models_of_another_shape_are_left_to_transformers(models, tmp_path: Path) -> None:
    # this mistral has a window
    assert all(DecoderShape.read(models[family]) is None for family in ("mistral", "gemma3", "gpt_neox"))
    scaled = make_tiny_model(
        tmp_path, "llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    )
    assert DecoderShape.read(scaled) is None
    assert not isinstance(AttentionReader.load(models["gemma3"]).model, Decoder)
    assert isinstance(AttentionReader.load(models["llama"]).model, Decoder)


@pytest.mark.parametrize("family", PLAIN)
def test_the_tokenizer_gives_the_ids_offsets_and_prompt_of_transformers(models, family) -> None:
    ours, theirs = PlainTokenizer.read(models[family]), AutoTokenizer.from_pretrained(models[family])
    assert ours is not None
    for special in (True, False):
        mine = ours(TEXTS, add_special_tokens=special)
        reference = theirs(TEXTS, add_special_tokens=special, return_offsets_mapping=True)
        assert mine["input_ids"] == reference["input_ids"]
        assert mine["offset_mapping"] == [list(map(tuple, row)) for row in reference["offset_mapping"]]
    for name in ("bos_token", "bos_token_id", "pad_token_id", "chat_template"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert set(ours.all_special_tokens) == set(theirs.all_special_tokens)
    assert {key: str(value) for key, value in ours.added_tokens_decoder.items()} == {
        key: str(value) for key, value in theirs.added_tokens_decoder.items()
    }
    turn, switches = (
        [{"role": "user", "content": "hi {{x}}"}],
        {"add_generation_prompt": True, "enable_thinking": False},
    )
    assert ours.apply_chat_template(turn, **switches) == theirs.apply_chat_template(turn, tokenize=False, **switches)


def test_a_template_that_refuses_is_one_line(models) -> None:
    tokenizer = PlainTokenizer.read(models["llama"])
    with pytest.raises(InputError, match="no system turn"):
        tokenizer.apply_chat_template([], chat_template="{{ raise_exception('no system turn') }}")


def test_missing_and_misshapen_weights_are_named(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 80}))
    with pytest.raises(InputError, match=r"12 weights are missing.*layers\.0\.mlp"):
        AttentionReader.load(folder)
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    with pytest.raises(InputError, match=r"missing.*layers\.4"):
        AttentionReader.load(folder)


def test_weights_above_the_last_layer_are_neither_read_nor_allocated(models) -> None:
    model = AttentionReader.load(models["qwen3"], last_layer=1).model
    assert {name.split(".")[1] for name, _ in model.named_parameters() if name.startswith("layers")} == {"0", "1"}


def test_reranking_imports_neither_transformers_nor_torch_compiler_nor_scipy(models) -> None:
    code = (
        "import sys\nfrom headrank import HeadRankReranker\n"
        f"HeadRankReranker.from_pretrained({str(models['llama'])!r}, heads='all').rank('why salty', ['the sea', "
        "'the cat'])\n"
        "heavy = [name for name in ('transformers', 'torch._dynamo', 'sympy', 'scipy', 'matplotlib', 'pandas') if "
        "name in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
