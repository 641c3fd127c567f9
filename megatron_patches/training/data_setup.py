"""Opening a run's training and held-out lists: which kind of set the prompt asks for, and where its tokens are kept."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from data_tools.array_folder import UnwritableCache
from data_tools.late_training_set import LateSample, LateTrainingSet
from data_tools.list_mixture import parse_shares
from data_tools.training_set import Sample, TrainingSet
from headrank.errors import InputError
from headrank.method.heads import HeadSet
from headrank.method.late_prompt import LateEncoder, late_limit
from headrank.method.spans import PromptEncoder
from headrank.model_config import load_config, text_config
from headrank.reranking.model_sources import load_tokenizer
from megatron_patches.parallel_scores import gather_from_all
from megatron_patches.shape import ModelShape
from megatron_patches.training.config import TrainingConfig
from megatron_patches.training.held_out import held_out_samples

logger = logging.getLogger(__name__)

TOKENS_FOLDER = "token_cache"


def open_training_data(config: TrainingConfig, shape: ModelShape, heads: HeadSet) -> TrainingSet | LateTrainingSet:
    """The lists to train on. Collective."""
    if not heads.prompt.is_late:
        return open_training_set(config, shape, heads, config.train_data[0])
    folders, shares = parse_shares(config.train_data, "--train-data-path")
    return _open_late(config, heads, folders, shares, needs_pairs=config.loss.needs_pairs)


def _open_late(
    config: TrainingConfig, heads: HeadSet, folders: list[str], shares: list[float] | None, *, needs_pairs: bool
) -> LateTrainingSet:
    limit = late_limit(text_config(load_config(config.model)), heads.prompt, config.model)
    lengths = [length for length in (limit, config.seq_length) if length is not None]
    encoder = LateEncoder(_tokenizer(config), heads.prompt, min(lengths, default=None))
    opened = partial(
        LateTrainingSet,
        folders,
        encoder,
        shares=shares,
        passages_per_query=config.passages_per_query,
        seed=config.seed,
        needs_pairs=needs_pairs,
    )
    return _with_a_place_for_tokens(config, opened)


def open_training_set(config: TrainingConfig, shape: ModelShape, heads: HeadSet, directory: str) -> TrainingSet:
    """The samples of a directory, tokenised for this model with the prompt the heads were selected with. Collective.

    The tokens are kept in the directory or, where a rank finds that it cannot be written, below --save for all ranks.
    """
    # log masses are not calibrated, so the branch is not even computed
    encoder = PromptEncoder(
        _tokenizer(config), heads.prompt, config.seq_length or shape.max_positions, calibrate=heads.readout is None
    )
    opened = partial(
        TrainingSet,
        directory,
        encoder,
        config.pairs_per_context,
        config.seed,
        config.permutations,
        epoch=config.epoch_unit,
        with_retriever_order=config.with_retriever_order,
    )
    return _with_a_place_for_tokens(config, opened)


def _with_a_place_for_tokens(config: TrainingConfig, opened: Callable[..., Any]) -> Any:
    """Open a set with its tokens beside its lists, or below --save where they cannot be written there."""
    try:
        return _on_every_rank(opened)
    except UnwritableCache as refusal:
        if config.save is None:
            raise InputError(f"{refusal}, or give --save for a cache below it") from refusal
        place = Path(config.save) / TOKENS_FOLDER
        logger.info("%s; until then tokens are kept in %s", refusal, place)
        return _on_every_rank(partial(opened, cache_directory=place))


def _on_every_rank(opened: Callable[[], Any]) -> Any:
    """Open a training set; where one rank cannot write its cache, all raise alike."""
    data, refusal = None, None
    try:
        data = opened()
    except UnwritableCache as error:
        refusal = str(error)
    # all ranks use one place: on a node with its own disk the folder may be writable for some of them only
    refusals = [said for said in gather_from_all(refusal) if said is not None]
    if data is None or refusals:
        raise UnwritableCache(refusals[0])
    return data


def _tokenizer(config: TrainingConfig) -> Any:
    """The tokenizer of --tokenizer-model or of the model."""
    flag, directory = (
        ("--headrank-model", config.model) if config.tokenizer is None else ("--tokenizer-model", config.tokenizer)
    )
    return load_tokenizer(directory, f"{flag} {directory}")


def held_out_data(
    config: TrainingConfig, shape: ModelShape, heads: HeadSet, data: TrainingSet | LateTrainingSet
) -> list[Sample | LateSample]:
    """The held-out contexts; a query that is also trained on is refused."""
    if config.valid_data is None:
        return []
    held_out: TrainingSet | LateTrainingSet
    if heads.prompt.is_late:
        held_out = _open_late(config, heads, list(config.valid_data), None, needs_pairs=False)
    else:
        held_out = open_training_set(config, shape, heads, config.valid_data[0])
    # by query id and not by list: another list of a trained query would flatter the held-out measure too
    trained = {data.names_of(context)[1] for context in range(data.num_contexts)}
    samples = held_out_samples(held_out, config.eval_iters)
    shared = next((sample.query_id for sample in samples if sample.query_id in trained), None)
    if shared is not None:
        raise InputError(
            f"{' '.join(config.valid_data)}: query {shared!r} is also in {' '.join(config.train_data)}; "
            "hold it out with 'headrank pairs --hold-out'"
        )
    return samples
