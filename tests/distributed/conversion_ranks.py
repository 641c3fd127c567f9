"""What the ranks of test_conversion.py and test_checkpoints.py run."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrank.errors import InputError
from headrank.method.attention import batch_contexts
from headrank.method.prompt import PromptTemplate
from headrank.method.spans import EncodedContext
from megatron_patches import device
from tests.distributed.eager_reference import toy_loss
from tests.distributed.parity_ranks import gather_by_hf_name


def request(checkpoint: Path, base: Path, output: Path, **options: Any) -> Any:
    from megatron_patches.checkpoints.export import ExportRequest

    return ExportRequest(checkpoint=checkpoint, base=base, output=output, base_name="base", name="name", **options)


def round_trips(directories: list[Path], place: Path, sizes: list[int]) -> None:
    """HF -> model at each TP -> checkpoint -> HF, for each model whose heads allow that TP."""
    from megatron_patches.checkpoints.export import export_hf
    from megatron_patches.checkpoints.files import save_checkpoint
    from megatron_patches.checkpoints.safetensors_files import SafetensorsReader
    from megatron_patches.checkpoints.weights import load_hf_weights
    from megatron_patches.model import ModelShape, build_model

    for tp in sizes:
        device.initialize(tp)
        for directory in directories:
            shape = ModelShape.from_hf(directory)
            if shape.family == "qwen3" or tp == 2:  # the other families differ in names, not in how they are cut
                with SafetensorsReader(directory) as reader:
                    dtype = reader.dtype(reader.names()[0])
                model = build_model(shape, has_output=True, dtype=dtype)
                load_hf_weights(model, directory)
                root = place / f"{directory.name}-tp{tp}"
                save_checkpoint(root / "megatron", "release", model)
                export_hf(request(root / "megatron", directory, root / "hf", max_shard_size=60_000))
    device.shutdown()


def import_and_load(
    directory: Path, root: Path, sizes: list[int], last_layer: int
) -> dict[int, dict[str, torch.Tensor]]:
    """Import with all processes, then load at each TP, whole and truncated; the truncated model's weights by HF
    name.
    """
    from megatron_patches.checkpoints.conversion import import_hf
    from megatron_patches.checkpoints.files import load_checkpoint
    from megatron_patches.checkpoints.weights import load_hf_weights
    from megatron_patches.model import ModelShape, build_model

    device.initialize(1)
    import_hf(directory, root)
    found: dict[int, dict[str, torch.Tensor]] = {}
    for tp in sizes:
        device.initialize(tp)
        shape = ModelShape.from_hf(directory)
        whole, expected = build_model(shape, has_output=True), build_model(shape, has_output=True)
        load_checkpoint(root, whole)
        load_hf_weights(expected, directory)
        for (name, one), (_, other) in zip(whole.named_parameters(), expected.named_parameters(), strict=True):
            assert torch.equal(one, other), name
        truncated = build_model(shape, last_layer=last_layer)
        load_checkpoint(root, truncated)
        found[tp] = gather_by_hf_name(truncated, {name: value.detach() for name, value in truncated.named_parameters()})
    device.shutdown()
    return found


class Trainer:
    """A truncated model with Megatron's optimizer on one fixed batch."""

    def __init__(
        self,
        directory: Path,
        contexts: list[EncodedContext],
        heads: dict[int, list[int]],
        dtype: torch.dtype,
        is_distributed: bool,
    ) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        from megatron_patches.model import ModelShape, build_model, build_transformer_config

        tp = parallel_state.get_tensor_model_parallel_world_size()
        shape = ModelShape.from_hf(directory)
        config = build_transformer_config(shape, tensor_model_parallel_size=tp, dtype=dtype)
        self.bare = build_model(shape, last_layer=max(heads), transformer_config=config)
        inner = self.bare if dtype == torch.float32 else Float16Module(config, self.bare)
        self.model = DistributedDataParallel(
            config, DistributedDataParallelConfig(use_distributed_optimizer=is_distributed), inner
        )
        settings = OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=is_distributed,
            weight_decay=0.1,
        )
        self.optimizer = get_megatron_optimizer(settings, [self.model])
        self.heads = heads
        self.ids_BS, self.layout = batch_contexts(contexts)

    def scores(self) -> torch.Tensor:
        from megatron_patches.parallel_scores import core_head_scores

        return core_head_scores(self.model(self.ids_BS, self.layout, self.heads), self.layout)

    def step(self) -> float:
        from megatron.core.distributed import finalize_model_grads

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = toy_loss(self.scores(), self.layout.num_documents_B)
        loss.backward()
        finalize_model_grads([self.model])
        self.optimizer.step()
        return float(loss.detach())

    def go_on(self) -> dict[str, Any]:
        """Three more steps: their losses, and the weights after the first and the last."""
        losses = [self.step()]
        after_first = self.weights()
        return {"losses": [*losses, self.step(), self.step()], "after first": after_first, "weights": self.weights()}

    def weights(self) -> dict[str, torch.Tensor]:
        return gather_by_hf_name(
            self.bare, {name: value.detach().clone() for name, value in self.bare.named_parameters()}
        )


