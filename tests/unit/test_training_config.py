"""The command line: what is refused, with which words, and what is derived."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrank.errors import InputError
from headrank.heads import HeadSet
from megatron_patches.arguments import HEADRANK_FLAGS, MEGATRON_FLAGS, NETWORK_FLAGS, build_parser, parse_arguments
from megatron_patches.config import changed_fields, check_backend, check_heads, check_network_flags, config_from
from megatron_patches.shape import ModelShape
from tests.tiny_models import tiny_config

REQUIRED = ["--headrank-model", "m", "--headrank-heads", "h.json", "--train-data-path", "d", "--lr", "1e-5"]


def config(*flags: str, world_size: int = 1):
    return config_from(parse_arguments([*REQUIRED, *flags]), world_size)


@pytest.mark.parametrize(
    ("flags", "world_size", "words"),
    [
        (["--pipeline-model-parallel-size", "2"], 2, "tensor and data parallelism"),
        (["--context-parallel-size", "2"], 2, "remove it"),
        (["--fp16"], 1, "--bf16"),
        (["--recompute-granularity", "selective"], 1, "--recompute-granularity full"),
        (["--ckpt-format", "torch"], 1, "torch_dist"),
        (["--attention-dropout", "0.1"], 1, "--attention-dropout"),
        (["--overlap-param-gather"], 1, "--use-distributed-optimizer"),
        (["--train-iters", "5", "--train-samples", "5"], 1, "give one"),
        (["--eval-interval", "5"], 1, "--valid-data-path"),
        (["--save-interval", "5"], 1, "--save"),
        (["--tensor-model-parallel-size", "3"], 4, "--nproc-per-node"),
        (["--global-batch-size", "6", "--micro-batch-size", "2"], 2, "multiple of 4"),
        (["--train-iters", "0"], 1, "above 0"),
        (["--global-batch-size", "-2"], 1, "--global-batch-size -2 must be above 0"),
        (["--global-batch-size", "0"], 1, "--global-batch-size 0 must be above 0"),
        (["--micro-batch-size", "0"], 1, "--micro-batch-size 0 must be above 0"),
        (["--clip-grad", "nan"], 1, "--clip-grad nan must not be below 0"),
        (["--adam-beta2", "1"], 1, "--adam-beta2 1.0 must be at least 0 and below 1"),
        (["--min-lr", "1"], 1, "above --lr"),
        (["--headrank-margin", "-1"], 1, "negative"),
        (["--headrank-permutations", "-1"], 1, "negative"),
        (["--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"], 1, "give one"),
    ],
)
def test_contradictions_are_refused_with_what_to_change(flags, world_size, words):
    with pytest.raises(InputError, match=words):
        config(*flags, world_size=world_size)


@pytest.mark.parametrize("missing", ["--headrank-model", "--headrank-heads", "--train-data-path", "--lr"])
def test_a_missing_required_flag_is_named(missing):
    at = REQUIRED.index(missing)
    with pytest.raises(InputError, match=f"{missing} is missing"):
        config_from(parse_arguments(REQUIRED[:at] + REQUIRED[at + 2 :]), 1)


def test_micro_batches_follow_from_the_sizes():
    made = config("--global-batch-size", "32", "--tensor-model-parallel-size", "2", world_size=8)
    assert (made.data_parallel, made.num_microbatches) == (4, 8)


def test_an_epoch_is_rounded_up_to_whole_steps():
    assert config("--global-batch-size", "32").with_length(91_000).train_iters == 2844  # the paper's 91K pairs at 32
    assert config("--train-iters", "7").with_length(91_000).train_iters == 7
    assert config("--train-samples", "9", "--global-batch-size", "2").with_length(100).train_iters == 5


def test_the_scale_of_scores_has_a_default_for_each_rule():
    assert config().loss.scale == 10.0
    assert config("--headrank-score-scaling", "standardise").loss.scale == 1.0
    assert config("--headrank-score-scale", "3").loss.scale == 3.0


def shape_of_tiny_qwen() -> ModelShape:
    return ModelShape.from_hf(tiny_config("qwen3"))


def test_heads_of_another_model_are_refused():
    heads = HeadSet(((0, 1),), "headrank", "other", num_layers=12, num_heads=8)
    with pytest.raises(InputError, match="select-heads"):
        check_heads(heads, shape_of_tiny_qwen(), config())


def test_a_tensor_parallel_size_that_cuts_a_group_is_refused():
    heads = HeadSet(((0, 1),), "headrank", "tiny", num_layers=4, num_heads=8)
    with pytest.raises(InputError, match="1, 2, 4"):
        check_heads(heads, shape_of_tiny_qwen(), config("--tensor-model-parallel-size", "3", world_size=3))


def test_network_flags_must_agree_with_the_model():
    check_network_flags(parse_arguments(["--num-layers", "4", "--hidden-size", "64", "--swiglu"]), shape_of_tiny_qwen())
    with pytest.raises(InputError, match="--num-layers 5 contradicts"):
        check_network_flags(parse_arguments(["--num-layers", "5"]), shape_of_tiny_qwen())


def test_the_backend_must_fit_the_machine():
    check_backend(parse_arguments(["--distributed-backend", "gloo"]), has_cuda=False)
    check_backend(parse_arguments([]), has_cuda=True)
    with pytest.raises(InputError, match="use gloo"):
        check_backend(parse_arguments(["--distributed-backend", "nccl"]), has_cuda=False)


def test_a_changed_objective_is_noticed_on_resume():
    saved = config().to_dict()
    assert changed_fields(saved, config()) == []
    assert changed_fields(saved, config("--headrank-beta", "0")) == ["loss"]


def test_every_flag_is_explained_by_a_sentence():
    flags = [flag for flags in MEGATRON_FLAGS.values() for flag in flags] + HEADRANK_FLAGS + [flag for flag, _ in NETWORK_FLAGS.values()]
    for name, options in flags:
        text = options["help"].split(" (default")[0]
        assert text[0].isupper() or text[0] in "'-1nrb" or text.startswith("heads.json"), name
        assert text.rstrip().endswith("."), name
    ours = {name for name, _ in HEADRANK_FLAGS}
    assert all(name.startswith("--headrank-") for name in ours)


def test_help_answers_without_torch():
    code = "import sys, megatron_patches.arguments as a; a.build_parser().format_help(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_abbreviated_flags_are_not_accepted():
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--train-iter", "5"])
