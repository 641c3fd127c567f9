"""A recipe as data: the settings from a collection to a reranker, typed and frozen, as they stand in a file of
configs/.

Model, data, prompt, labels, pairs, heads, training, re-selection, export. What a setting means and what it defaults to
stands beside it; ``study.py`` has the other half of the file, what is measured and published. Nothing here imports
torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from headrank.method.prompt import LAYOUTS, ORDERS, QUERY_ROWS
from headrank.method.published_prompts import PUBLISHED_PROMPTS
from headrank.methods import POLICIES

Flags = dict[str, bool | int | float | str]


def one_of(name: str, value: str | None, known: Sequence[str]) -> None:
    """Refuse a value that is not among the known ones, with the nearest of them."""
    if value is not None and value not in known:
        near = difflib.get_close_matches(value, known, 1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise ValueError(f"{name} '{value}' is not known; {hint}there are {', '.join(known)}")


def without_repetition(values: list[Any]) -> list[Any]:
    """The values as they are; one that stands there twice is refused."""
    twice = [value for value in values if values.count(value) > 1]
    if twice:
        raise ValueError(f"{twice[0]} stands there twice")
    return values


class Settings(BaseModel):
    """Frozen, and closed to names it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Data(Settings):
    """What is trained on. Files of query ids hold one id per line, in the first column."""

    collections: Annotated[list[Path], Field(min_length=1)] = []  # defaults are not checked: no data, see Recipe
    train_queries: Path | None = None  # default: all judged queries but the held-out ones
    held_out_queries: Path | None = None  # a validation set; the best checkpoint on it is taken


class Prompt(Settings):
    """The prompt that heads are selected on; what is not given keeps its default."""

    query_rows: str | None = None
    order: str | None = None
    document_layout: str | None = None
    max_words: PositiveInt | None = None
    instruction: str | None = None
    document_label: str | None = None
    label_in_span: bool | None = None

    @model_validator(mode="after")
    def _known(self) -> Prompt:
        one_of("query_rows", self.query_rows, QUERY_ROWS)
        one_of("order", self.order, ORDERS)
        one_of("document_layout", self.document_layout, LAYOUTS)
        return self


class Labels(Settings):
    """A teacher's scores as labels, one run per training collection in OUTPUT/labels: the flags of `headrank label`."""

    teacher: str | None = None  # a folder, a hub name, a URL
    folder: Path | None = None  # instead: runs that are there, COLLECTION.*.trec
    ranks: str = "1-20"
    only: dict[str, Path] = {}  # collection -> query ids that are labelled; default: all
    batch_size: PositiveInt | None = None
    max_tokens: PositiveInt | None = None
    max_words: PositiveInt | None = None
    max_minutes: PositiveFloat | None = None  # per collection; a run that is not complete is used as it is

    @model_validator(mode="after")
    def _one_source(self) -> Labels:
        if (self.teacher is None) == (self.folder is None):
            raise ValueError("labels come from a teacher or from a folder of runs; give one of them")
        return self


class Pairs(Settings):
    """The training lists and their preference pairs: the flags of `headrank pairs`."""

    depth: PositiveInt = 100
    unjudged_as_zero: bool = False
    judged_only: bool = False
    random_pairs: bool = False
    max_pairs_per_query: PositiveInt | None = None
    sublists: NonNegativeInt = 0
    sublist_size: int | str | None = None  # M, or M-N for a length drawn per sub-list
    keep_full_list: bool = False
    label_quantiles: list[float] | None = None  # with labels: grades within each list
    label_thresholds: list[float] | None = None
    qrels_with_labels: Literal["ignore", "keep", "positives"] | None = None
    list_words: list[PositiveInt] | None = None  # the passages of each list are cut to one of these
    seed: NonNegativeInt = 0


class ReadoutFit(Settings):
    """A weight for every head, fitted to the labels, else to the judgements: `headrank select-heads --method
    readout`.
    """

    lists: PositiveInt | None = None  # of each collection
    list_words: list[PositiveInt] | None = None
    max_layer: list[PositiveInt] | None = None
    groups: list[PositiveInt] | None = None
    tolerance: NonNegativeFloat | None = None
    l2: list[PositiveFloat] | None = None
    floor: list[NonNegativeFloat] | None = None
    folds: Path | None = None
    equal_weights: bool = False  # what fitted weights are compared with
    branch_position: PositiveInt | None = None


