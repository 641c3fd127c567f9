"""Read a study from its YAML file: lines remembered for errors, --set on top, the runs merged with the recipe.

Every mistake is one InputError that names file and line (or the --set), the setting, the value and the nearest name.
``${NAME}`` and ``${NAME:-default}`` in a value are taken from the environment, for folders that differ between
machines.
"""

from __future__ import annotations

import difflib
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from headrank.errors import InputError
from headrank.experiments.recipe import Recipe
from headrank.experiments.study import Study

Place = tuple[str | int, ...]
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_RECIPE_ONLY = set(Recipe.model_fields)


@dataclass(frozen=True)
class LoadedStudy:
    """A study, where it came from, and the recipe of every run ('' is the name of the only one).

    ``names`` says which of ``runs`` and which training seed a run is.
    """

    study: Study
    path: Path
    recipes: Mapping[str, Recipe]
    names: Mapping[str, tuple[str, int | None]]


def read_study(path: str | os.PathLike[str], changes: Sequence[str] = (), output: str | None = None) -> LoadedStudy:
    """The study in a file, with ``changes`` (KEY=VALUE) and another output folder where given."""
    file = Path(path)
    values, origins = _read_yaml(file)
    for change in [*changes, *([f"output={output}"] if output else [])]:
        _apply(change, values, origins)
    _expand(values, (), origins, file)
    study = _validated(Study, values, (), origins, file)
    recipe = {key: value for key, value in values.items() if key in _RECIPE_ONLY}
    recipes: dict[str, Recipe] = {}
    names: dict[str, tuple[str, int | None]] = {}
    seeds: list[int | None] = [*study.seeds] or [None]
    for run, differences in (study.runs or {"": {}}).items():
        for seed in seeds:
            name = ".".join(filter(None, (run, f"seed-{seed}" if seed is not None else "")))
            changed = merged(recipe, differences or {})
            values_of_run = changed if seed is None else merged(changed, {"training": {"seed": seed}})
            recipes[name] = _validated(Recipe, values_of_run, ("runs", run or name), origins, file)
            names[name] = (run, seed)
    return LoadedStudy(study, file, recipes, names)


def read_about(path: str | os.PathLike[str]) -> str:
    """What a study says about itself, without checking the rest of its file."""
    values, _ = _read_yaml(Path(path))
    return str(values.get("about") or "")


def merged(base: Mapping[str, Any], differences: Mapping[str, Any]) -> dict[str, Any]:
    """The base with the differences on top; mappings are merged, everything else is replaced. null removes a whole
    part.
    """
    result = dict(base)
    for key, value in differences.items():
        inner = result.get(key)
        result[key] = merged(inner, value) if isinstance(value, Mapping) and isinstance(inner, Mapping) else value
    return result


def _read_yaml(path: Path) -> tuple[dict[str, Any], dict[Place, str]]:
    """The values, and "file:line" of every key and list item."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.yaml")], 1)
        hint = (
            f"did you mean {path.parent / near[0]}?"
            if near
            else "the studies that come with the project are in configs/"
        )
        raise InputError(f"{path}: no such file; {hint}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 ({error.reason}); convert the file to UTF-8") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        origins: dict[Place, str] = {}
        _remember_lines(node, (), origins, path)
        # parsed twice: the nodes know lines, the loader knows types
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise InputError(f"{path}:{line}: not YAML ({error.problem}); check indentation and quotes") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: not a study; it needs lines of 'setting: value'")
    return values, origins


def _remember_lines(node: yaml.Node | None, place: Place, origins: dict[Place, str], path: Path) -> None:
    """Walk the nodes; a duplicate key would silently lose its first value, so it is refused."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*place, key.value)
            line = key.start_mark.line + 1
            if here in origins:
                raise InputError(f"{path}:{line}: '{key.value}' is a duplicate of {origins[here]}; remove one")
            origins[here] = f"{path}:{line}"
            _remember_lines(value, here, origins, path)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            origins[(*place, number)] = f"{path}:{value.start_mark.line + 1}"
            _remember_lines(value, (*place, number), origins, path)


