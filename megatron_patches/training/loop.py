"""The training loop: step, log, evaluate, save, decide - in Megatron's order, resumable at any iteration."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging

from data_tools.late_training_set import LateSample
from data_tools.training_set import Sample
from headrank.errors import InputError
from headrank.method.heads import HeadSet
from megatron_patches import device
from megatron_patches.checkpoints.run_checkpoints import RunCheckpoints
from megatron_patches.parallel_scores import gather_from_all, largest_on_any_rank, sum_over_data_parallel
from megatron_patches.training.assembly import data_parallel_rank, step_flops
from megatron_patches.training.batches import Batch
from megatron_patches.training.config import TrainingConfig
from megatron_patches.training.diagnostics import StepWatch, report_memory
from megatron_patches.training.exits import ExitDecision
from megatron_patches.training.held_out import evaluate, score_sample
from megatron_patches.training.late_batches import LateBatch
from megatron_patches.training.train_step import TERMS, StepResult, train_step
from megatron_patches.training.training_log import MetricsWriter, iteration_line

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far a run is; saved with every checkpoint."""

    iteration: int = 0
    consumed_samples: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0  # in all
    nan_streak: int = 0  # in a row
    best_iteration: int = 0
    best_ndcg: float = -1.0


@dataclass
class Run:
    """Everything the loop works with."""

    config: TrainingConfig
    heads: HeadSet
    model: DistributedDataParallel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    held_out: Sequence[Sample | LateSample]
    checkpoints: RunCheckpoints
    metrics: MetricsWriter
    progress: Progress

    def finish(self, is_complete: bool) -> None:
        """Close the logs and, at the end of training, leave the mark the pipeline looks for."""
        self.checkpoints.finish(is_complete, asdict(self.progress))
        self.metrics.close()


@dataclass
class Window:
    """Sums since the last log line."""

    steps: int = 0
    updates: int = 0
    terms: np.ndarray | None = None
    seconds: float = 0.0
    num_tokens: int = 0

    def add(self, result: StepResult, seconds: float) -> None:
        """Count one step; terms only of steps that were taken."""
        self.steps, self.seconds, self.num_tokens = (
            self.steps + 1,
            self.seconds + seconds,
            self.num_tokens + result.num_tokens,
        )
        # a skipped step has no finite terms: one NaN would make the window's means NaN
        if result.is_updated:
            values = np.array([result.terms[name] for name in TERMS])
            self.terms = values if self.terms is None else self.terms + values
            self.updates += 1

    def means(self) -> dict[str, float]:
        """Mean of every term over the steps taken; NaN when there was none."""
        values = np.full(len(TERMS), math.nan) if self.terms is None else self.terms / self.updates
        return dict(zip(TERMS, values.tolist(), strict=True))


def train(run: Run, batches: Iterator[Batch | LateBatch], started: float | None = None) -> bool:
    """Train until ``train_iters`` or an exit condition; True when the run is complete.

    ``started`` (time.monotonic) is when the program began: a batch system's clock runs while data and reference scores
    are made.
    """
    config, progress = run.config, run.progress
    exits = ExitDecision(config, device.device(), started)
    watch, first = StepWatch(config, run.model, run.optimizer), progress.iteration + 1
    if progress.iteration == 0 and run.held_out:
        evaluate_held_out(run)
    window = Window()
    assert config.train_iters is not None
    while progress.iteration < config.train_iters:
        watch.before_step(progress.iteration)
        started = time.perf_counter()
        result = train_step(run.model, run.optimizer, batches, run.heads, config.loss, config.num_microbatches)
        progress.iteration += 1
        progress.consumed_samples += config.global_batch_size
        _count(run, result)
        seconds = time.perf_counter() - started
        watch.after_step(progress.iteration)
        window.add(result, seconds)
        _record(run, result, seconds)
        if progress.iteration == first:
            report_memory(progress.iteration, run.metrics)
        if progress.iteration % config.log_interval == 0 or progress.iteration == config.train_iters:
            _log(run, result, window)
            watch.log_times(window.steps)
            window = Window()
        # evaluation before saving: what is saved as the best has been measured
        is_best = False
        if _is_time(config.eval_interval, run) and run.held_out:
            with watch.timed("eval-time", 0):
                is_best = evaluate_held_out(run)
        is_saved = is_best or _is_time(config.save_interval, run) or progress.iteration in config.keep_iters
        if is_saved:
            with watch.timed("save-checkpoint", 0):
                is_saved = _save(run)
        # asked on every iteration by every rank: it is a collective
        reason = exits.reason(progress.iteration)
        if reason is not None and progress.iteration < config.train_iters:
            if not is_saved:
                _save(run)
            watch.stop_profile()
            logger.info("exiting program %s", reason)
            return False
    watch.stop_profile()
    return True


def _is_time(interval: int | None, run: Run) -> bool:
    """At every multiple of the interval, and at the end."""
    at_end = run.progress.iteration == run.config.train_iters
    return at_end or (interval is not None and run.progress.iteration % interval == 0)


