"""Checkpoints of a run: where to resume, what is saved beside the weights, which one is the best, which ones may go.

Iteration directories themselves are checkpoint.py's. A checkpoint counts from the moment its directory is complete;
older ones are removed only afterwards, so a full disk or a kill never costs the last good one.
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

from data_tools.contexts import CONTEXTS_FILE, PAIRS_FILE, origin_of_lists
from data_tools.list_mixture import parse_shares
from headrank.artifacts import sampled_digest
from headrank.errors import InputError
from headrank.formats import write_json
from headrank.method.heads import HeadSet
from megatron_patches.checkpoints import files as checkpoint
from megatron_patches.checkpoints.damage import DamagedCheckpoint
from megatron_patches.checkpoints.weights import load_hf_weights
from megatron_patches.lora import reset_adapters
from megatron_patches.readout_weights import PARAMETER
from megatron_patches.training.config import TrainingConfig, changed_fields

logger = logging.getLogger(__name__)

BEST_FILE, BEST_LINK = "best_checkpoint.json", "best"
COMPLETE_FILE = "training_complete.json"
# settings that decide what the optimizer's state looks like
OPTIMIZER_FLAGS = {
    "use_distributed_optimizer": "--use-distributed-optimizer",
    "bf16": "--bf16",
    "full_depth": "--headrank-full-depth",
    "train_readout": "--headrank-train-readout",
    "freeze_embeddings": "--headrank-freeze-embeddings",
}


def resolve_start(config: TrainingConfig) -> TrainingConfig:
    """Tell the checkpoint training starts from (--pretrained-checkpoint, the reference's too) from the one it resumes
    from (--load).

    With --finetune --load is where training starts. Else a --load that holds an imported model (``release``) is, and
    training resumes there once iterations lie beside it.
    """
    if config.load is None:
        return config
    if config.finetune:
        return dataclasses.replace(config, pretrained_checkpoint=config.load, load=None)
    release = checkpoint.iteration_directory(config.load, "release")
    start = config.pretrained_checkpoint or (str(release) if checkpoint.is_complete(release) else None)
    is_resuming = checkpoint.latest_complete_iteration(config.load) != "release"
    return dataclasses.replace(config, pretrained_checkpoint=start, load=config.load if is_resuming else None)


def load_start_weights(config: TrainingConfig, model: torch.nn.Module) -> None:
    """The weights training starts from, which are also the reference's: --pretrained-checkpoint, else the model's
    safetensors.

    Adapters start without effect, unless that checkpoint has them ('headrank import-hf --adapter').
    """
    reset_adapters(model, config.seed)
    if config.pretrained_checkpoint is None:
        load_hf_weights(model, config.model)
        return
    try:
        checkpoint.load_checkpoint(config.pretrained_checkpoint, model, can_lack_adapters=True)
        if (trained := dict(model.named_parameters()).get(PARAMETER)) is not None:
            torch.nn.init.zeros_(trained)  # the heads given say where the readout starts
    except DamagedCheckpoint as damage:
        raise InputError(
            f"{damage}; start from another checkpoint, an older iter_NNNNNNN directory may be named itself"
        ) from damage


class RunCheckpoints:
    """The checkpoints of one run under --save (and --load)."""

    def __init__(self, config: TrainingConfig, heads: HeadSet) -> None:
        """Find the iteration to resume from, skipping torn ones."""
        self.config, self.heads = config, heads
        # --save before --load: a job that was queued again has the same flags and goes on with what it wrote itself
        self.source, self.resume_iteration = config.save, _latest(config.save)
        # a restarted job goes on with its own checkpoints
        if self.resume_iteration is None and config.load is not None:
            self.source, self.resume_iteration = config.load, _latest(config.load)
            if self.resume_iteration is None:
                raise InputError(
                    f"--load {config.load}: no complete checkpoint there; correct the path or remove the flag"
                )
        folders, _ = parse_shares(config.train_data, "--train-data-path")
        self.data = sampled_digest(Path(folder) / name for folder in folders for name in (CONTEXTS_FILE, PAIRS_FILE))
        self.trained_on = {name: text for folder in folders for name, text in origin_of_lists(folder).items()}
        _require_no_folders(config.save)
        if config.save is not None and torch.distributed.get_rank() == 0:
            for remains in [*Path(config.save).glob(".removed-*"), *Path(config.save).glob(".saving-*")]:
                shutil.rmtree(remains, ignore_errors=True)  # of a killed run

    def load(
        self, model: DistributedDataParallel, optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler
    ) -> dict[str, Any]:
        """Load the checkpoint to resume from, if there is one, and return the progress saved with it (empty at the
        start).

        From here on the run is on its way: an old mark of completion goes, or, with nothing left to do, --save gets its
        checkpoint.
        """
        progress = self._resume(model, optimizer, scheduler)
        iteration, train_iters = progress.get("iteration", 0), self.config.train_iters
        assert train_iters is not None
        if iteration > train_iters:
            logger.info("already at iteration %d, beyond --train-iters %d: nothing is trained", iteration, train_iters)
        if self.config.save is None:
            return progress
        if iteration < train_iters:
            if torch.distributed.get_rank() == 0:
                (Path(self.config.save) / COMPLETE_FILE).unlink(missing_ok=True)
        elif not checkpoint.is_complete(checkpoint.iteration_directory(self.config.save, iteration)):
            self.save(model, optimizer, scheduler, progress)  # it came from --load
        return progress

    def _resume(
        self, model: DistributedDataParallel, optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler
    ) -> dict[str, Any]:
        if self.source is None or self.resume_iteration is None:
            return {}
        loaded = optimizer if self.config.load_optimizer else None
        try:
            extra = self._load_undamaged(model, loaded, scheduler)
        except AssertionError as error:
            # Megatron asserts on the schedule's numbers in words meant for programmers; any other assertion is a bug
            # and stays one
            if "OptimizerParamScheduler" not in str(error):
                raise
            raise InputError(
                f"{self.source}: another schedule than the checkpoint's ({error}); give the same flags, or "
                "--override-opt-param-scheduler "
                "to go on with the new ones, or --use-checkpoint-opt-param-scheduler"
            ) from error
        if loaded is None:
            # the optimizer's float32 copies were made before the weights were loaded
            optimizer.reload_model_params()
        changed = changed_fields(extra["config"], self.config)
        if "train_data" not in changed and extra.get("data", self.data) != self.data:
            changed.append("the content of train_data")
        if changed:
            logger.warning("resuming with other settings than the checkpoint's: %s", ", ".join(changed))
        logger.info("resumed from %s at iteration %d", self.source, self.resume_iteration)
        progress = extra["progress"]
        self._name_best(progress)
        return progress

    def _load_undamaged(
        self, model: torch.nn.Module, optimizer: MegatronOptimizer | None, scheduler: OptimizerParamScheduler
    ) -> dict[str, Any]:
        """Load the newest checkpoint whose files are what was written."""
        assert self.source is not None and self.resume_iteration is not None
        while True:
            try:
                return checkpoint.load_checkpoint(
                    self.source, model, optimizer, scheduler, self.resume_iteration, self._check_same_run
                )
            except DamagedCheckpoint as damage:
                older = [
                    iteration
                    for iteration in checkpoint.complete_iterations(self.source)
                    if iteration < self.resume_iteration
                ]
                if not older:
                    raise InputError(
                        f"{damage}, and no older one is left; remove {self.source}/iter_* to start anew"
                    ) from damage
                # loud, because the steps in between are done again
                logger.warning("%s; falling back to iteration %d", damage, older[-1])
                self.resume_iteration = older[-1]

    def _check_same_run(self, extra: dict[str, Any]) -> None:
        """Refuse what cannot be continued with these flags, before anything is loaded."""
        if not {"config", "heads", "progress"} <= extra.keys():
            raise InputError(
                f"{self.source}: no checkpoint of a training run; start from it with --pretrained-checkpoint"
            )
        _check_same_heads(extra, self.heads, str(self.source))
        saved, current = extra["config"], self.config.to_dict()
        if current["full_depth"] and not saved.get("full_depth"):
            raise InputError(
                f"{self.source}: was trained without --headrank-full-depth and holds no upper layers; remove the flag"
            )
        # a fresh optimizer fits any of these settings
        if not self.config.load_optimizer:
            return
        before, now = saved.get("expert_parallel", 1), current["expert_parallel"]
        if (before > 1) != (now > 1):  # Megatron then keeps the experts' state apart, or does not
            raise InputError(
                f"{self.source}: was trained at --expert-model-parallel-size {before}, its optimizer's state fits "
                f"none of {now}; "
                f"give {before}, or go on with a fresh optimizer: --no-load-optim"
            )
        for name, flag in OPTIMIZER_FLAGS.items():
            if saved.get(name, current[name]) != current[name]:
                raise InputError(
                    f"{self.source}: was trained {'with' if saved[name] else 'without'} {flag}, its optimizer's "
                    "state fits no other; "
                    f"{'add' if saved[name] else 'remove'} {flag}, or go on with a fresh optimizer: --no-load-optim"
                )

    def save(
        self,
        model: DistributedDataParallel,
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
        progress: dict[str, Any],
    ) -> None:
        """Save this iteration; then name the best and drop what is older than wanted."""
        assert self.config.save is not None
        extra = {
            "progress": progress,
            "config": self.config.to_dict(),
            "heads": self.heads.to_dict(),
            "data": self.data,
        }
        extra |= {"trained_on": self.trained_on} if self.trained_on else {}
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
        self._prune(progress["iteration"])

    def finish(self, is_complete: bool, progress: dict[str, Any]) -> None:
        """Leave a mark that the run reached its end, for the pipeline."""
        if is_complete and self.config.save is not None and torch.distributed.get_rank() == 0:
            write_json(Path(self.config.save) / COMPLETE_FILE, {**progress, "train_iters": self.config.train_iters})

    def _name_best(self, progress: dict[str, Any]) -> None:
        if progress["best_iteration"] and self.config.save is not None and torch.distributed.get_rank() == 0:
            directory = checkpoint.iteration_directory(self.config.save, progress["best_iteration"])
            if directory.is_dir():
                values = {
                    "iteration": progress["best_iteration"],
                    "ndcg@10": progress["best_ndcg"],
                    "directory": directory.name,
                }
                write_json(Path(self.config.save) / BEST_FILE, values)
                _point(Path(self.config.save) / BEST_LINK, directory.name)

    def _prune(self, current: int) -> None:
        """Remove all but the newest --headrank-keep-checkpoints, those of --headrank-keep-iters and the best; renamed
        first, so that none is ever half there.

        Iterations above the current one are there after the tracker was set back. They are not counted and stay until
        the run has passed them: they may be what the user goes back to.
        """
        if not self.config.keep_checkpoints or torch.distributed.get_rank() != 0:
            return
        assert self.config.save is not None
        best = (Path(self.config.save) / BEST_LINK).resolve()
        kept = set(self.config.keep_iters)
        passed = [
            each for each in checkpoint.complete_iterations(self.config.save) if each <= current and each not in kept
        ]
        for iteration in passed[: -self.config.keep_checkpoints]:
            directory = checkpoint.iteration_directory(self.config.save, iteration)
            if directory.resolve() != best:
                doomed = directory.with_name(f".removed-{directory.name}")
                # the rename is one step; what a kill leaves of the deletion has a name that no reader takes for a
                # checkpoint
                directory.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)


def _require_no_folders(save: str | None) -> None:
    """A copy that follows links leaves a folder where the link was; say so before the training, not at its first
    save.
    """
    for path in [] if save is None else [Path(save) / name for name in (BEST_FILE, BEST_LINK, COMPLETE_FILE)]:
        if path.is_dir() and not path.is_symlink():
            raise InputError(
                f"{path}: a folder where the run keeps its own {path.name}; move it away or use another --save"
            )


def _point(link: Path, target: str) -> None:
    """Let ``link`` name a sibling directory, atomically; 'headrank export-hf --checkpoint SAVE/best' takes it."""
    temporary = link.with_name(f".{link.name}.new")
    temporary.unlink(missing_ok=True)
    # a new link renamed over the old one: removing it first would leave a moment without a best checkpoint
    temporary.symlink_to(target)
    temporary.replace(link)


def _latest(root: str | None) -> int | None:
    found = None if root is None else checkpoint.latest_complete_iteration(root)
    return None if found == "release" else found


def _check_same_heads(extra: dict[str, Any], heads: HeadSet, source: str) -> None:
    saved = sorted(tuple(head) for head in extra["heads"]["heads"])
    if saved != sorted(heads.heads):
        raise InputError(
            f"{source}: this checkpoint was trained with other core heads; use another --save or the heads it was "
            "trained with"
        )
    if extra["heads"].get("readout") != (None if heads.readout is None else heads.to_dict()["readout"]):
        raise InputError(
            f"{source}: this checkpoint was trained with another readout; use another --save or the heads it was "
            "trained with"
        )
    if extra["heads"].get("prompt_hash") != heads.prompt.hash:
        raise InputError(
            f"{source}: this checkpoint was trained with another prompt ({extra['heads'].get('prompt_hash')}, now "
            f"{heads.prompt.hash}); "
            "use another --save, or the heads and the --headrank-document-layout it was trained with"
        )