def _apply(change: str, values: dict[str, Any], origins: dict[Place, str]) -> None:
    """One --set: dotted key, YAML value; parts that are not there are made, and checked like the file's."""
    key, equals, text = change.partition("=")
    if not equals or not key:
        raise InputError(f"--set {change!r}: write KEY=VALUE, such as training.lr=3e-5")
    parts = key.split(".")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise InputError(f"--set {change!r}: the value is not YAML; quote it") from None
    inside = values
    for number, part in enumerate(parts[:-1], start=1):
        if inside.get(part) is None:
            inside[part] = {}
        inside = inside[part]
        origins.setdefault(tuple(parts[:number]), f"--set {change}")
        if not isinstance(inside, dict):
            raise InputError(
                f"--set {change!r}: '{'.'.join(parts[:number])}' is a value and has no settings of its own"
            )
    inside[parts[-1]] = value
    # the file's lines inside the replaced value would be blamed for mistakes of the flag
    for place in [place for place in origins if place[: len(parts)] == tuple(parts)]:
        del origins[place]
    origins[tuple(parts)] = f"--set {change}"


def _expand(value: Any, place: Place, origins: Mapping[Place, str], path: Path) -> Any:
    """Environment variables in the strings of a value, in place."""
    if isinstance(value, dict):
        for key in value:
            value[key] = _expand(value[key], (*place, key), origins, path)
    elif isinstance(value, list):
        value[:] = [_expand(item, (*place, number), origins, path) for number, item in enumerate(value)]
    elif isinstance(value, str):

        def replaced(found: re.Match[str]) -> str:
            text = os.environ.get(found[1], found[2])
            if text is None:
                where = f"{_origin(place, origins, path)}: {_dotted(place)}"
                raise InputError(
                    f"{where}: the environment has no {found[1]}; export {found[1]}=DIR or write ${{{found[1]}:-DIR}}"
                )
            return text

        return _VARIABLE.sub(replaced, value)
    return value


Checked = typing.TypeVar("Checked", bound=BaseModel)


def _validated(
    model: type[Checked], values: Mapping[str, Any], prefix: Place, origins: Mapping[Place, str], path: Path
) -> Checked:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise InputError(_message(model, error, prefix, origins, path)) from None


def _message(
    model: type[BaseModel], error: ValidationError, prefix: Place, origins: Mapping[Place, str], path: Path
) -> str:
    """The first mistake as one line. A run's settings are looked for among its own first, then in the recipe."""
    # pydantic reports all mistakes; a person mends one at a time
    problems = error.errors(include_url=False)  # a misspelt name also makes the right one missing: say the cause
    problem = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
    place: Place = tuple(problem["loc"]) + ((problem["ctx"]["key"],) if "key" in problem.get("ctx", {}) else ())
    found_at = _known_part((*prefix, *place), origins)[len(prefix) :]
    where = _origin((*prefix, *place) if found_at or not prefix else place, origins, path)
    dotted = _dotted(found_at or _known_part(place, origins) or place)
    if problem["type"] == "extra_forbidden":
        owner = _model_at(model, place[:-1])
        near = difflib.get_close_matches(str(place[-1]), list(owner.model_fields), 1) if owner else []
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(owner.model_fields) if owner else 'none'}"
        return f"{where}: {_dotted(place[:-1]) or 'a study'} has no setting '{place[-1]}'; {hint}"
    if problem["type"] == "missing":
        return f"{where}: {_dotted(place)} is missing"
    if problem["type"] == "flag":
        return f"{where}: {problem['msg']}"
    text = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    found = "" if isinstance(problem["input"], (dict, BaseModel)) else f" (found {problem['input']!r})"
    if problem["type"] == "value_error":
        return f"{where}: {dotted}{': ' * bool(dotted)}{text}"
    return f"{where}: {dotted} {text[0].lower()}{text[1:]}{found}"


def _known_part(place: Place, origins: Mapping[Place, str]) -> Place:
    """The keys of a place that stand in the file; pydantic puts names of types between them."""
    known: Place = ()
    for part in place:
        if (*known, part) in origins:
            known = (*known, part)
    return known


def _origin(place: Place, origins: Mapping[Place, str], path: Path) -> str:
    return origins.get(_known_part(place, origins), str(path))


def _dotted(place: Place) -> str:
    return ".".join(map(str, place))


def _model_at(model: type[BaseModel], place: Place) -> type[BaseModel] | None:
    """The model whose settings stand at this place."""
    for part in place:
        if part in model.model_fields:
            found = _models_in(model.model_fields[str(part)].annotation)
            if not found:
                return None
            model = found[0]
    return model


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models within an annotation such as ``dict[str, Benchmark]`` or ``Heads | None``."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [found for inner in typing.get_args(annotation) for found in _models_in(inner)]
