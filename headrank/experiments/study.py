"""A study as data: the typed, frozen settings that one YAML file of configs/ holds.

A study is one *recipe* (model, data, pairs, heads, training, re-selection, export: recipe.py), any number of *runs* of
it that change some settings, and what is measured and published afterwards. Whatever a run does not change it shares
with the others. Nothing here imports torch. What a setting means and what it defaults to stands beside it;
docs/experiments.md explains the file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from headrank.experiments.recipe import Recipe, Settings, one_of, without_repetition
from headrank.method.prompt import LAYOUTS
from headrank.method.published_prompts import PUBLISHED_PROMPTS
from headrank.methods import METHODS, POLICIES

MATRIX_ORDERS = ("retriever", "reversed", "shuffled")
NumberFormat = Literal["auto", "float32", "bfloat16", "float16", "int8"]


class Benchmark(Settings):
    """A collection to measure on. Without ``collection`` the name is one of `headrank benchmark list`.

    Such a benchmark was prepared before, or ``prepare`` says from what (pyserini, ir_datasets or a folder), as in
    `headrank benchmark prepare NAME --from`.
    """

    collection: Path | None = None
    prepare: str | None = None
    queries: Path | None = None  # only these query ids
    depths: list[PositiveInt] | None = None  # candidates reranked; default: the benchmark's own, else 40
    max_words: PositiveInt | None = None
    measures: list[str] | None = None  # the leading one first; default: the benchmark's own, else nDCG@10
    methods: list[str] | None = None  # only rows of these methods; default: all

    @field_validator("depths", "measures")
    @classmethod
    def _different(cls, values: list[Any] | None) -> list[Any] | None:
        return values if values is None else without_repetition(values)

    @model_validator(mode="after")
    def _one_source(self) -> Benchmark:
        if self.collection is not None and self.prepare is not None:
            raise ValueError("collection and prepare both say where it comes from; give one of them")
        return self


class Row(Settings):
    """One row of the tables: a method on a model with heads, per run where the model or the heads are those of a
    run.
    """

    method: str
    title: str | None = None  # in the table that `headrank experiment run` ends with; default: the method's name
    variant: str | None = None  # a label: 'headrank+untrained'
    name: str | None = None  # the model's name in tables; default: that of the study
    # trained: with the heads given here; final: the exported model with its own; steps: a row per checkpoint of
    # training.keep_steps
    model: Literal["base", "trained", "final", "steps"] = "base"
    prompt: str | None = None  # of a published method, as `--prompt`; ICR's asks questions where its code does
    path: str | None = None  # instead: a model that the study does not make; a folder, a name on the hub or 'embedded'
    seed: NonNegativeInt | None = None  # of ``path``: models of one name and different training seeds are one row
    heads: str | None = None  # a method of heads.methods, 'before' or 'after' (the run's), or a file
    layout: str | None = None
    orders: list[str] | None = None
    runs: list[str] | None = None  # default: all
    benchmarks: list[str] | None = None  # default: all
    depths: list[PositiveInt] | None = None
    dtype: NumberFormat | None = None  # default: that of measure
    # weight beside the first stage's scores, as `headrank fuse --weight`
    fuse: Annotated[float, Field(ge=0, le=1)] | None = None

    @model_validator(mode="after")
    def _known(self) -> Row:
        one_of("method", self.method, list(METHODS))
        one_of("layout", self.layout, LAYOUTS)
        one_of("prompt", self.prompt, list(PUBLISHED_PROMPTS))
        for order in self.orders or []:
            one_of("order", order, MATRIX_ORDERS)
        kind = METHODS[self.method].kind
        if kind == "first-stage" and (self.model != "base" or self.layout is not None or self.fuse is not None):
            raise ValueError(f"method {self.method} is the first stage itself, and has no model, layout or fuse")
        if self.model in ("final", "steps") and self.heads is not None:
            raise ValueError("the final model has its own heads; leave heads out, or say model: trained")
        if self.model == "steps" and self.method != "headrank":
            raise ValueError("model: steps reads the exported models of headrank; say method: headrank")
        self._check_path(kind)
        needs = METHODS[self.method].needs_heads and self.model not in ("final", "steps")
        may_have_its_own = self.path is not None and self.method == "headrank"
        if needs != (self.heads is not None) and not may_have_its_own:
            raise ValueError(f"method {self.method} {'needs' if needs else 'has no'} heads")
        return self

    def _check_path(self, kind: str) -> None:
        if self.path is None:
            if self.seed is not None:
                raise ValueError("seed tells models given by 'path' apart; the study's own training seeds are 'seeds'")
            return
        if kind == "first-stage" or self.model != "base" or self.runs is not None:
            raise ValueError(
                "path is a model of its own: leave out model and runs, and do not give it to a first stage"
            )
        if self.heads in ("before", "after", *POLICIES):
            raise ValueError(f"heads of a row with a path are a heads.json, found '{self.heads}'")


class Measure(Settings):
    """What is reranked and how; every cell is one method, benchmark, depth and order."""

    rows: list[Row] = Field(default_factory=list)
    orders: list[str] = Field(default_factory=lambda: ["retriever"])
    query_rows: str | None = None
    dtype: NumberFormat | None = None
    device: str | None = None
    batch_size: PositiveInt = 1
    shuffle_seed: NonNegativeInt = 0
    api_base: str | None = None  # rankgpt through an OpenAI-compatible endpoint
    share_forward: bool = True  # attention methods of one model are read off one forward: no seconds of each method

    @field_validator("orders")
    @classmethod
    def _orders(cls, values: list[str]) -> list[str]:
        for value in values:
            one_of("order", value, MATRIX_ORDERS)
        return without_repetition(values)


class View(Settings):
    """The token-level page of one query."""

    query: str = "moved-most"
    benchmark: str


class Report(Settings):
    """What is published from the results."""

    kind: Literal["run", "matrix", "training"]
    heads: bool = False  # the heads before and after training, too
    # matrix: test over the queries of all benchmarks together, against this method; '' for the usual ones
    pool: str | None = None
    view: View | None = None


class Retrieve(Settings):
    """First-stage candidates with Pyserini, one collection folder per entry: `headrank retrieve --engine pyserini`."""

    index: str
    depth: PositiveInt = 100
    topics: dict[str, str]  # folder name -> name of the judgements, such as dl21: dl21-passage


class Study(Recipe):
    """The whole file."""

    about: str = ""
    output: Path
    name: str | None = None  # the model's name in tables; default: the last part of ``model``
    retrieve: Retrieve | None = None
    compare_paper: bool = False  # say how far the pairs are from the paper's training set
    # runs seed-1, seed-2, ...: the recipe, or each of ``runs`` (NAME.seed-1, ...), with these training seeds
    seeds: list[int] = Field(default_factory=list)
    runs: dict[str, dict[str, Any]] = Field(default_factory=dict)
    benchmarks: dict[str, Benchmark] = Field(default_factory=dict)
    measure: Measure = Measure()
    report: Report | None = None

    @field_validator("seeds")
    @classmethod
    def _seeds(cls, values: list[int]) -> list[int]:
        return without_repetition(values)

    @model_validator(mode="after")
    def _names(self) -> Study:
        for name in [*self.runs, *self.benchmarks]:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
                raise ValueError(f"'{name}' is no name of letters, digits, '.', '-' and '_'")
        for row in self.measure.rows:
            for kind, given, known in (("run", row.runs, self.runs), ("benchmark", row.benchmarks, self.benchmarks)):
                for name in given or []:
                    if name not in known:
                        raise ValueError(f"measure.rows: no {kind} '{name}'; known: {', '.join(known) or 'none'}")
        return self
