"""Write the planner's tables into docs/scaling.md and docs/reproduction.md: python docs/scaling_tables.py [TABLE ...]

Each table stands between two marker comments and is replaced whole; the text around it is left alone. Every number is
one of `headrank plan --by-depth`: one rank of the job on fake tensors. No GPU and no weights are needed; all tables
take some minutes.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from headrank.commands.plan import quieten_megatron
from headrank.method.heads import HeadSet
from headrank.method.prompt import PromptTemplate

quieten_megatron()

from megatron_patches.planner.gpus import GIB, GPUS, find_gpu  # noqa: E402
from megatron_patches.planner.job import Job  # noqa: E402
from megatron_patches.planner.measure import measure, measure_by_depth  # noqa: E402
from megatron_patches.planner.meter import Costs  # noqa: E402
from megatron_patches.planner.plan import Data, Plan  # noqa: E402
from megatron_patches.planner.shapes import KNOWN_MODELS, heads_of, shape_of  # noqa: E402

DOCS = Path(__file__).resolve().parent
PAPER_TP = {"Qwen3-0.6B": 4, "Qwen3-1.7B": 4, "Qwen3-4B": 8}
QWEN3 = [name for name in KNOWN_MODELS if name.startswith("Qwen3")]
PAIRS_A_QUERY = 431  # the paper's 91,000 pairs over 211 queries


def plan(
    model: str,
    tensor_parallel: int,
    *,
    gpu: str = "h20",
    nodes: int = 1,
    recipe: str = "ours",
    data: Data | None = None,
    is_whole: bool = False,
    **job: object,
) -> Plan:
    """A plan on nodes of eight GPUs; ``is_whole`` builds every layer instead of extending a few."""
    shape = shape_of(model)
    made = Job(
        model, shape, **{"heads": heads_of(model, shape), **job}, tensor_parallel=tensor_parallel, world_size=8 * nodes
    )  # type: ignore[arg-type]
    how = measure if is_whole else measure_by_depth
    return Plan(made, recipe, find_gpu(gpu), 8, data or Data(), how(made, recipe))


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """One Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def gib(value: float) -> str:
    """Bytes as GiB."""
    return f"{value / GIB:.1f}"


def hours(one: Plan) -> str:
    """From the bound to nothing overlapped."""
    low, high = one.hours("bound"), one.hours("serial")
    return f"{low:,.0f} - {high:,.0f}" if high >= 100 else f"{low:.2g} - {high:.2g}"


def paper() -> str:
    """The three launchers as they are, with sixteen pairs per context, and the paper's text."""
    rows = []
    for model, size in PAPER_TP.items():
        for label, one in (
            ("launcher, P = 1", plan(model, size, pairs_per_context=1, is_sequence_parallel=True)),
            ("P = 16", plan(model, size, is_sequence_parallel=True)),
            ("the paper's text", plan(model, size, recipe="literal")),
        ):
            step = one.step
            memory = (gib(one.measured.peak_bytes), gib(one.measured.activation_bytes))
            rows.append(
                (
                    model,
                    size,
                    label,
                    *memory,
                    f"{step.bound:.3g}",
                    f"{step.serial:.3g}",
                    f"{one.num_steps:,}",
                    hours(one),
                )
            )
    header = (
        "model",
        "TP",
        "recipe",
        "peak GiB",
        "of it activations",
        "step s, bound",
        "serial",
        "steps",
        "hours, bound - serial",
    )
    return markdown(header, rows)


def models() -> str:
    """Model size at TP 8 on one node."""
    rows = []
    for model in QWEN3:
        one = plan(model, 8)
        depth = f"{one.job.heads.l_max + 1} of {one.job.shape.layers}"
        memory = (gib(one.measured.lasting_bytes), gib(one.measured.activation_bytes), "yes" if one.fits else "no")
        flops = f"{one.measured.microbatch.flops / 1e12:.1f}"
        rows.append((model, depth, *memory, flops, f"{one.step.bound:.3g}", f"{one.step.serial:.3g}", hours(one)))
    header = (
        "model",
        "layers",
        "lasting GiB",
        "activations GiB",
        "fits",
        "TFLOP per context and GPU",
        "step s, bound",
        "serial",
        "hours",
    )
    return markdown(header, rows)


