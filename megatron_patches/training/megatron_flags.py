"""Megatron's flags that this recipe understands, with Megatron's names, types and defaults, in Megatron's groups.

The megatron-core wheel of Python 3.11 has no argument parser. The network's shape is read from --headrank-model and has
no flags.
"""

from __future__ import annotations

from megatron_patches.training.flag_kinds import Flag, switch, value

RECOMPUTE_MODULES = ("core_attn", "mlp")
ATTENTION_BACKENDS = ("auto", "flash", "fused", "unfused", "local")

MEGATRON_FLAGS: dict[str, list[Flag]] = {
    "distributed": [
        value(
            "--tensor-model-parallel-size",
            int,
            1,
            "Ranks that share each layer; it must divide the model's key-value groups.",
        ),
        value("--pipeline-model-parallel-size", int, 1, "Only 1: every core head's layer must see the same loss."),
        value(
            "--expert-model-parallel-size",
            int,
            1,
            "Ranks that share the experts of each layer, whole ones each; of models with experts.",
        ),
        value("--context-parallel-size", int, 1, "Only 1: the rows of I_q need the whole sequence on one rank."),
        switch(
            "--sequence-parallel",
            "Split norms and what lies between layers over the sequence; without effect at tensor parallelism 1.",
        ),
        switch("--use-distributed-optimizer", "Shard the optimizer's state over data-parallel ranks."),
        switch("--overlap-grad-reduce", "Reduce gradients while the backward pass still runs."),
        switch(
            "--overlap-param-gather", "Gather parameters while the forward pass runs; needs the distributed optimizer."
        ),
        switch(
            "--tp-comm-overlap",
            "Transformer Engine overlaps the collectives of --sequence-parallel with its products. Its buffers have "
            "one size: every batch "
            "is padded to --seq-length.",
        ),
        value("--distributed-timeout-minutes", int, 10, "How long a rank waits for another before the job fails."),
        value(
            "--distributed-backend",
            str,
            None,
            "nccl or gloo; by default what the machine has.",
            choices=["nccl", "gloo"],
        ),
    ],
    "training": [
        value("--micro-batch-size", int, 1, "Contexts in one forward pass of one data-parallel rank."),
        value(
            "--global-batch-size",
            int,
            None,
            "Contexts in one step; by default micro-batch-size times data-parallel size.",
        ),
        value("--train-iters", int, None, "Steps over all runs; without it the run is --headrank-epochs long."),
        value("--train-samples", int, None, "Contexts over all runs, instead of --train-iters."),
        value("--exit-interval", int, None, "Save and exit when the iteration is divisible by this."),
        value("--exit-duration-in-mins", int, None, "Save and exit this many minutes after the start of the program."),
        switch("--exit-signal-handler", "Save and exit on SIGTERM or SIGUSR1 (SLURM preemption)."),
        value("--seed", int, 1234, "Seed of data order, permutations and random states."),
        switch("--recompute-activations", "The same as --recompute-granularity selective."),
        value(
            "--recompute-granularity",
            str,
            None,
            "'full' keeps each layer's input only and recomputes the rest in backward, a third more time; "
            "'selective' recomputes "
            "--recompute-modules.",
            choices=["full", "selective"],
        ),
        value(
            "--recompute-modules",
            str,
            None,
            "What 'selective' recomputes: core_attn (the default; the attention's context, never the rows that are "
            "read), mlp.",
            nargs="*",
            choices=list(RECOMPUTE_MODULES),
        ),
        value(
            "--recompute-method",
            str,
            None,
            "With 'full': 'uniform' (the default) recomputes every layer, one by one; 'block' the first "
            "--recompute-num-layers.",
            choices=["uniform", "block"],
        ),
        value("--recompute-num-layers", int, None, "Layers that 'block' recomputes; 'uniform' knows 1 only."),
    ],
    "optimizer and schedule": [
        value("--optimizer", str, "adam", "Only adam (AdamW).", choices=["adam"]),
        value("--lr", float, None, "Peak learning rate; the paper's are 1e-5, 5e-6 and 2e-6 for 0.6B, 1.7B and 4B."),
        value("--min-lr", float, 0.0, "Learning rate at the end of the decay."),
        value(
            "--lr-decay-style",
            str,
            "linear",
            "Shape of the decay.",
            choices=["constant", "linear", "cosine", "inverse-square-root"],
        ),
        value("--lr-decay-iters", int, None, "Steps of the decay; by default the whole run."),
        value("--lr-warmup-iters", int, 0, "Steps of linear warm-up."),
        value("--lr-warmup-fraction", float, None, "Warm-up as a share of the decay, instead of --lr-warmup-iters."),
        value("--lr-warmup-init", float, 0.0, "Learning rate at the start of the warm-up."),
        value("--weight-decay", float, 0.01, "Decoupled weight decay of matrices."),
        value("--clip-grad", float, 1.0, "Largest global gradient norm; the paper's is 5.0."),
        value("--adam-beta1", float, 0.9, "Adam's first moment."),
        value("--adam-beta2", float, 0.999, "Adam's second moment."),
        value("--adam-eps", float, 1e-8, "Adam's denominator."),
        switch(
            "--override-opt-param-scheduler", "On resume take the schedule from the flags, not from the checkpoint."
        ),
        switch(
            "--use-checkpoint-opt-param-scheduler",
            "On resume take the schedule from the checkpoint and ignore the flags.",
        ),
    ],
    "layers": [
        value(
            "--transformer-impl",
            str,
            None,
            "Layers of Megatron's own ('local') or of Transformer Engine. By default the latter where it can be "
            "used in bf16; in float32 "
            "its matrix products would be TF32.",
            choices=["local", "transformer_engine"],
        ),
        value(
            "--attention-backend",
            str,
            "auto",
            "The attention kernel of Transformer Engine and of torch; 'unfused' makes S x S matrices, 'local' is "
            "torch's attention also in "
            "Transformer Engine's layers.",
            choices=list(ATTENTION_BACKENDS),
        ),
        switch("--moe-grouped-gemm", "Multiply all experts of a rank together; needs Transformer Engine."),
        switch(
            "--no-rope-fusion", "Do not use Transformer Engine's rotary kernel (it is used at --micro-batch-size 1)."
        ),
        switch(
            "--no-gradient-accumulation-fusion",
            "Do not add gradients of weights to the float32 buffers inside the product.",
        ),
        switch("--deterministic-mode", "Only kernels that give the same bits every time; slower."),
    ],
    "precision": [
        switch("--bf16", "bfloat16 weights with float32 master weights and gradients."),
        switch("--fp16", "Refused: calibrated masses lose their digits in float16."),
        value(
            "--fp8-format",
            str,
            None,
            "Products in FP8 through Transformer Engine, weights and attention rows as before; nobody has measured "
            "what it does to scores "
            "(docs/gpu.md says what to measure).",
            choices=["e4m3", "hybrid"],
        ),
        value(
            "--fp8-recipe",
            str,
            "tensorwise",
            "How FP8 values are scaled. Megatron's 'delayed' is not there: its histories must not be left between "
            "layers.",
            choices=["tensorwise", "mxfp8", "blockwise"],
        ),
        switch("--accumulate-allreduce-grads-in-fp32", "Accepted for launchers; gradients are always float32."),
    ],
    "checkpointing": [
        value("--save", str, None, "Directory of checkpoints, metrics.jsonl and the reference scores.", metavar="DIR"),
        value(
            "--load",
            str,
            None,
            "Directory to resume from; by default --save when it holds a checkpoint.",
            metavar="DIR",
        ),
        value(
            "--pretrained-checkpoint",
            str,
            None,
            "Start from this Megatron checkpoint ('headrank import-hf') instead of the model's safetensors.",
            metavar="DIR",
        ),
        value("--save-interval", int, None, "Steps between checkpoints."),
        value(
            "--ckpt-format",
            str,
            "torch_dist",
            "Only torch_dist.",
            choices=["torch", "torch_dist", "zarr", "torch_dcp", "fsdp_dtensor"],
        ),
        switch("--no-load-optim", "Do not load the optimizer's state."),
        switch("--no-load-rng", "Do not load random states."),
        switch("--no-save-optim", "Do not save the optimizer's state (such a checkpoint cannot be resumed exactly)."),
        switch(
            "--finetune",
            "Start at iteration 0 from the weights of --load or --pretrained-checkpoint, the reference's too; needs "
            "another --save.",
        ),
    ],
    "logging": [
        value("--log-interval", int, 100, "Steps between log lines."),
        value("--eval-interval", int, None, "Steps between held-out evaluations; needs --valid-data-path."),
        value("--eval-iters", int, None, "At most this many held-out contexts; by default all."),
        value("--tensorboard-dir", str, None, "Write TensorBoard events here.", metavar="DIR"),
        value("--tensorboard-log-interval", int, 1, "Steps between TensorBoard points."),
        value("--wandb-project", str, "", "Weights & Biases project; needs the wandb package.", metavar="NAME"),
        value("--wandb-exp-name", str, "", "Name of the run there.", metavar="NAME"),
        value("--wandb-save-dir", str, "", "Local directory of its files.", metavar="DIR"),
        switch("--log-throughput", "Add TFLOP/s per GPU to the log line."),
        value(
            "--timing-log-level",
            int,
            0,
            "Timers: 0 evaluation and saving, 1 forward-backward and optimizer too, 2 all of Megatron's; above 0 "
            "they wait for the GPU.",
            choices=[0, 1, 2],
            metavar=None,
        ),
        value(
            "--timing-log-option",
            str,
            "minmax",
            "Timers of all ranks in one number, two, or one by one.",
            choices=["max", "minmax", "all"],
        ),
        switch(
            "--profile",
            "Profile some steps for nsys (--capture-range=cudaProfilerApi), or with --use-pytorch-profiler.",
        ),
        value("--profile-step-start", int, 10, "The first step is the one after this."),
        value("--profile-step-end", int, 12, "The last step."),
        value("--profile-ranks", int, [0], "Ranks that record; none given: all.", nargs="*"),
        switch(
            "--use-pytorch-profiler",
            "With --profile: a trace per rank in torch_profile beside --tensorboard-dir, or below --save.",
        ),
    ],
    "data": [
        value(
            "--train-data-path",
            str,
            None,
            "Directory with contexts.jsonl and pairs.jsonl ('headrank pairs'). In the late layout several, mixed by "
            "their numbers of lists "
            "or by the shares of all: DIR=SHARE.",
            metavar="DIR",
            nargs="+",
        ),
        value(
            "--valid-data-path", str, None, "The same for held-out queries, without shares.", metavar="DIR", nargs="+"
        ),
        value(
            "--seq-length",
            int,
            None,
            "Longest prompt in tokens; longer ones have their documents shortened. By default the model's context. "
            "With documents side by "
            "side it bounds opening, longest document and query; the number of documents costs memory, not context.",
        ),
        value("--tokenizer-model", str, None, "Directory of the tokenizer; by default the model's.", metavar="DIR"),
        value(
            "--tokenizer-type",
            str,
            "HuggingFaceTokenizer",
            "Only HuggingFaceTokenizer.",
            choices=["HuggingFaceTokenizer"],
        ),
        value("--num-workers", int, 2, "Accepted for launchers; contexts are encoded once, in the process."),
    ],
}
