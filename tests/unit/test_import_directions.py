"""Imports point one way: headrank <- data_tools <- megatron_patches <- pretrain_headrank.py, with headrank/commands
on top.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COLLECTIVES = {
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_to_all",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
}
# What each room may not import, wherever in a file the import stands.
FORBIDDEN = {
    "method": {"data_tools", "megatron_patches", "megatron", "pretrain_headrank", "headrank.commands"},
    "data_tools": {"megatron_patches", "megatron", "pretrain_headrank", "headrank.commands"},
    "megatron_patches": {"pretrain_headrank", "headrank.commands"},
}


# what sits on top and may import everything
TOP = ("commands", "experiments", "serving", "integrations", "__main__.py")


def room_of(path: Path) -> str:
    """The room a source file belongs to: method, commands, data_tools, megatron_patches or entry."""
    parts = path.relative_to(ROOT).parts
    if parts[0] == "headrank":
        return "commands" if parts[1] in TOP else "method"
    return parts[0] if parts[0] in ("data_tools", "megatron_patches") else "entry"


def sources(*rooms: str) -> list[Path]:
    folders = [path for name in ("headrank", "data_tools", "megatron_patches") for path in (ROOT / name).rglob("*.py")]
    return sorted(
        path for path in [*folders, *ROOT.glob("pretrain_headrank.py")] if not rooms or room_of(path) in rooms
    )


def imported_modules(tree: ast.AST) -> set[str]:
    """Every module named by an import statement, with the names taken from it: from a import b gives a and a.b."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_the_walk_sees_the_tree() -> None:
    assert {room_of(path) for path in sources()} >= {"method", "commands", "data_tools", "megatron_patches"}
    assert imported_modules(ast.parse("def f():\n    from a.b import c\n    import d.e")) == {"a.b", "a.b.c", "d.e"}


@pytest.mark.parametrize("room", FORBIDDEN)
def test_no_import_goes_back_up(room: str) -> None:
    wrong = [
        f"{name(path)} imports {module}"
        for path in sources(room)
        for module in imported_modules(parse(path))
        if any(module == forbidden or module.startswith(f"{forbidden}.") for forbidden in FORBIDDEN[room])
    ]
    assert not wrong


def test_each_side_has_one_module_that_asks_whether_there_is_a_gpu() -> None:
    asking = {
        name(path)
        for path in sources()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute)
        and node.attr == "is_available"
        and ast.unparse(node).startswith("torch.cuda")
    }
    assert asking == {"headrank/placement.py", "megatron_patches/device.py"}


def test_each_side_has_one_module_with_collectives() -> None:
    using = {
        name(path)
        for path in sources("method", "data_tools", "megatron_patches", "entry")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in COLLECTIVES
        and ast.unparse(node.func.value) in ("dist", "torch.distributed")
    }
    assert using == {"headrank/torchrun.py", "megatron_patches/parallel_scores.py"}


def test_the_method_imports_without_megatron_data_tools_or_transformers_models() -> None:
    modules = [name(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__") for path in sources("method")]
    code = (
        "import importlib, sys\n"
        "for blocked in ('megatron', 'data_tools', 'megatron_patches', 'bm25s', 'pyserini', 'gguf'):\n"
        "    sys.modules[blocked] = None\n"
        f"for module in {modules!r}:\n"
        "    importlib.import_module(module)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sources(), ids=name)
def test_every_module_says_what_it_is(path: Path) -> None:
    tree = parse(path)
    assert ast.get_docstring(tree), "no docstring"