def tensor_parallel() -> str:
    """What tensor parallelism costs against data parallelism on one node."""
    rows = []
    for model, gpu in (
        ("Qwen3-0.6B", "h20"),
        ("Qwen3-4B", "h20"),
        ("Qwen3-4B", "h100"),
        ("Qwen3-4B", "l40s"),
        ("Qwen3-14B", "h20"),
    ):
        for size in (1, 2, 4, 8):
            one = plan(model, size, gpu=gpu)
            throughput = f"{one.job.global_batch_size / one.step.serial:.1f}" if one.fits else "-"
            network = f"{100 * one.step.network / one.step.serial:.0f}%"
            layout = (model, one.gpu.name, f"{size} x {one.job.data_parallel}")
            rows.append((*layout, gib(one.measured.peak_bytes), "yes" if one.fits else "no", network, throughput))
    return markdown(
        ("model", "GPU", "TP x DP", "peak GiB", "fits", "network of a serial step", "contexts/s of a node"), rows
    )


def nodes() -> str:
    """Data parallelism over contexts."""
    rows = []
    for model, size in (("Qwen3-4B", 4), ("Qwen3-32B", 8)):
        for count in (1, 8, 32, 128):
            ranks = 8 * count // size
            cells: list[object] = [model, count, ranks]
            for batch in (256, 8 * ranks):
                if batch % ranks:
                    cells += ["-", "-"]
                    continue
                one = plan(
                    model, size, gpu="h100", nodes=count, global_batch_size=batch, is_recomputed=model == "Qwen3-32B"
                )
                ideal = without_exchange(one).step.serial / one.step.serial
                cells += [f"{batch / one.step.serial:,.0f}", f"{100 * ideal:.0f}%"]
            rows.append((*cells, gib(one.measured.lasting_bytes)))
    header = (
        "model",
        "nodes",
        "DP",
        "contexts/s, batch 256",
        "of ideal",
        "contexts/s, batch 8 x DP",
        "of ideal",
        "lasting GiB per GPU",
    )
    return markdown(header, rows)


def without_exchange(one: Plan) -> Plan:
    """The same plan with a free network between data-parallel ranks."""
    return dataclasses.replace(
        one, measured=dataclasses.replace(one.measured, update=Costs(kernels=one.measured.update.kernels))
    )


def contexts() -> str:
    """Longer contexts."""
    rows = []
    shortest = plan("Qwen3-4B", 8, documents=20)
    for documents in (20, 100, 400):
        one, again = (
            plan("Qwen3-4B", 8, documents=documents),
            plan("Qwen3-4B", 8, documents=documents, is_recomputed=True),
        )
        linear = shortest.measured.microbatch.flops * one.job.sequence_tokens / shortest.job.sequence_tokens
        flops = one.measured.microbatch.flops
        memory = (gib(one.measured.activation_bytes), gib(again.measured.activation_bytes))
        times = (f"{one.microbatch.serial:.3g}", f"{again.microbatch.serial:.3g}")
        rows.append(
            (documents, f"{one.job.sequence_tokens:,}", *memory, f"{flops / 1e12:.1f}", f"{flops / linear:.2f}", *times)
        )
    header = (
        "documents",
        "tokens",
        "activations GiB",
        "recomputed",
        "TFLOP per GPU",
        "against linear",
        "s per context, serial",
        "recomputed",
    )
    return markdown(header, rows)


def queries() -> str:
    """From 211 queries to a million: every pair once, sixteen at a time, or every context once with sixteen of its
    pairs.
    """
    rows = []
    for number in (211, 1000, 10_000, 100_000, 1_000_000):
        cells: list[str] = []
        for per_query in (PAIRS_A_QUERY, 16):
            data = Data(number, number * per_query)
            few, many = (
                plan("Qwen3-4B", 4, gpu="h100", nodes=count, data=data, global_batch_size=256) for count in (1, 128)
            )
            cells += [f"{few.num_steps:,}", hours(few), hours(many)]
            if per_query == PAIRS_A_QUERY:
                stores = (f"{few.store_bytes / 1e9:,.3g}", f"{few.reference_store_bytes / 1e9:,.3g}")
        rows.append((f"{number:,}", *stores, *cells))
    epochs = [
        f"{name}: {column}"
        for name in ("all pairs", "all contexts")
        for column in ("steps", "hours, 1 node", "128 nodes")
    ]
    return markdown(("queries", "token store GB", "reference scores GB", *epochs), rows)