def _count(run: Run, result: StepResult) -> None:
    """Advance the schedule, or count the step as skipped and stop after too many in a row, naming the queries."""
    progress = run.progress
    if result.is_updated:
        # a skipped step does not advance the schedule: the warm-up counts updates
        run.scheduler.step(run.config.global_batch_size)
        progress.nan_streak = 0
        return
    progress.skipped_iterations += 1
    progress.nan_iterations += 1
    progress.nan_streak += 1
    # gathered on all ranks before anything is raised: a rank that left alone would hang the others
    named = sorted({query_id for queries in gather_from_all(result.bad_queries) for query_id in queries})
    logger.warning(
        "iteration %d: loss %g, gradient norm %g; step skipped (query %s)",
        progress.iteration,
        result.terms["total"],
        result.grad_norm,
        ", ".join(named),
    )
    run.metrics.write("skipped", progress.iteration, {"query_ids": named, "nan_streak": progress.nan_streak})
    if progress.nan_streak >= run.config.max_nan_steps:
        raise InputError(
            f"{progress.nan_streak} steps in a row had a loss or gradient that is not finite, the last at iteration "
            f"{progress.iteration} with query {', '.join(named)}; look at its texts, or lower --lr and give another "
            "--save, "
            "or raise --headrank-max-nan-steps"
        )


def _record(run: Run, result: StepResult, seconds: float) -> None:
    progress = run.progress
    if result.is_updated:
        values = {
            "consumed_samples": progress.consumed_samples,
            "learning_rate": _learning_rate(run),
            "grad_norm": result.grad_norm,
        }
        run.metrics.write(
            "train", progress.iteration, {**result.terms, **values, "seconds": seconds, "tokens": result.num_tokens}
        )


def _log(run: Run, result: StepResult, window: Window) -> None:
    progress = run.progress
    logger.info(
        "%s",
        iteration_line(
            progress.iteration,
            run.config,
            consumed=progress.consumed_samples,
            milliseconds=1000 * window.seconds / window.steps,
            learning_rate=_learning_rate(run),
            terms=window.means(),
            grad_norm=result.grad_norm,
            skipped=progress.skipped_iterations,
            nans=progress.nan_iterations,
            throughput=_throughput(run, window) if run.config.log_throughput else None,
        ),
    )


def _throughput(run: Run, window: Window) -> float:
    """Model TFLOP/s of one rank."""
    config = run.config
    length = window.num_tokens / (window.steps * config.num_microbatches * config.micro_batch_size)
    flops = step_flops(run.model.module.shape, run.heads.l_max, window.num_tokens, length)
    return flops / config.tensor_parallel / window.seconds / 1e12


def _learning_rate(run: Run) -> float:
    rate = get_canonical_lr_for_logging(run.optimizer.param_groups)
    return math.nan if rate is None else float(rate)


@contextlib.contextmanager
def _whole_parameters(run: Run) -> Iterator[None]:
    """Complete this rank's parameters first: with --overlap-param-gather other ranks' updates arrive only in the
    next forward pass.
    """
    if run.config.overlap_param_gather:
        run.model.disable_forward_pre_hook(param_sync=True)
    yield
    if run.config.overlap_param_gather:
        run.model.enable_forward_pre_hook()


def evaluate_held_out(run: Run) -> bool:
    """Evaluate, log, and tell whether this is the best so far; iteration 0 (the untrained heads) is never kept as
    best.
    """
    progress, where = run.progress, device.device()
    with _whole_parameters(run):
        measured = evaluate(
            run.held_out,
            partial(score_sample, run.model, heads=run.heads, device=where),
            rank=data_parallel_rank(),
            world_size=run.config.data_parallel,
            reduce_sum=_sum_over_ranks,
        )
    # the untrained model is no checkpoint to go back to
    is_best = progress.iteration > 0 and measured["ndcg@10"] > progress.best_ndcg
    if is_best:
        progress.best_iteration, progress.best_ndcg = progress.iteration, measured["ndcg@10"]
    logger.info(
        " validation at iteration %d | held-out NDCG@10: %.4f%s |%s contexts: %d |",
        progress.iteration,
        measured["ndcg@10"],
        " (best)" if is_best else "",
        "".join(
            f" held-out {name.replace('_', ' ')}: {value:.4f} |"
            for name, value in measured.items()
            if name.endswith("_accuracy")
        ),
        measured["contexts"],
    )
    run.metrics.write("valid", progress.iteration, {**measured, "is_best": is_best})
    return is_best


def _sum_over_ranks(sums: np.ndarray) -> np.ndarray:
    return sum_over_data_parallel(torch.from_numpy(sums).to(device.device())).cpu().numpy()


def _require_finite_weights(run: Run) -> None:
    """A step that was finite itself can still have thrown the weights out of range; such a model is neither saved
    nor called complete.
    """
    is_broken = not all(bool(parameter.isfinite().all()) for parameter in run.model.parameters())
    # asked of all ranks: with sharded weights only one of them may hold the NaN
    if largest_on_any_rank(torch.tensor([float(is_broken)], device=device.device())).item():
        raise InputError(
            f"iteration {run.progress.iteration}: the weights are not finite any more, so nothing is saved; "
            f"lower --lr (or set --clip-grad) and give another --save than {run.config.save}"
        )


def _save(run: Run) -> bool:
    """Save where there is a place; whether it was."""
    if run.config.save is not None:
        with _whole_parameters(run):
            _require_finite_weights(run)
            run.checkpoints.save(run.model, run.optimizer, run.scheduler, asdict(run.progress))
        return True
    return False