class Heads(Settings):
    """Head selection on the model before training: the flags of `headrank select-heads`.

    Given without ``training`` the study ends with heads; ``heads: null`` and ``training: null`` end it with the
    training lists.
    """

    methods: Annotated[list[str], Field(min_length=1)] = ["entropy"]  # the first is what training uses
    file: Path | None = None  # a heads.json to train instead of selecting one
    readout: ReadoutFit | None = None  # fit a readout instead of selecting heads; reselect fits it again
    # default: the training collections; 'pairs': the training lists
    collections: list[Path] | Literal["pairs"] | None = None
    queries: Path | None = None  # query ids to select on; default: the training queries
    queries_per_topic: PositiveInt | None = None  # of them so many per topic, the second column of that file
    depth: PositiveInt = 40
    permutations: NonNegativeInt = 0
    retriever_order: bool = True  # false: the random orders only
    prune: Annotated[float, Field(ge=0, lt=1)] = 0.0
    top_k: PositiveInt | None = None
    temperature: PositiveFloat | None = None
    entropy_weight: float | None = None
    contrast: Literal["adjacent", "lower", "irrelevant"] | None = None  # lower: the ablation without ALPS
    per_query: bool = False
    gold_grade: PositiveInt | None = None
    needles: PositiveInt = 20
    picture: bool = True

    @field_validator("methods")
    @classmethod
    def _methods(cls, values: list[str]) -> list[str]:
        for value in values:
            one_of("method", value, POLICIES)
        return without_repetition(values)

    @model_validator(mode="after")
    def _orders(self) -> Heads:
        if not self.retriever_order and not self.permutations:
            raise ValueError("retriever_order false leaves no order of a list; set permutations too")
        return self


class Selection(Settings):
    """One more set of heads that rows may read, such as a baseline's as its paper selects it. Given settings replace
    those of ``heads``.
    """

    method: str
    prompt: str | None = None  # of a published method: a name of `--prompt`; default: that of the study
    top_k: PositiveInt | None = None
    temperature: PositiveFloat | None = None
    entropy_weight: float | None = None
    contrast: Literal["adjacent", "lower", "irrelevant"] | None = None
    per_query: bool | None = None
    gold_grade: PositiveInt | None = None
    collections: list[Path] | None = None
    queries: Path | None = None
    # JSON files of questions with labelled paragraphs, as `select-heads --paragraphs`
    paragraphs: list[Path] | None = None
    depth: PositiveInt | None = None
    needles: PositiveInt | None = None
    haystack_words: list[PositiveInt] | None = None

    @model_validator(mode="after")
    def _known(self) -> Selection:
        one_of("method", self.method, POLICIES)
        one_of("prompt", self.prompt, list(PUBLISHED_PROMPTS))
        if self.paragraphs is not None and (self.collections is not None or self.queries is not None):
            raise ValueError("paragraphs and collections both say which lists to read; give one of them")
        return self