def train_save_resume(
    directory: Path, contexts: list[EncodedContext], heads: dict[int, list[int]], place: Path
) -> dict[str, Any]:
    """Two steps at TP 2 x DP 2, save, three more; then again from the checkpoint at TP 2, 1 and 4."""
    from megatron_patches.checkpoints.files import load_checkpoint, save_checkpoint
    from megatron_patches.checkpoints.weights import load_hf_weights

    results: dict[str, Any] = {}
    for dtype, is_distributed in ((torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)):
        name = f"{str(dtype).removeprefix('torch.')}, {'distributed' if is_distributed else 'plain'} optimizer"
        root = place / name.replace(", ", "-").replace(" ", "-")
        device.initialize(2)
        trainer = Trainer(directory, contexts, heads, dtype, is_distributed)
        load_hf_weights(trainer.model, directory)
        trainer.optimizer.reload_model_params()
        save_checkpoint(root, 0, trainer.model, trainer.optimizer)  # a fresh optimizer can be saved too
        trainer.step()
        trainer.step()
        save_checkpoint(root, 2, trainer.model, trainer.optimizer, extra={"seen": [1, 2]})
        saved = trainer.weights()
        results[name] = {"saved": saved, "went on": trainer.go_on()}
        for tp in (2, 1, 4) if is_distributed else (2,):
            device.initialize(tp)
            again = Trainer(directory, contexts, heads, dtype, is_distributed)
            assert load_checkpoint(root, again.model, again.optimizer) == {"seen": [1, 2]}
            loaded = again.weights()
            assert all(torch.equal(loaded[key], value) for key, value in saved.items())
            results[name][tp] = again.go_on()
    device.shutdown()
    return results


