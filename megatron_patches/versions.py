"""What differs between the releases of Megatron-Core that the tests run with; the only module that knows one from
another.

0.16.1 is the newest for Python 3.10 and 3.11, the others want Python 3.12, and those from 0.18 on import triton, which
a torch for CPUs does not bring. setup.py declares the range that tests/megatron_versions runs.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from pathlib import Path
from typing import Any

TESTED = ("0.16.1", "0.17.1", "0.18.1", "0.19.2")
COMMON_FILE = "common.pt"
_COMMON_ENTRY = "common_state"  # from 0.19 on, in place of the file


def transformer_engine_is_installed() -> bool:
    """Whether Megatron itself found a whole Transformer Engine: one without its torch part is of no use to it."""
    from megatron.core.models.gpt import gpt_layer_specs

    return bool(gpt_layer_specs.HAVE_TE)


def submodules_of(part: Any) -> Any:
    """The submodules of a part of a layer spec, to be changed in place: from 0.18 on an MLP is a partial function,
    not a ModuleSpec.
    """
    return part.keywords["submodules"] if isinstance(part, functools.partial) else part.submodules


def keeps_common_data_inside(metadata: Any) -> bool:
    """Whether a checkpoint (its torch metadata) has the data that is no tensor among the tensors, as 0.19 writes it,
    or in COMMON_FILE.
    """
    return any(name.split("/")[0] == _COMMON_ENTRY for name in metadata.state_dict_metadata)


def reads_common_data_inside() -> bool:
    """Whether the Megatron-Core that is installed can read such a checkpoint."""
    from megatron.core.dist_checkpointing import serialization

    return hasattr(serialization, "_legacy_common_state_exists")


def common_file(directory: Path, metadata: Any) -> Path | None:
    """The file of a checkpoint's data that is no tensor; None where they lie among the tensors."""
    return None if keeps_common_data_inside(metadata) else directory / COMMON_FILE


def complete_router() -> None:
    """0.16.1's router asks for a product of Transformer Engine by a name that it does not define where that is
    absent.
    """
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def has_training() -> bool:
    """Whether Megatron-LM's trainer came with Megatron-Core, as it does in wheels from 0.17 on."""
    return importlib.util.find_spec("megatron.training") is not None


def run_pretrain(data_provider: Any, model_provider: Any, model_type: Any, forward_step: Any) -> None:
    """megatron.training.pretrain() with the flags in sys.argv. From 0.18 on they are parsed before it and become a
    container.
    """
    from megatron.training.training import pretrain

    if "cfg_container" not in inspect.signature(pretrain).parameters:
        pretrain(data_provider, model_provider, model_type, forward_step)
        return
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    container = pretrain_cfg_container_from_args(parse_and_validate_args())
    pretrain(
        container, data_provider, model_type=model_type, forward_step_func=forward_step, model_provider=model_provider
    )
