"""What a run says: Megatron's log line for people, metrics.jsonl for machines, TensorBoard and wandb where asked for.

Megatron drops values that are not positive from its line; this line is ours and prints them signed, in Megatron's field
order.
"""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrank.errors import InputError
from headrank.files import quote
from headrank.formats import atomic_write
from headrank.log_level import log_level
from megatron_patches.training.config import TrainingConfig

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
# metrics.jsonl name -> name on the line for people
LINE_NAMES = {
    "total": "headrank loss",
    "align": "alignment loss",
    "proximal": "proximal penalty",
    "omega": "omega",
    "teacher": "teacher loss",
    "contrast": "in-batch loss",
    "accuracy": "preference accuracy",
    "teacher_accuracy": "teacher accuracy",
    "score_margin": "score margin",
    "middle_std": "mid-zone std",
    "entropy": "score entropy",
}


def set_up_logging(rank: int) -> None:
    """Plain lines on stdout from rank 0, warnings and worse from everybody; the one place that filters by rank."""
    level = log_level() if rank == 0 else "WARNING"
    logging.basicConfig(level=level, format="%(message)s", force=True)
    logging.getLogger("megatron.core").setLevel("WARNING")


def iteration_line(
    iteration: int,
    config: TrainingConfig,
    *,
    consumed: int,
    milliseconds: float,
    learning_rate: float,
    terms: Mapping[str, float],
    grad_norm: float,
    skipped: int,
    nans: int,
    throughput: float | None = None,
) -> str:
    """Megatron's line: same fields in the same order, our terms where Megatron has its losses."""
    hidden: tuple[str, ...] = () if config.loss.needs_teacher else ("teacher", "teacher_accuracy")
    hidden += () if config.loss.in_batch_weight > 0 else ("contrast",)
    parts = [
        # Megatron's own wording and field order: tools that read its logs read this one
        f" [{datetime.datetime.now():%Y-%m-%d %H:%M:%S.%f}] iteration {iteration:8d}/{config.train_iters:8d} |",
        f" consumed samples: {consumed:12d} |",
        f" elapsed time per iteration (ms): {milliseconds:.1f} |",
        "" if throughput is None else f" throughput per GPU (TFLOP/s/GPU): {throughput:.1f} |",
        f" learning rate: {learning_rate:.6E} |",
        f" global batch size: {config.global_batch_size:5d} |",
        *(f" {LINE_NAMES[name]}: {terms[name]:.6E} |" for name in LINE_NAMES if name in terms and name not in hidden),
        f" loss scale: 1.0 | grad norm: {grad_norm:.3f} |",
        f" number of skipped iterations: {skipped:3d} | number of nan iterations: {nans:3d} |",
    ]
    return "".join(parts)


class MetricsWriter:
    """One JSON line an event, with signed values; mirrored to TensorBoard and wandb. A no-op without ``directory``."""

    def __init__(self, config: TrainingConfig, resume_iteration: int, is_writer: bool) -> None:
        """Events after ``resume_iteration`` belong to steps that will be done again; they are cut off. A start from 0
        cuts all.

        Every rank reads the file, so that all refuse a damaged one; the writer alone writes.
        """
        file = Path(config.save) / METRICS_FILE if config.save else None
        kept = None if file is None else _lines_until(file, resume_iteration or -1)
        self.file = file if is_writer else None
        self.interval = config.tensorboard_log_interval
        self._board = _tensorboard(config) if is_writer else None
        self._wandb = _wandb(config) if is_writer else None
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            if kept is not None:
                with atomic_write(self.file, "wb") as stream:
                    stream.writelines(kept)

    def write(self, event: str, iteration: int, values: Mapping[str, Any]) -> None:
        """Record one event; a full disk costs the line, not the run."""
        row = {"event": event, "iteration": iteration, **values}
        if self.file is not None:
            try:
                with open(self.file, "a", encoding="utf-8") as stream:
                    stream.write(json.dumps(row) + "\n")
            except OSError as error:
                logger.warning("metrics.jsonl: line of iteration %d lost (%s)", iteration, error)
        numbers = {
            name: value
            for name, value in values.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        if self._board is not None and (event != "train" or iteration % self.interval == 0):
            for name, value in numbers.items():
                self._board.add_scalar(f"{event}/{name}", value, iteration)
        if self._wandb is not None:
            self._wandb.log({f"{event}/{name}": value for name, value in numbers.items()}, step=iteration)

    def close(self) -> None:
        """Flush TensorBoard and wandb."""
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def _lines_until(file: Path, iteration: int) -> list[bytes] | None:
    """The file's events up to ``iteration``, without lines torn by a kill or a full disk; None when there is no
    file.
    """
    if file.is_dir():
        raise InputError(f"{file}: a folder where the run's log belongs; move it or use another --save")
    if not file.exists():
        return None
    kept = []
    for number, line in enumerate(file.read_bytes().splitlines(keepends=True), start=1):
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError:
            raise InputError(f"{file}:{number}: not UTF-8; delete the line, or move the file away") from None
        except (ValueError, RecursionError):
            # the last line of a killed run; a whole line that is no event is refused below
            logger.info("%s:%d: half a line, left out", file, number)
            continue
        if not isinstance(row, dict) or type(row.get("iteration")) is not int:
            found = quote(line.decode("utf-8").strip())
            raise InputError(
                f"{file}:{number}: {found} is no event with a whole 'iteration'; delete the line, or move the file away"
            )
        if row["iteration"] <= iteration:
            kept.append(line.rstrip(b"\r\n") + b"\n")
    return kept


def _tensorboard(config: TrainingConfig) -> Any:
    if not config.tensorboard_dir:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError("--tensorboard-dir needs the tensorboard package: pip install tensorboard") from None
    return SummaryWriter(log_dir=config.tensorboard_dir)


def _wandb(config: TrainingConfig) -> Any:
    if not config.wandb_project:
        return None
    try:
        import wandb
    except ImportError:
        raise InputError("--wandb-project needs the wandb package: pip install wandb") from None
    return wandb.init(
        project=config.wandb_project,
        name=config.wandb_exp_name or None,
        dir=config.wandb_save_dir or None,
        config=config.to_dict(),
    )