def train_and_export(
    directory: Path, contexts: list[EncodedContext], heads: Any, place: Path
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Train a little at TP 2, save with the heads, export whole and truncated; the trained model's scores and
    weights.
    """
    from megatron_patches.checkpoints.export import export_hf
    from megatron_patches.checkpoints.files import save_checkpoint
    from megatron_patches.checkpoints.weights import load_hf_weights

    device.initialize(2)
    trainer = Trainer(directory, contexts, heads.by_layer(), torch.float32, True)
    load_hf_weights(trainer.model, directory)
    trainer.optimizer.reload_model_params()
    for _ in range(3):
        trainer.step()
    stored = {name: value for name, value in heads.to_dict().items() if name != "table"}
    extra = {"heads": stored, "progress": {"iteration": 3}, "config": {"lr": 1e-3, "save": str(place.absolute())}}
    save_checkpoint(place / "megatron", 3, trainer.model, trainer.optimizer, extra=extra)
    with torch.no_grad():
        scores = trainer.scores()
    weights = trainer.weights()
    export_hf(request(place / "megatron", directory, place / "full", max_shard_size=60_000))
    export_hf(request(place / "megatron" / "iter_0000003", directory, place / "short", is_truncated=True))
    other = dataclasses.replace(heads, prompt=PromptTemplate(max_words=3))
    with pytest.raises(InputError, match="chosen with another prompt"):
        export_hf(request(place / "megatron", directory, place / "other", heads=other))
    device.shutdown()
    return scores, weights


def die_while_exporting(directory: Path, place: Path) -> None:
    """Export, and be killed after five tensors."""
    from megatron_patches.checkpoints.conversion import import_hf
    from megatron_patches.checkpoints.export import export_hf

    device.initialize(1)
    import_hf(directory, place / "megatron")

    def kill_after_five(names: list[str]) -> Iterator[str]:
        for index, name in enumerate(names):
            if index == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            yield name

    export_hf(request(place / "megatron", directory, place / "hf"), report=kill_after_five)


def single_process_checks(directory: Path, place: Path) -> dict[str, Any]:
    """Export again over a killed one; failures inside an export; torn checkpoints. All in a world of one."""
    import logging

    from headrank.errors import InputError
    from megatron_patches.checkpoints import export
    from megatron_patches.checkpoints.files import (
        complete_iterations,
        latest_complete_iteration,
        load_checkpoint,
        save_checkpoint,
    )
    from megatron_patches.checkpoints.weights import load_hf_weights
    from megatron_patches.model import ModelShape, build_model

    device.initialize(1)
    found: dict[str, Any] = {}

    def refusal(action: Any) -> str:
        try:
            action()
        except InputError as error:
            return str(error)
        return "nothing was refused"

    export.export_hf(request(place / "megatron", directory, place / "hf"))
    found["again"] = refusal(lambda: export.export_hf(request(place / "megatron", directory, place / "hf")))
    export.export_hf(request(place / "megatron", directory, place / "hf", can_overwrite=True))
    found["truncate without heads"] = refusal(
        lambda: export.export_hf(request(place / "megatron", directory, place / "short", is_truncated=True))
    )

    def fail(*_: Any) -> None:
        raise OSError("No space left on device")

    write_config, export._write_config = export._write_config, fail
    try:
        export.export_hf(request(place / "megatron", directory, place / "failed"))
    except InputError:
        found["left after a failure"] = sorted(path.name for path in place.iterdir() if "failed" in path.name)
    export._write_config = write_config

    root = place / "run"
    model = build_model(ModelShape.from_hf(directory), last_layer=2)
    load_hf_weights(model, directory)
    for iteration in (1, 2, 3):
        save_checkpoint(root, iteration, model, extra={"iteration": iteration})
    victim = next(iter(sorted((root / "iter_0000003").glob("*.distcp"))))
    os.truncate(victim, victim.stat().st_size // 2)
    (root / "iter_0000002" / "metadata.json").unlink()
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("megatron_patches.checkpoints.files").addHandler(handler)
    found["latest"] = latest_complete_iteration(root)
    found["warned"] = records
    found["complete"] = complete_iterations(root)
    found["loaded"] = load_checkpoint(root, model)
    found["torn on demand"] = refusal(lambda: load_checkpoint(root, model, iteration=3))
    found["no optimizer"] = refusal(lambda: load_checkpoint(root, model, optimizer=object(), iteration=1))
    deeper = build_model(ModelShape.from_hf(directory), last_layer=3)
    found["other depth"] = refusal(lambda: load_checkpoint(root, deeper, iteration=1))
    found["nothing there"] = refusal(lambda: load_checkpoint(place / "nowhere", model))
    device.shutdown()
    return found


def peak_of_import(tiny: Path, directory: Path, root: Path) -> int:
    """Bytes by which importing a model raises this process's peak above that of importing a tiny one."""
    from headrank.provenance import peak_memory_bytes
    from megatron_patches.checkpoints.conversion import import_hf

    device.initialize(1)
    import_hf(tiny, root.with_name("tiny-megatron"))
    before = peak_memory_bytes()
    import_hf(directory, root)
    device.shutdown()
    return peak_memory_bytes() - before


def peak_of_export(tiny: Path, directory: Path, root: Path, output: Path) -> int:
    """The same for exporting it twice: everything from the checkpoint, and all layers but two from the base."""
    from headrank.provenance import peak_memory_bytes
    from megatron_patches.checkpoints.export import export_hf
    from megatron_patches.checkpoints.files import save_checkpoint
    from megatron_patches.model import ModelShape, build_model

    device.initialize(1)
    export_hf(request(root.with_name("tiny-megatron"), tiny, output.with_name("tiny-hf")))
    save_checkpoint(root.with_name("short"), 1, build_model(ModelShape.from_hf(directory), last_layer=1))
    before = peak_memory_bytes()
    export_hf(request(root, directory, output))
    export_hf(request(root.with_name("short"), directory, output.with_name("short-hf")))
    device.shutdown()
    return peak_memory_bytes() - before
