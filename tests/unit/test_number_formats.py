"""dtype: int8 weights stay close to float32 and are independent of the batch; auto takes what the processor can do."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from headrank import HeadRankReranker, placement
from headrank.commands import main
from headrank.errors import InputError
from headrank.reranking import reader as reader_module
from headrank.reranking.decoder import Projection
from headrank.reranking.int8 import Int8Projections, quantise_tokens
from headrank.reranking.reader import AttentionReader
from tests.tiny_models import make_tiny_model

PASSAGES = [
    "rivers carry salt into the sea",
    "the cat sat on the mat",
    "a scroll was found in a cave",
    "salt stays when water leaves",
]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("qwen"), "qwen2", std=0.05)


def projection(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Projection:
    made = Projection(weight.shape[1], len(weight), has_bias=bias is not None)
    made.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = torch.nn.Parameter(bias, requires_grad=False)
    return made


def test_a_hand_computed_product() -> None:
    """Weights and values that int8 holds exactly: channel scales 1/127 * 127 = 1 and 2, token scale 1."""
    weight, bias = torch.tensor([[127.0, -3.0], [254.0, 2.0]]), torch.tensor([0.5, -1.0])
    (product,) = Int8Projections([projection(weight, bias)])(torch.tensor([[127.0, 10.0]]))
    assert product.tolist() == [[127 * 127 - 30 + 0.5, 254 * 127 + 20 - 1.0]]


def test_every_token_has_its_own_scale_and_a_token_of_zeros_stays_zero() -> None:
    integers, scales = quantise_tokens(torch.tensor([[1e-3, -2e-3], [500.0, 250.0], [0.0, 0.0]]))
    assert integers.tolist() == [[64, -127], [127, 64], [0, 0]]
    assert torch.allclose(integers * scales, torch.tensor([[1e-3, -2e-3], [500.0, 250.0], [0.0, 0.0]]), rtol=0.01)


def test_joined_projections_give_what_each_gives_alone_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(size, 48, generator=generator) for size in (48, 16, 16)]
    values = torch.randn(3, 20, 48, generator=generator)
    together = Int8Projections([projection(weight) for weight in weights])(values)
    for weight, product in zip(weights, together, strict=True):
        (alone,) = Int8Projections([projection(weight)])(values[1:2, 5:9])
        assert torch.equal(product[1:2, 5:9], alone)
        exact = values @ weight.T
        assert (product - exact).norm() < 0.01 * exact.norm()


def test_int8_scores_are_close_and_the_ranking_is_usable(qwen: Path) -> None:
    exact = HeadRankReranker.from_pretrained(qwen, "all", dtype="float32").score("why is the sea salty", PASSAGES)
    integer = HeadRankReranker.from_pretrained(qwen, "all", dtype="int8").score("why is the sea salty", PASSAGES)
    exact_N, integer_N = torch.tensor(exact), torch.tensor(integer)
    assert not torch.equal(exact_N, integer_N)
    assert (exact_N - integer_N).abs().max() < 0.2 * exact_N.std()


def test_int8_is_refused_where_there_is_no_kernel(tmp_path: Path, qwen: Path) -> None:
    gemma = make_tiny_model(tmp_path, "gemma3")
    with pytest.raises(InputError, match=r"int8.*Llama, Mistral, Qwen2 or Qwen3.*bfloat16"):
        AttentionReader.load(gemma, dtype="int8")
    with pytest.raises(InputError, match="int7"):
        AttentionReader.load(qwen, dtype="int7")


def test_auto_is_bfloat16_only_for_large_models_on_a_processor_that_is_good_at_it(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "fast_bfloat16", lambda: "AMX")
    assert AttentionReader.load(qwen, dtype="auto", device="cpu").model.dtype == torch.float32
    monkeypatch.setattr(reader_module, "_SMALLEST_FOR_BFLOAT16", 1)
    assert AttentionReader.load(qwen, dtype="auto", device="cpu").model.dtype == torch.bfloat16
    monkeypatch.setattr(placement, "fast_bfloat16", lambda: None)
    assert AttentionReader.load(qwen, dtype="auto", device="cpu").model.dtype == torch.float32


def test_bfloat16_that_kills_the_process_is_noticed_in_a_child() -> None:
    assert placement._survives(lambda: torch.ones(8, 8) @ torch.ones(8, 8))
    assert not placement._survives(lambda: os.kill(os.getpid(), signal.SIGILL))


def test_threads_never_exceed_the_cores_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        monkeypatch.setattr(placement, "available_cores", lambda: 3)
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
        assert placement.use_available_cores() == 4  # the user chose
        monkeypatch.delenv("OMP_NUM_THREADS")
        assert placement.use_available_cores() == 3
        monkeypatch.setattr(placement, "available_cores", lambda: 64)
        assert placement.use_available_cores() == 3  # never raised: torch or the caller had a reason
    finally:
        torch.set_num_threads(before)


def test_threads_of_the_command_win_over_the_environment(
    monkeypatch: pytest.MonkeyPatch, qwen: Path, tmp_path: Path
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    try:
        assert main(["doctor", "--model", str(qwen), "--heads", "all", "--threads", "2"]) in (0, 1)
        assert torch.get_num_threads() == placement.use_available_cores() == 2
    finally:
        torch.set_num_threads(before)


def test_what_was_chosen_is_said_in_one_line(qwen: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="headrank.reranking.reader")
    for dtype, words in ((None, "float32 on cpu"), ("bfloat16", "bfloat16 on cpu"), ("int8", "int8 on cpu")):
        caplog.clear()
        AttentionReader.load(qwen, dtype=dtype, device="cpu")
        (line,) = caplog.messages
        assert re.fullmatch(rf"{words}, \d+ threads", line)


GPUS = {"V100": (7, 0), "A100": (8, 0), "H100": (9, 0)}


@pytest.mark.parametrize(
    ("gpu", "dtype", "asked", "kernel"),
    [
        ("A100", torch.bfloat16, "auto", "flash"),
        ("H100", torch.float32, "auto", "efficient"),
        ("V100", torch.float16, "auto", "efficient"),
        ("H100", torch.bfloat16, "cudnn", "cudnn"),
        ("A100", torch.bfloat16, "math", "math"),
    ],
)
def test_the_attention_kernel_follows_gpu_and_format(
    monkeypatch: pytest.MonkeyPatch, gpu: str, dtype, asked: str, kernel: str
) -> None:
    """There is no GPU here: its compute capability is a stand-in, and torch's switches are recorded instead of
    turned.
    """
    turned: dict[str, bool] = {}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: GPUS[gpu])
    for name in ("flash", "cudnn", "mem_efficient"):
        monkeypatch.setattr(
            torch.backends.cuda, f"enable_{name}_sdp", lambda is_on, name=name: turned.update({name: is_on})
        )
    monkeypatch.setenv("HEADRANK_ATTENTION", asked)
    device = torch.device("cuda:0")
    assert placement.describe(device, "x", dtype=dtype) == f"x on cuda:0, {kernel} attention"
    wanted = {"flash": False, "cudnn": asked == "cudnn", "mem_efficient": asked != "math"}
    assert turned == ({} if asked == "auto" else wanted)  # left to torch where nobody asked


def test_an_attention_kernel_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    # a stand-in, there is no GPU here
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: GPUS["V100"])
    for asked, words in (("fast", "is no attention kernel; give auto, flash"), ("flash", "compute capability 8")):
        monkeypatch.setenv("HEADRANK_ATTENTION", asked)
        with pytest.raises(InputError, match=words):
            placement.choose_attention(torch.device("cuda:0"), torch.float16)
    assert placement.fastest_float(torch.device("cuda:0"), torch.bfloat16) == (
        torch.float32,
        "this GPU has no bfloat16",
    )