def gpus() -> str:
    """One job on every GPU of the table."""
    rows = []
    for name in GPUS:
        one = next(
            (one for size in (1, 2, 4, 8) if (one := plan("Qwen3-4B", size, gpu=name)).fits),
            plan("Qwen3-4B", 8, gpu=name),
        )
        usable = f"{one.usable_bytes / GIB:.0f}"
        size = one.job.tensor_parallel if one.fits else "none"
        rows.append(
            (
                one.gpu.name,
                usable,
                size,
                one.step.bound_by,
                f"{one.step.bound:.3g}",
                f"{one.step.serial:.3g}",
                hours(one),
            )
        )
    return markdown(("GPU", "usable GiB", "smallest TP", "bound by", "step s, bound", "serial", "hours"), rows)


def savings() -> str:
    """What each saving is worth, one at a time, for the launcher of Qwen3-4B."""
    launcher = {"is_sequence_parallel": True}
    side_by_side = {**launcher, "heads": parallel_heads("Qwen3-4B")}
    kinds: tuple[tuple[str, dict[str, object]], ...] = (
        ("the launcher", launcher),
        ("without `--sequence-parallel`", {}),
        ("`--recompute-modules core_attn`", {**launcher, "recompute_modules": ("core_attn",)}),
        ("`--recompute-modules mlp`", {**launcher, "recompute_modules": ("mlp",)}),
        ("`--recompute-granularity full`", {**launcher, "is_recomputed": True}),
        ("`--headrank-lora-rank 16`", {**launcher, "lora_rank": 16}),
        ("calibration rows by masked attention, K and V repeated", {**launcher, "lacks": ("grouped rows",)}),
        ("parallel layout, FlexAttention", side_by_side),
        ("parallel layout, blocks gathered", {**side_by_side, "lacks": ("flexible attention", "grouped rows")}),
        ("every layer built, those above l_max frozen (`--headrank-full-depth`)", {**launcher, "is_full_depth": True}),
    )
    rows = []
    for name, settings in kinds:
        one = plan("Qwen3-4B", 8, is_whole=bool(settings.get("is_full_depth")), **settings)
        measured, costs = one.measured, one.measured.microbatch
        sent = sum(one.traffic_by_collective().values()) / one.job.num_microbatches / 1e9
        memory = (gib(measured.peak_bytes), gib(measured.activation_bytes))
        work = (
            f"{costs.flops / 1e12:.1f}",
            f"{costs.traffic_bytes / 1e9:,.0f}",
            f"{costs.num_kernels:,.0f}",
            f"{sent:.1f}",
        )
        rows.append((name, *memory, *work, f"{one.microbatch.serial:.3g}"))
    header = (
        "Qwen3-4B, TP 8",
        "peak GiB",
        "of it activations",
        "TFLOP",
        "GB read and written",
        "kernels",
        "GB sent",
        "s, serial",
    )
    return markdown(header, rows)


def parallel_heads(model: str) -> HeadSet:
    """The model's heads with documents side by side."""
    heads = heads_of(model, shape_of(model))
    return dataclasses.replace(heads, prompt=PromptTemplate(document_layout="parallel"))


TABLES: dict[str, Callable[[], str]] = {
    "paper": paper,
    "models": models,
    "tensor-parallel": tensor_parallel,
    "nodes": nodes,
    "contexts": contexts,
    "queries": queries,
    "gpus": gpus,
    "savings": savings,
}


def block(name: str) -> re.Pattern[str]:
    """The place of a table in a page: everything between its markers."""
    return re.compile(rf"(?<=<!-- table: {name} -->\n).*?(?=<!-- end of {name} -->)", re.DOTALL)


def main(names: Sequence[str]) -> None:
    """Make the named tables, or all, and put them where they belong."""
    unknown = [name for name in names if name not in TABLES]
    if unknown:
        raise SystemExit(f"no table {', '.join(unknown)}; there are {', '.join(TABLES)}")
    for name in names or TABLES:
        table = TABLES[name]()
        for page in sorted(DOCS.glob("*.md")):
            before = page.read_text(encoding="utf-8")
            after = block(name).sub(lambda _, table=table: table + "\n", before)
            if after != before:
                page.write_text(after, encoding="utf-8")
                print(f"{page.name}: {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
