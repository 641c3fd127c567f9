"""The command line of pretrain_headrank.py: Megatron's flags with Megatron's names, types and defaults, and --headrank-*.

The megatron-core wheel has no argument parser, so the flags this loop understands are listed here as data, in Megatron's
groups. The network's shape is read from --headrank-model and has no flags. Nothing here imports torch: --help answers at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from headrank.errors import OneLineParser
from headrank.lora_settings import PROJECTIONS
from headrank.method.loss_settings import DEFAULT_SCALES, EQUAL_LOG_MASS_SCALE, OBJECTIVES, SCALINGS
from headrank.method.prompt import LAYOUTS

Flag = tuple[str, dict[str, Any]]
RECOMPUTE_MODULES = ("core_attn", "mlp")


def _value(name: str, kind: type, default: Any, text: str, **more: Any) -> Flag:
    shown = "" if default is None else f" (default {default})"
    return name, {"type": kind, "default": default, "help": text + shown, **({"metavar": "N"} if kind is int else {}), **more}


def _switch(name: str, text: str) -> Flag:
    return name, {"action": "store_true", "help": text}


MEGATRON_FLAGS: dict[str, list[Flag]] = {
    "distributed": [
        _value("--tensor-model-parallel-size", int, 1, "Ranks that share each layer; it must divide the model's key-value groups."),
        _value("--pipeline-model-parallel-size", int, 1, "Only 1: every core head's layer must see the same loss."),
        _value("--context-parallel-size", int, 1, "Only 1: the rows of I_q need the whole sequence on one rank."),
        _switch(
            "--sequence-parallel", "Split norms and what lies between layers over the sequence; without effect at tensor parallelism 1."
        ),
        _switch("--use-distributed-optimizer", "Shard the optimizer's state over data-parallel ranks."),
        _switch("--overlap-grad-reduce", "Reduce gradients while the backward pass still runs."),
        _switch("--overlap-param-gather", "Gather parameters while the forward pass runs; needs the distributed optimizer."),
        _value("--distributed-timeout-minutes", int, 10, "How long a rank waits for another before the job fails."),
        _value("--distributed-backend", str, None, "nccl or gloo; by default what the machine has.", choices=["nccl", "gloo"]),
    ],
    "training": [
        _value("--micro-batch-size", int, 1, "Contexts in one forward pass of one data-parallel rank."),
        _value("--global-batch-size", int, None, "Contexts in one step; by default micro-batch-size times data-parallel size."),
        _value("--train-iters", int, None, "Steps over all runs; without it the run is --headrank-epochs long."),
        _value("--train-samples", int, None, "Contexts over all runs, instead of --train-iters."),
        _value("--exit-interval", int, None, "Save and exit when the iteration is divisible by this."),
        _value("--exit-duration-in-mins", int, None, "Save and exit this many minutes after the start of the program."),
        _switch("--exit-signal-handler", "Save and exit on SIGTERM or SIGUSR1 (SLURM preemption)."),
        _value("--seed", int, 1234, "Seed of data order, permutations and random states."),
        _switch("--recompute-activations", "The same as --recompute-granularity selective."),
        _value(
            "--recompute-granularity",
            str,
            None,
            "'full' keeps each layer's input only and recomputes the rest in backward, a third more time; 'selective' recomputes "
            "--recompute-modules.",
            choices=["full", "selective"],
        ),
        _value(
            "--recompute-modules",
            str,
            None,
            "What 'selective' recomputes: core_attn (the default; the attention's context, never the rows that are read), mlp.",
            nargs="*",
            choices=list(RECOMPUTE_MODULES),
        ),
        _value(
            "--recompute-method",
            str,
            None,
            "With 'full': 'uniform' (the default) recomputes every layer, one by one; 'block' the first --recompute-num-layers.",
            choices=["uniform", "block"],
        ),
        _value("--recompute-num-layers", int, None, "Layers that 'block' recomputes; 'uniform' knows 1 only."),
    ],
    "optimizer and schedule": [
        _value("--optimizer", str, "adam", "Only adam (AdamW).", choices=["adam"]),
        _value("--lr", float, None, "Peak learning rate; the paper's are 1e-5, 5e-6 and 2e-6 for 0.6B, 1.7B and 4B."),
        _value("--min-lr", float, 0.0, "Learning rate at the end of the decay."),
        _value("--lr-decay-style", str, "linear", "Shape of the decay.", choices=["constant", "linear", "cosine", "inverse-square-root"]),
        _value("--lr-decay-iters", int, None, "Steps of the decay; by default the whole run."),
        _value("--lr-warmup-iters", int, 0, "Steps of linear warm-up."),
        _value("--lr-warmup-fraction", float, None, "Warm-up as a share of the decay, instead of --lr-warmup-iters."),
        _value("--lr-warmup-init", float, 0.0, "Learning rate at the start of the warm-up."),
        _value("--weight-decay", float, 0.01, "Decoupled weight decay of matrices."),
        _value("--clip-grad", float, 1.0, "Largest global gradient norm; the paper's is 5.0."),
        _value("--adam-beta1", float, 0.9, "Adam's first moment."),
        _value("--adam-beta2", float, 0.999, "Adam's second moment."),
        _value("--adam-eps", float, 1e-8, "Adam's denominator."),
        _switch("--override-opt-param-scheduler", "On resume take the schedule from the flags, not from the checkpoint."),
        _switch("--use-checkpoint-opt-param-scheduler", "On resume take the schedule from the checkpoint and ignore the flags."),
    ],
    "layers": [
        _value(
            "--transformer-impl",
            str,
            None,
            "Layers of Megatron's own ('local') or of Transformer Engine. By default the latter where it can be used in bf16; in float32 "
            "its matrix products would be TF32.",
            choices=["local", "transformer_engine"],
        ),
    ],
    "precision": [
        _switch("--bf16", "bfloat16 weights with float32 master weights and gradients."),
        _switch("--fp16", "Refused: calibrated masses lose their digits in float16."),
        _switch("--accumulate-allreduce-grads-in-fp32", "Accepted for launchers; gradients are always float32."),
    ],
    "checkpointing": [
        _value("--save", str, None, "Directory of checkpoints, metrics.jsonl and the reference scores.", metavar="DIR"),
        _value("--load", str, None, "Directory to resume from; by default --save when it holds a checkpoint.", metavar="DIR"),
        _value(
            "--pretrained-checkpoint",
            str,
            None,
            "Start from this Megatron checkpoint ('headrank import-hf') instead of the model's safetensors.",
            metavar="DIR",
        ),
        _value("--save-interval", int, None, "Steps between checkpoints."),
        _value(
            "--ckpt-format", str, "torch_dist", "Only torch_dist.", choices=["torch", "torch_dist", "zarr", "torch_dcp", "fsdp_dtensor"]
        ),
        _switch("--no-load-optim", "Do not load the optimizer's state."),
        _switch("--no-load-rng", "Do not load random states."),
        _switch("--no-save-optim", "Do not save the optimizer's state (such a checkpoint cannot be resumed exactly)."),
        _switch(
            "--finetune",
            "Start at iteration 0 from the weights of --load or --pretrained-checkpoint, the reference's too; needs another --save.",
        ),
    ],
    "logging": [
        _value("--log-interval", int, 100, "Steps between log lines."),
        _value("--eval-interval", int, None, "Steps between held-out evaluations; needs --valid-data-path."),
        _value("--eval-iters", int, None, "At most this many held-out contexts; by default all."),
        _value("--tensorboard-dir", str, None, "Write TensorBoard events here.", metavar="DIR"),
        _value("--tensorboard-log-interval", int, 1, "Steps between TensorBoard points."),
        _value("--wandb-project", str, "", "Weights & Biases project; needs the wandb package.", metavar="NAME"),
        _value("--wandb-exp-name", str, "", "Name of the run there.", metavar="NAME"),
        _value("--wandb-save-dir", str, "", "Local directory of its files.", metavar="DIR"),
        _switch("--log-throughput", "Add TFLOP/s per GPU to the log line."),
    ],
    "data": [
        _value(
            "--train-data-path",
            str,
            None,
            "Directory with contexts.jsonl and pairs.jsonl ('headrank pairs'). In the late layout several, mixed by their numbers of lists "
            "or by the shares of all: DIR=SHARE.",
            metavar="DIR",
            nargs="+",
        ),
        _value("--valid-data-path", str, None, "The same for held-out queries, without shares.", metavar="DIR", nargs="+"),
        _value(
            "--seq-length",
            int,
            None,
            "Longest prompt in tokens; longer ones have their documents shortened. By default the model's context. With documents side by "
            "side it bounds opening, longest document and query; the number of documents costs memory, not context.",
        ),
        _value("--tokenizer-model", str, None, "Directory of the tokenizer; by default the model's.", metavar="DIR"),
        _value("--tokenizer-type", str, "HuggingFaceTokenizer", "Only HuggingFaceTokenizer.", choices=["HuggingFaceTokenizer"]),
        _value("--num-workers", int, 2, "Accepted for launchers; contexts are encoded once, in the process."),
    ],
}

HEADRANK_FLAGS: list[Flag] = [
    _value(
        "--headrank-model",
        str,
        None,
        "Hugging Face directory of the model to train: weights, tokenizer and shape; 'embedded' is the built-in one.",
        metavar="DIR",
    ),
    _value(
        "--headrank-heads",
        str,
        None,
        "heads.json of 'headrank select-heads': the core heads and the prompt they were selected with.",
        metavar="FILE",
    ),
    _value(
        "--headrank-document-layout",
        str,
        None,
        "Documents one after another (sequential) or side by side, where no order of a list changes a score (parallel); by default as in "
        "the heads' prompt. Heads that were selected in one layout may be trained in the other.",
        choices=list(LAYOUTS),
    ),
    _switch("--headrank-all-heads", "Ablation 'w/ all heads': sum every head of the model instead of the core heads."),
    _value(
        "--headrank-epochs", float, 1.0, "Length of the run in passes over all pairs when --train-iters is not given; the paper's is one."
    ),
    _value(
        "--headrank-epoch-unit",
        str,
        "pairs",
        "'pairs': an epoch shows every pair, as the paper's; 'contexts': every context once, with some of its pairs.",
        choices=["pairs", "contexts"],
    ),
    _value("--headrank-pairs-per-context", int, 16, "Pairs that share one forward; 1 is the paper's pair by pair."),
    _value(
        "--headrank-passages-per-query", int, 8, "Late layout: passages drawn from a list at each visit, spread over the teacher's scores."
    ),
    _value(
        "--headrank-in-batch-weight",
        float,
        0.0,
        "Late layout: weight of the contrastive term, a query's best passages against those of the micro-batch's other queries; ours.",
    ),
    _switch("--headrank-train-readout", "Late layout: train the readout's weights too, without decay, at --headrank-readout-lr."),
    _value("--headrank-readout-lr", float, None, "Peak learning rate of trained readout weights; by default --lr."),
    _switch("--headrank-freeze-embeddings", "Leave the token embeddings as they are: less memory, a cheaper update."),
    _value("--headrank-permutations", int, 0, "Train on this many fixed shuffles of each list, up to 100; 0 keeps the retriever's order."),
    _switch("--headrank-with-retriever-order", "With --headrank-permutations: take the retriever's order in turn with the shuffles."),
    _value(
        "--headrank-loss",
        str,
        "headrank",
        "'ranknet' is the ablation 'w/ SFT': -log sigmoid alone; 'teacher' has the teacher's terms only and needs no pairs.",
        choices=list(OBJECTIVES),
    ),
    _value("--headrank-alpha", float, 0.05, "Weight alpha of the linear term; the paper's."),
    _value("--headrank-beta", float, 0.05, "Weight beta of the proximal term; the paper's. 0 is the ablation 'w/o L_prox'."),
    _value("--headrank-margin", float, 1.0, "Margin m of the hinge; ours."),
    _value("--headrank-gamma", float, 0.01, "Weight gamma of the entropy in Omega; ours. Gamma and eta 0 is the ablation 'w/o Omega'."),
    _value("--headrank-eta", float, 0.01, "Weight eta of the middle-zone variance in Omega; ours."),
    _value("--headrank-temperature", float, 1.0, "Temperature of p = softmax(s / T); ours."),
    _value("--headrank-teacher-ranknet", float, 0.0, "Weight of RankNet against the teacher's margins (soft labels); ours."),
    _value("--headrank-teacher-listwise", float, 0.0, "Weight of the listwise KL divergence from the teacher; ours."),
    _value("--headrank-teacher-margin-mse", float, 0.0, "Weight of the squared error of pair margins against the teacher's; ours."),
    _value("--headrank-teacher-temperature", float, 1.0, "Divides the teacher's scores, to bring them to the scale of logits; ours."),
    _value(
        "--headrank-score-scaling",
        str,
        "constant",
        "How scores are brought to the scale of the loss, for policy and reference alike; ours.",
        choices=list(SCALINGS),
    ),
    _value(
        "--headrank-score-scale",
        float,
        None,
        "The constant, the deviation or the range of scaled scores; ours. By default "
        + ", ".join(f"{scale:g} for {name}" for name, scale in DEFAULT_SCALES.items())
        + f"; of log masses with fitted weights 1, which are fitted to that scale, with equal weights {EQUAL_LOG_MASS_SCALE:g} over their "
        "sum.",
        metavar="X",
    ),
    _switch("--headrank-full-depth", "Build every layer although nothing above l_max is ever trained; for comparison."),
    _value(
        "--headrank-lora-rank",
        int,
        0,
        "Freeze the model and train low-rank adapters (LoRA) of this rank; 0 trains all weights, the paper's way.",
    ),
    _value(
        "--headrank-lora-alpha", float, None, "The adapter's product is multiplied by alpha / rank. By default twice the rank.", metavar="X"
    ),
    _value(
        "--headrank-lora-targets",
        str,
        None,
        "Projections that have an adapter; by default all seven.",
        nargs="+",
        choices=list(PROJECTIONS),
    ),
    _value(
        "--headrank-reference-cache",
        str,
        None,
        "File of the frozen model's scores; by default SAVE/reference_scores.jsonl.",
        metavar="FILE",
    ),
    _value("--headrank-max-nan-steps", int, 5, "Stop after this many steps with a NaN or infinite loss or gradient in a row."),
    _value("--headrank-keep-checkpoints", int, 2, "Keep this many newest checkpoints, and the best one; 0 keeps all."),
]


def build_parser() -> OneLineParser:
    """All flags, grouped as Megatron groups them, ours in one group at the end."""
    parser = OneLineParser(
        prog="pretrain_headrank.py",
        description="Preference training of core attention heads on Megatron-Core. Flags without 'headrank' are Megatron's own.",
        epilog="example: torchrun --nproc-per-node 8 pretrain_headrank.py --tensor-model-parallel-size 4 --headrank-model Qwen3-0.6B "
        "--headrank-heads heads.json --train-data-path train --global-batch-size 32 --lr 1e-5 --clip-grad 5.0 --bf16 --save run",
        allow_abbrev=False,
    )
    for title, flags in MEGATRON_FLAGS.items():
        group = parser.add_argument_group(title)
        for name, options in flags:
            group.add_argument(name, **options)
    ours = parser.add_argument_group("headrank")
    for name, options in HEADRANK_FLAGS:
        ours.add_argument(name, **options)
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; an unknown flag or value is one line and exit code 2."""
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:  # most often the shape flags of a Megatron launcher
        parser.error(f"unrecognized arguments: {' '.join(unknown)} (layers, sizes and rotary settings are read from --headrank-model)")
    return args
