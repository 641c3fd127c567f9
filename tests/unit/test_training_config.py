"""The command line: what is refused, with which words, and what is derived."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrank.errors import InputError
from headrank.lora_settings import LoraSettings
from headrank.method.heads import HeadSet
from megatron_patches.shape import ModelShape
from megatron_patches.training.arguments import build_parser, parse_arguments
from megatron_patches.training.config import changed_fields, check_heads, config_from
from megatron_patches.training.config_checks import check_machine
from megatron_patches.training.headrank_flags import HEADRANK_FLAGS
from megatron_patches.training.megatron_flags import MEGATRON_FLAGS
from tests.tiny_models import tiny_config

REQUIRED = ["--headrank-model", "m", "--headrank-heads", "h.json", "--train-data-path", "d", "--lr", "1e-5"]
FLAGS = [flag for flags in MEGATRON_FLAGS.values() for flag in flags] + HEADRANK_FLAGS
FLOAT_FLAGS = [name for name, options in FLAGS if options.get("type") is float]
PATH_FLAGS = [
    name for name, options in FLAGS if options.get("metavar") in ("DIR", "FILE") and options["default"] is None
]


def config(*flags: str, world_size: int = 1):
    return config_from(parse_arguments([*REQUIRED, *flags]), world_size)


@pytest.mark.parametrize(
    ("flags", "world_size", "words"),
    [
        (["--pipeline-model-parallel-size", "2"], 2, "tensor and data parallelism"),
        (["--pipeline-model-parallel-size", "0"], 1, "--pipeline-model-parallel-size 0 is not supported"),
        (["--context-parallel-size", "2"], 2, "remove it"),
        (["--context-parallel-size", "-1"], 1, "--context-parallel-size -1 is not supported"),
        (["--recompute-granularity", "full", "--recompute-num-layers", "5"], 1, "use 1, or --recompute-method block"),
        (
            ["--recompute-method", "block", "--recompute-granularity", "full"],
            1,
            "--recompute-method block needs --recompute-num-layers",
        ),
        (["--recompute-method", "uniform"], 1, "goes with --recompute-granularity full"),
        (["--recompute-modules", "mlp"], 1, "goes with --recompute-granularity selective"),
        (["--fp16"], 1, "--bf16"),
        (["--recompute-granularity", "full", "--recompute-activations"], 1, "remove one"),
        (["--ckpt-format", "torch"], 1, "torch_dist"),
        (["--overlap-param-gather"], 1, "--use-distributed-optimizer"),
        (["--train-iters", "5", "--train-samples", "5"], 1, "give one"),
        (["--eval-interval", "5"], 1, "--valid-data-path"),
        (["--save-interval", "5"], 1, "--save"),
        (["--tensor-model-parallel-size", "3"], 4, "--nproc-per-node"),
        (["--global-batch-size", "6", "--micro-batch-size", "2"], 2, "multiple of 4"),
        (["--min-lr", "1"], 1, "above --lr"),
        (["--lr-warmup-init", "1"], 1, "--lr-warmup-init 1.0 is above --lr"),
        (["--lr-warmup-iters", "5", "--lr-warmup-fraction", "0.1"], 1, "give one"),
        (["--lr-warmup-iters", "5", "--train-iters", "4"], 1, "--lr-warmup-iters 5 is longer than the 4 steps"),
        (["--lr-warmup-iters", "5", "--train-iters", "9", "--lr-decay-iters", "3"], 1, "longer than the 3 steps"),
        (["--seed", "9" * 23], 1, "--seed 9+ must be at most"),
        (["--distributed-timeout-minutes", "-1"], 1, "--distributed-timeout-minutes -1 must be from 1"),
        (["--distributed-timeout-minutes", "2000000000"], 1, "a year"),
        (["--headrank-epochs", "1e300"], 1, "--headrank-epochs 1e[+]300 must be above 0 and at most"),
        (["--headrank-lora-alpha", "8"], 1, "--headrank-lora-alpha goes with adapters; add --headrank-lora-rank N"),
        (["--headrank-lora-targets", "q_proj"], 1, "--headrank-lora-targets goes with adapters"),
        (["--headrank-lora-rank", "-1"], 1, "--headrank-lora-rank -1 must not be below 0"),
        (
            ["--tp-comm-overlap", "--tensor-model-parallel-size", "2"],
            2,
            "--tp-comm-overlap overlaps what --sequence-parallel sends; add it",
        ),
        (
            ["--tp-comm-overlap", "--sequence-parallel"],
            1,
            "--tp-comm-overlap has buffers of one size; add --seq-length N",
        ),
        (["--fp8-format", "hybrid"], 1, "--fp8-format hybrid goes with --bf16; add it"),
        (["--profile", "--profile-step-start", "12"], 1, "--profile-step-end 12 is not after --profile-step-start 12"),
        (["--use-pytorch-profiler", "--save", "run"], 1, "--use-pytorch-profiler goes with --profile"),
        (["--use-pytorch-profiler", "--profile"], 1, "needs a place for its traces; add --save"),
        (["--headrank-megatron-flags=--async-save"], 1, "go with --headrank-trainer megatron; add it"),
        (["--finetune"], 1, "add --load or --pretrained-checkpoint"),
        (["--finetune", "--load", "run", "--save", "./other/../run/"], 1, "another --save"),
        (
            ["--finetune", "--load", "run", "--pretrained-checkpoint", "base"],
            1,
            "--load run and --pretrained-checkpoint base are given",
        ),
        (["--headrank-permutations", "-1"], 1, "--headrank-permutations -1 must be from 0 to 100"),
        (
            ["--headrank-with-retriever-order"],
            1,
            "--headrank-with-retriever-order goes with shuffles; add --headrank-permutations",
        ),
        (
            ["--headrank-permutations", "101"],
            1,
            "--headrank-permutations 101 must be from 0 to 100: each is another order",
        ),
        (["--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"], 1, "give one"),
    ],
)
def test_contradictions_are_refused_with_what_to_change(flags, world_size, words):
    with pytest.raises(InputError, match=words):
        config(*flags, world_size=world_size)


def test_full_fine_tuning_is_the_default_and_alpha_is_twice_the_rank_unless_given():
    assert config().lora is None
    assert config("--headrank-lora-rank", "8").lora == LoraSettings(8, 16.0)
    chosen = config(
        "--headrank-lora-rank",
        "8",
        "--headrank-lora-alpha",
        "3",
        "--headrank-lora-targets",
        "up_proj",
        "q_proj",
        "q_proj",
    ).lora
    assert chosen == LoraSettings(8, 3.0, ("q_proj", "up_proj")) and chosen.scale == 3 / 8
    assert config(*chosen.flags.split()).lora == chosen and config(
        *LoraSettings(8, 16.0).flags.split()
    ).lora == LoraSettings(8, 16.0)


@pytest.mark.parametrize("value", ["inf", "nan", "-inf"])
@pytest.mark.parametrize("flag", FLOAT_FLAGS)
def test_a_number_that_is_not_finite_is_refused_by_its_flag(flag, value):
    with pytest.raises(InputError, match=f"^{flag} {value} is not a finite number"):
        config(f"{flag}={value}")


ABOVE_ZERO = """
    train-iters train-samples save-interval eval-interval eval-iters exit-interval exit-duration-in-mins
    log-interval tensorboard-log-interval seq-length micro-batch-size global-batch-size
    tensor-model-parallel-size lr lr-decay-iters adam-eps headrank-pairs-per-context headrank-max-nan-steps
    headrank-temperature headrank-score-scale headrank-epochs
