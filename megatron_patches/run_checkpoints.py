"""Checkpoints of a run: where to resume, what is saved beside the weights, which one is the best, which ones may go.

Iteration directories themselves are checkpoint.py's. A checkpoint counts from the moment its directory is complete; older ones are
removed only afterwards, so a full disk or a kill never costs the last good one.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from headrank.errors import InputError
from headrank.formats import write_json
from headrank.heads import HeadSet
from megatron_patches import checkpoint
from megatron_patches.config import TrainingConfig, changed_fields
from megatron_patches.weights import load_hf_weights

logger = logging.getLogger(__name__)

BEST_FILE, BEST_LINK = "best_checkpoint.json", "best"
COMPLETE_FILE = "training_complete.json"


def resolve_start(config: TrainingConfig) -> TrainingConfig:
    """A --load that holds an imported model (``release``) is where training starts, and where it resumes once iterations lie beside it."""
    if config.load is None:
        return config
    release = checkpoint.iteration_directory(config.load, "release")
    start = config.pretrained_checkpoint or (str(release) if checkpoint.is_complete(release) else None)
    is_resuming = checkpoint.latest_complete_iteration(config.load) != "release"
    return dataclasses.replace(config, pretrained_checkpoint=start, load=config.load if is_resuming else None)


def load_start_weights(config: TrainingConfig, model: torch.nn.Module) -> None:
    """The weights training starts from, which are also the reference's: --pretrained-checkpoint, else the model's safetensors."""
    if config.pretrained_checkpoint is not None:
        checkpoint.load_checkpoint(config.pretrained_checkpoint, model)
    else:
        load_hf_weights(model, config.model)


class RunCheckpoints:
    """The checkpoints of one run under --save (and --load)."""

    def __init__(self, config: TrainingConfig, heads: HeadSet) -> None:
        """Find the iteration to resume from, skipping torn ones."""
        self.config, self.heads = config, heads
        self.source, self.resume_iteration = config.save, _latest(config.save)
        if self.resume_iteration is None and config.load is not None:  # a restarted job goes on with its own checkpoints
            self.source, self.resume_iteration = config.load, _latest(config.load)
            if self.resume_iteration is None:
                raise InputError(f"--load {config.load}: no complete checkpoint there; correct the path or remove the flag")
        self.is_fresh_start = config.finetune and self.source == config.load
        if config.save is not None and torch.distributed.get_rank() == 0:
            for remains in [*Path(config.save).glob(".removed-*"), *Path(config.save).glob(".saving-*")]:
                shutil.rmtree(remains, ignore_errors=True)  # of a killed run

    def load(self, model: DistributedDataParallel, optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler) -> dict[str, Any]:
        """Load the checkpoint to resume from, if there is one, and return the progress saved with it (empty at the start)."""
        if self.source is None or self.resume_iteration is None:
            return {}
        if self.is_fresh_start:
            checkpoint.load_checkpoint(self.source, model, iteration=self.resume_iteration)
            optimizer.reload_model_params()
            return {}
        loaded = optimizer if self.config.load_optimizer else None
        try:
            extra = checkpoint.load_checkpoint(self.source, model, loaded, scheduler, iteration=self.resume_iteration)
        except AssertionError as error:
            if "OptimizerParamScheduler" not in str(error):
                raise
            raise InputError(
                f"{self.source}: another schedule than the checkpoint's ({error}); give the same flags, or --override-opt-param-scheduler "
                "to go on with the new ones, or --use-checkpoint-opt-param-scheduler"
            ) from error
        if loaded is None:
            optimizer.reload_model_params()
        _check_same_heads(extra, self.heads, self.source)
        changed = changed_fields(extra["config"], self.config)
        if changed:
            logger.warning("resuming with other settings than the checkpoint's: %s", ", ".join(changed))
        logger.info("resumed from %s at iteration %d", self.source, self.resume_iteration)
        progress = extra["progress"]
        self._name_best(progress)
        return progress

    def save(
        self, model: DistributedDataParallel, optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler, progress: dict[str, Any]
    ) -> None:
        """Save this iteration; then name the best and drop what is older than wanted."""
        assert self.config.save is not None
        extra = {"progress": progress, "config": self.config.to_dict(), "heads": self.heads.to_dict()}
        saved = optimizer if self.config.save_optimizer else None
        try:
            checkpoint.save_checkpoint(self.config.save, progress["iteration"], model, saved, scheduler, extra)
        except checkpoint.WRITE_ERRORS as error:
            raise InputError(
                f"{self.config.save}: the checkpoint of iteration {progress['iteration']} could not be written "
                f"({checkpoint.write_failure(error)}); make room and start again, earlier checkpoints are untouched"
            ) from error
        logger.info("saved checkpoint at iteration %d to %s", progress["iteration"], self.config.save)
        self._name_best(progress)
        self._prune(progress["best_iteration"])

    def finish(self, is_complete: bool, progress: dict[str, Any]) -> None:
        """Leave a mark that the run reached its end, for the pipeline."""
        if is_complete and self.config.save is not None and torch.distributed.get_rank() == 0:
            write_json(Path(self.config.save) / COMPLETE_FILE, {**progress, "train_iters": self.config.train_iters})

    def _name_best(self, progress: dict[str, Any]) -> None:
        if progress["best_iteration"] and self.config.save is not None and torch.distributed.get_rank() == 0:
            directory = checkpoint.iteration_directory(self.config.save, progress["best_iteration"])
            if directory.is_dir():
                values = {"iteration": progress["best_iteration"], "ndcg@10": progress["best_ndcg"], "directory": directory.name}
                write_json(Path(self.config.save) / BEST_FILE, values)
                _point(Path(self.config.save) / BEST_LINK, directory.name)

    def _prune(self, best_iteration: int) -> None:
        """Remove all but the newest --headrank-keep-checkpoints and the best; renamed first, so that none is ever half there."""
        if not self.config.keep_checkpoints or torch.distributed.get_rank() != 0:
            return
        assert self.config.save is not None
        found = checkpoint.complete_iterations(self.config.save)
        for iteration in found[: -self.config.keep_checkpoints]:
            if iteration != best_iteration:
                directory = checkpoint.iteration_directory(self.config.save, iteration)
                doomed = directory.with_name(f".removed-{directory.name}")
                directory.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)


def _point(link: Path, target: str) -> None:
    """Let ``link`` name a sibling directory, atomically; 'headrank export-hf --checkpoint SAVE/best' takes it."""
    temporary = link.with_name(f".{link.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)


def _latest(root: str | None) -> int | None:
    found = None if root is None else checkpoint.latest_complete_iteration(root)
    return None if found == "release" else found


def _check_same_heads(extra: dict[str, Any], heads: HeadSet, source: str) -> None:
    saved = sorted(tuple(head) for head in extra["heads"]["heads"])
    if saved != sorted(heads.heads):
        raise InputError(
            f"{source}: this checkpoint was trained with other core heads; use another --save or the heads it was trained with"
        )
