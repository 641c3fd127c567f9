"""Accelerators by name and the roofline: how long FLOPs, memory traffic and collectives take at the very least.

Numbers are the vendors' published peaks: dense bfloat16 matrix FLOP/s, float32 FLOP/s of the ordinary cores, memory
bandwidth, and the intra-node link in one direction (half of the advertised sum of both). The network between nodes is a
property of the cluster, not of the GPU: the value here is what such nodes are usually built with and can be replaced.
No torch needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from headrank.errors import InputError

GIGA, TERA, GIB, MIB = 10**9, 10**12, 2**30, 2**20


@dataclass(frozen=True)
class Gpu:
    """One accelerator: bytes, FLOP/s and bytes/s. Links are per GPU and direction."""

    name: str
    memory_bytes: float
    bf16_flops: float
    fp32_flops: float
    memory_bandwidth: float
    link_bandwidth: float  # inside a node
    network_bandwidth: float  # between nodes


def _gpu(
    name: str, mib: int, bf16_tera: float, fp32_tera: float, hbm_giga: float, link_giga: float, network_giga: float
) -> Gpu:
    return Gpu(
        name, mib * MIB, bf16_tera * TERA, fp32_tera * TERA, hbm_giga * GIGA, link_giga * GIGA, network_giga * GIGA
    )


GPUS: Mapping[str, Gpu] = {
    "h20": _gpu("H20", 97871, 148, 44, 4000, 450, 50),  # 97,871 MiB: the paper's own number
    "h100": _gpu("H100 SXM", 81559, 989.4, 66.9, 3350, 450, 50),
    "h800": _gpu("H800 SXM", 81559, 989.4, 66.9, 3350, 200, 50),
    "a100": _gpu("A100 SXM 80GB", 81920, 312, 19.5, 2039, 300, 25),
    "l40s": _gpu("L40S", 46068, 362.05, 91.6, 864, 32, 25),  # no NVLink: PCIe 4.0 x16
    "mi300x": _gpu("MI300X", 196592, 1307.4, 163.4, 5300, 448, 50),
}


def find_gpu(name: str, **given: float | None) -> Gpu:
    """The GPU of that name with any given number in place of its own; 'custom' needs all of them."""
    values = {key: value for key, value in given.items() if value is not None}
    for key, value in values.items():
        if not 0 < value < float("inf"):
            raise InputError(f"{flag_of(key)} must be a number above 0")
    if name.lower() == "custom":
        missing = [field.name for field in dataclasses.fields(Gpu) if field.name not in (*values, "name")]
        if missing:
            raise InputError(f"`gpu` custom needs every number; missing: {', '.join(map(flag_of, missing))}")
        return Gpu(name="custom", **values)
    if name.lower() not in GPUS:
        raise InputError(f"`gpu` {name} is not one of {', '.join(GPUS)} or custom")
    return Gpu(**{**dataclasses.asdict(GPUS[name.lower()]), **values})


def flag_of(field: str) -> str:
    """The option of 'headrank plan' that replaces a number of a GPU."""
    return "--gpu-" + field.removesuffix("_bytes").removesuffix("_flops").replace("_", "-")


def wire_bytes(collective: str, message_bytes: float, group_size: int) -> float:
    """Bytes each rank must send for one collective of a tensor of ``message_bytes`` (bandwidth-optimal ring).

    The message is the whole tensor: the input of all-reduce, reduce-scatter and all-to-all, the output of all-gather.
    """
    if group_size <= 1:
        return 0.0
    share = (group_size - 1) / group_size
    is_shared = collective in ("all-gather", "reduce-scatter", "all-to-all")
    return message_bytes * (2 * share if collective == "all-reduce" else share if is_shared else 1.0)


def is_inside_node(ranks: tuple[int, ...], gpus_per_node: int) -> bool:
    """Whether all ranks sit in one node."""
    return len({rank // gpus_per_node for rank in ranks}) <= 1