""".split()
ZERO_OR_MORE = """
    seed min-lr lr-warmup-iters lr-warmup-init weight-decay clip-grad num-workers headrank-keep-checkpoints
    headrank-alpha headrank-beta headrank-gamma headrank-eta headrank-margin
""".split()


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        *((flag, value, "must be above 0") for flag in ABOVE_ZERO for value in ("0", "-5")),
        *((flag, "-5", "must not be below 0") for flag in ZERO_OR_MORE),
        *(
            (flag, value, "must be at least 0")
            for flag in ("adam-beta1", "adam-beta2", "lr-warmup-fraction")
            for value in ("1", "-5")
        ),
    ],
)
def test_a_number_out_of_range_is_refused_by_its_flag(flag, value, words):
    with pytest.raises(InputError, match=f"^--{flag} {value}(.0)? {words}"):
        config(f"--{flag}", value)


@pytest.mark.parametrize("value", ["", " "])
@pytest.mark.parametrize("flag", PATH_FLAGS)
def test_an_unset_shell_variable_is_no_path(flag, value):
    with pytest.raises(InputError, match=f"^{flag} is empty"):
        config(flag, value)


def test_what_looks_alike_but_is_meant_is_accepted(tmp_path):
    other = str(tmp_path / "other")
    assert config("--finetune", "--load", str(tmp_path), "--save", other).finetune
    assert config("--finetune", "--pretrained-checkpoint", str(tmp_path), "--save", other).finetune
    assert config("--lr-warmup-iters", "0", "--lr-warmup-fraction", "0.1").schedule.lr_warmup_fraction == 0.1
    assert config("--lr-warmup-iters", "4", "--train-iters", "4").schedule.lr_warmup_iters == 4
    assert config(
        "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"
    ).recompute
    assert config("--headrank-permutations", "100", "--wandb-project", "").permutations == 100
    assert config("--headrank-permutations", "2", "--headrank-with-retriever-order").with_retriever_order


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


def test_flags_of_the_networks_shape_are_refused_and_the_place_of_the_shape_is_named(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_arguments(["--num-layers", "4", "--swiglu", "--lr", "1e-5"])
    assert stopped.value.code == 2
    line = capsys.readouterr().err
    assert "--num-layers 4 --swiglu" in line and "--headrank-model" in line and line.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "has_gpu", "words"),
    [
        (["--distributed-backend", "nccl"], False, "use gloo"),
        (["--distributed-backend", "gloo"], True, "use nccl"),
        (["--transformer-impl", "transformer_engine"], False, r"headrank\[gpu\]\); use local"),
    ],
)
def test_flags_must_fit_the_machine(flags, has_gpu, words):
    check_machine(parse_arguments(flags), has_cuda=not has_gpu, has_transformer_engine=not has_gpu)
    check_machine(parse_arguments([]), has_cuda=has_gpu, has_transformer_engine=has_gpu)
    with pytest.raises(InputError, match=words):
        check_machine(parse_arguments(flags), has_cuda=has_gpu, has_transformer_engine=has_gpu)


def test_recomputation_means_what_megatron_means():
    assert config("--recompute-activations").recompute_modules == ("core_attn",)
    assert not config("--recompute-activations").recompute
    assert config("--recompute-activations", "--recompute-modules", "mlp", "core_attn").recompute_modules == (
        "mlp",
        "core_attn",
    )
    block = config("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "3")
    assert (block.recompute, block.recompute_first_layers, block.recompute_modules) == (True, 3, ())


def test_sequence_parallelism_is_switched_off_where_there_is_nothing_to_split():
    assert not config("--sequence-parallel").sequence_parallel
    assert config("--sequence-parallel", "--tensor-model-parallel-size", "2", world_size=2).sequence_parallel


def test_local_layers_are_honoured_beside_transformer_engine():
    check_machine(parse_arguments(["--transformer-impl", "local"]), has_cuda=True, has_transformer_engine=True)
    assert config("--transformer-impl", "local").transformer_impl == "local"


def test_a_changed_objective_is_noticed_on_resume():
    saved = config().to_dict()
    assert changed_fields(saved, config()) == []
    assert changed_fields(saved, config("--headrank-beta", "0")) == ["loss"]


def test_every_flag_is_explained_by_a_sentence():
    for name, options in FLAGS:
        text = options["help"].split(" (default")[0]
        assert text[0].isupper() or text[0] in "'-1nrb" or text.startswith("heads.json"), name
        assert text.rstrip().endswith("."), name
    ours = {name for name, _ in HEADRANK_FLAGS}
    assert all(name.startswith("--headrank-") for name in ours)


def test_help_answers_without_torch():
    code = (
        "import sys, megatron_patches.training.arguments as a; a.build_parser().format_help(); sys.exit('torch' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_abbreviated_flags_are_not_accepted_and_said_so_in_one_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        build_parser().parse_args(["--train-iter", "5"])
    assert capsys.readouterr().err == (
        "pretrain_headrank.py: unrecognized arguments: --train-iter 5; did you mean --train-iters?; see "
        "'pretrain_headrank.py --help'\n"
    )


def test_stopping_early_leaves_the_schedule_as_it_is():
    whole = config("--headrank-epochs", "1", "--global-batch-size", "32").with_length(91_000)
    early = config("--headrank-epochs", "1", "--global-batch-size", "32", "--headrank-stop-after", "1800").with_length(
        91_000
    )
    assert (whole.train_iters, early.train_iters) == (2844, 1800)
    assert whole.schedule.lr_decay_iters is None and early.schedule.lr_decay_iters == 2844
    later = config("--train-iters", "100", "--headrank-stop-after", "500").with_length(10)
    assert (later.train_iters, later.schedule.lr_decay_iters) == (100, None)
    given = config("--train-iters", "100", "--lr-decay-iters", "70", "--headrank-stop-after", "50").with_length(10)
    assert (given.train_iters, given.schedule.lr_decay_iters) == (50, 70)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--headrank-keep-iters", "5"], "--headrank-keep-iters needs a directory; add --save"),
        (["--headrank-keep-iters", "0", "--save", "s"], "steps are counted from 1"),
        (["--headrank-stop-after", "0"], "--headrank-stop-after 0 must be above 0"),
    ],
)
def test_steps_to_stop_at_and_to_keep_are_checked(flags, words):
    with pytest.raises(InputError, match=words):
        config(*flags)
