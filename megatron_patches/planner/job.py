"""A training job as its launcher would start it, through the real argument parser and its checks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np

from headrank.method.heads import HeadSet
from megatron_patches.shape import ModelShape, check_tensor_parallel_size, valid_tensor_parallel_sizes
from megatron_patches.training.arguments import parse_arguments
from megatron_patches.training.config import TrainingConfig, check_experts, config_from

# Prompt text around the documents, in Qwen3 tokens, measured on the training collections: chat opening, "[i] " and line
# breaks of each document, instruction + query + chat suffix, instruction + "N/A" + chat suffix, and the rows of I_q in
# both.
OPENING_TOKENS, LABEL_TOKENS, QUERY_TOKENS, CALIBRATION_TOKENS, QUERY_ROWS, CALIBRATION_ROWS = 4, 4, 36, 28, 10, 2
LATE_QUERY_TOKENS = QUERY_ROWS + 2  # "Query:" and the query's own

# What a late job is trained with: docs/teacher_training.md
LATE_FLAGS = {
    "--headrank-document-layout": "late",
    "--headrank-loss": "teacher",
    "--headrank-teacher-ranknet": 1,
    "--headrank-teacher-listwise": 0.5,
    "--headrank-in-batch-weight": 0.3,
    "--headrank-beta": 0,
}

LACKS = ("grouped rows", "flexible attention")


@dataclass(frozen=True)
class Job:
    """Everything the cost of a step depends on. The lengths are those of the mean context."""

    model: str
    shape: ModelShape
    heads: HeadSet = field(hash=False)  # its settings are dictionaries; equality still compares it
    tensor_parallel: int = 1
    world_size: int = 1
    micro_batch_size: int = 1
    global_batch_size: int = 32
    documents: int = 100
    document_tokens: int = 80
    pairs_per_context: int = 16
    is_bf16: bool = True
    is_recomputed: bool = False
    is_sequence_parallel: bool = False
    has_distributed_optimizer: bool = True
    has_gpu_kernels: bool = True
    expert_parallel: int = 1
    lacks: tuple[str, ...] = ()  # of LACKS: kernels of a GPU to plan without, to see what they save
    recompute_modules: tuple[str, ...] = ()
    is_full_depth: bool = False
    lora_rank: int = 0

    @property
    def is_late(self) -> bool:
        """Whether passages and queries are rows of their own, trained on a teacher's scores."""
        return self.heads.prompt.is_late

    @property
    def prefix_tokens(self) -> int:
        """Tokens both branches share."""
        return OPENING_TOKENS + self.documents * (self.document_tokens + LABEL_TOKENS)

    @property
    def sequence_tokens(self) -> int:
        """Tokens of one context with both branches; in the late layout of its passages and its query."""
        if self.is_late:
            return self.documents * self.document_tokens + LATE_QUERY_TOKENS
        return self.prefix_tokens + QUERY_TOKENS + CALIBRATION_TOKENS

    @property
    def data_parallel(self) -> int:
        """Ranks that see different contexts."""
        return self.world_size // self.tensor_parallel

    @property
    def num_microbatches(self) -> int:
        """Forward passes of one rank in one step."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel)

    def with_tensor_parallel(self, size: int, *, is_batch_free: bool = False) -> Job:
        """The same job cut ``size`` ways; ``is_batch_free`` lets the global batch grow to the next multiple of the
        ranks.
        """
        per_step = self.micro_batch_size * max(1, self.world_size // size)
        batch = -(-self.global_batch_size // per_step) * per_step if is_batch_free else self.global_batch_size
        return dataclasses.replace(self, tensor_parallel=size, global_batch_size=batch)

    def possible_sizes(self, *, is_batch_free: bool = False) -> list[Job]:
        """This job at every tensor-parallel size that model, ranks and batch allow, ascending."""
        sizes = [size for size in valid_tensor_parallel_sizes(self.shape) if self.world_size % size == 0]
        jobs = [self.with_tensor_parallel(size, is_batch_free=is_batch_free) for size in sizes]
        return [job for job in jobs if job.global_batch_size % (job.micro_batch_size * job.data_parallel) == 0]

    def arguments(self) -> list[str]:
        """The flags of pretrain_headrank.py that shape the job."""
        flags = {
            "--tensor-model-parallel-size": self.tensor_parallel,
            "--expert-model-parallel-size": self.expert_parallel,
            "--micro-batch-size": self.micro_batch_size,
            "--global-batch-size": self.global_batch_size,
            "--headrank-pairs-per-context": self.pairs_per_context,
            "--headrank-model": self.model,
            "--headrank-heads": "heads.json",
            "--train-data-path": "data",
            "--train-iters": 1,
            "--lr": 1e-5,
            "--clip-grad": 5.0,
            **({"--recompute-granularity": "full"} if self.is_recomputed else {}),
            **({"--recompute-granularity": "selective"} if self.recompute_modules else {}),
            **({"--headrank-lora-rank": self.lora_rank} if self.lora_rank else {}),
            **(LATE_FLAGS if self.is_late else {}),
        }
        switches = {
            "--bf16": self.is_bf16,
            "--use-distributed-optimizer": self.has_distributed_optimizer,
            "--sequence-parallel": self.is_sequence_parallel,
            "--headrank-full-depth": self.is_full_depth,
        }
        given = [str(part) for flag in flags.items() for part in flag] + [
            switch for switch, is_on in switches.items() if is_on
        ]
        return [*given, *(["--recompute-modules", *self.recompute_modules] if self.recompute_modules else [])]

    def config(self) -> TrainingConfig:
        """The job through the real parser and its checks."""
        check_tensor_parallel_size(self.shape, self.tensor_parallel)
        config = config_from(parse_arguments(self.arguments()), self.world_size)
        check_experts(self.shape, config)
        return config

    @property
    def fullest_rank(self) -> int:
        """The tensor-parallel rank that owns the most core heads."""
        per_rank = self.shape.heads // self.tensor_parallel
        owned = np.bincount([head // per_rank for _, head in self.heads.heads], minlength=self.tensor_parallel)
        return int(owned.argmax())