class Training(Settings):
    """One training: `torchrun pretrain_headrank.py`. ``flags`` holds any other flag of it, by name without the
    dashes.
    """

    processes: PositiveInt | Literal["auto"] = 1  # auto: two data-parallel ranks where cores and memory allow it
    tensor_parallel: PositiveInt = 1
    micro_batch_size: PositiveInt = 1
    global_batch_size: PositiveInt | None = None
    seed: NonNegativeInt = 1234
    lr: PositiveFloat = 1e-4
    clip_grad: PositiveFloat = 5.0  # the paper's
    epochs: PositiveFloat = 1.0
    epoch_unit: Literal["contexts", "pairs"] = "contexts"  # 'pairs' is the paper's epoch: every pair once
    iterations: PositiveInt | None = None  # instead of epochs
    stop_after: PositiveInt | None = None  # steps; the schedule stays that of the whole length
    keep_steps: list[PositiveInt] = []  # checkpoints that are kept, exported and measured by rows with ``model: steps``
    pairs_per_context: PositiveInt = 16  # 1 is the paper's pair by pair
    permutations: Annotated[int, Field(ge=0, le=100)] = 0
    layout: str | None = None  # document layout; default: that of the heads' prompt
    all_heads: bool = False
    eval_interval: PositiveInt = 10  # with held-out queries
    save_interval: PositiveInt = 50
    keep_checkpoints: bool = True  # false: they are removed once the run is exported, or at its end
    shared_reference: bool = False  # runs read one file of the frozen model's scores; the first run makes it alone
    flags: Flags = {}

    @field_validator("layout")
    @classmethod
    def _layout(cls, value: str | None) -> str | None:
        one_of("layout", value, LAYOUTS)
        return value

    @field_validator("flags")
    @classmethod
    def _known_flags(cls, flags: Flags) -> Flags:
        from megatron_patches.training.arguments import build_parser

        known = [option.removeprefix("--") for action in build_parser()._actions for option in action.option_strings]
        # a flag given twice, typed and raw, would be decided by argparse's order
        typed = {
            "headrank-" + name.replace("_", "-")
            for name in ("all_heads", "epochs", "epoch_unit", "pairs_per_context", "permutations")
        }
        for name in flags:
            if name in typed | {
                "lr",
                "seed",
                "clip-grad",
                "train-iters",
                "global-batch-size",
                "micro-batch-size",
                "save",
            }:
                raise PydanticCustomError("flag", f"'{name}' has a setting of its own in 'training'", {"key": name})
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean '{near[0]}'?" if near else "; see pretrain_headrank.py --help"
                raise PydanticCustomError("flag", f"training has no flag '{name}'{hint}", {"key": name})
        return flags

    @model_validator(mode="after")
    def _divisible(self) -> Training:
        if self.processes == "auto":
            return self
        if self.processes % self.tensor_parallel:
            raise ValueError(
                f"processes ({self.processes}) is not a multiple of tensor_parallel ({self.tensor_parallel})"
            )
        step = self.micro_batch_size * self.processes // self.tensor_parallel
        if self.global_batch_size is not None and self.global_batch_size % step:
            raise ValueError(
                f"global_batch_size ({self.global_batch_size}) is not a multiple of micro-batch x data-parallel "
                f"size ({step})"
            )
        return self


class Reselect(Settings):
    """Head selection on the trained model, on the lists and with the settings of ``heads`` where nothing else is
    given.
    """

    temperature: PositiveFloat | None = None
    entropy_weight: float | None = None
    top_k: PositiveInt | None = None


class Export(Settings):
    """The final model: `headrank export-hf`."""

    truncate: bool = False  # only the layers that reranking reads
    adapter_only: bool = False  # of a training with adapters: a PEFT folder instead of merged weights


class Recipe(Settings):
    """From a collection to a reranker. Without ``data`` nothing is trained or selected: the study measures models
    that are there.
    """

    model: str = "embedded"
    data: Data = Data()
    prompt: Prompt = Prompt()
    labels: Labels | None = None  # default: the collections' judgements
    pairs: Pairs = Pairs()
    selections: dict[str, Selection] = {}  # name -> heads that rows may name in ``heads``
    held_out_pairs: Pairs | None = None  # default: as pairs
    heads: Heads | None = Heads()
    training: Training | None = Training()
    reselect: Reselect | None = Reselect()  # null keeps the heads that were trained
    export: Export | None = Export()  # null: the training is all
    rounds: PositiveInt = 1  # training and re-selection, in turn

    @model_validator(mode="before")
    @classmethod
    def _nothing_without_data(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("data") is None:
            given = {name: value for name, value in values.items() if name != "data"}
            # null and not missing: the defaults of these are "do it"
            return dict.fromkeys(("heads", "training", "reselect", "export")) | given
        return values

    @model_validator(mode="after")
    def _data_to_learn_from(self) -> Recipe:
        if not self.data.collections and (self.training is not None or self.heads is not None):
            raise ValueError("data is missing; training and heads need data.collections")
        return self
