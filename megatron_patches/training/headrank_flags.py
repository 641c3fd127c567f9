"""The flags of this recipe: all begin with --headrank-."""

from __future__ import annotations

from headrank.lora_settings import PROJECTIONS
from headrank.method.loss_settings import DEFAULT_SCALES, EQUAL_LOG_MASS_SCALE, OBJECTIVES, SCALINGS
from headrank.method.prompt import LAYOUTS
from megatron_patches.training.flag_kinds import Flag, switch, value

HEADRANK_FLAGS: list[Flag] = [
    value(
        "--headrank-model",
        str,
        None,
        "Hugging Face directory of the model to train: weights, tokenizer and shape; 'embedded' is the built-in one.",
        metavar="DIR",
    ),
    value(
        "--headrank-heads",
        str,
        None,
        "heads.json of 'headrank select-heads': the core heads and the prompt they were selected with.",
        metavar="FILE",
    ),
    value(
        "--headrank-document-layout",
        str,
        None,
        "Documents one after another (sequential), or each reading the opening and itself, so that scores do not "
        "depend on their order "
        "(parallel); by default as in "
        "the heads' prompt. Heads that were selected in one layout may be trained in the other.",
        choices=list(LAYOUTS),
    ),
    switch("--headrank-all-heads", "Ablation 'w/ all heads': sum every head of the model instead of the core heads."),
    value(
        "--headrank-epochs",
        float,
        1.0,
        "Length of the run in passes over all pairs when --train-iters is not given; the paper's is one.",
    ),
    value(
        "--headrank-epoch-unit",
        str,
        "pairs",
        "'pairs': an epoch shows every pair, as the paper's; 'contexts': every context once, with some of its pairs.",
        choices=["pairs", "contexts"],
    ),
    value(
        "--headrank-stop-after",
        int,
        None,
        "Stop after this many steps; the learning-rate schedule stays that of the whole run (of --train-iters or "
        "the epochs), unlike with "
        "a smaller --train-iters.",
        metavar="N",
    ),
    value("--headrank-pairs-per-context", int, 16, "Pairs that share one forward; 1 is the paper's pair by pair."),
    value(
        "--headrank-passages-per-query",
        int,
        8,
        "Late layout: passages drawn from a list at each visit, spread over the teacher's scores.",
    ),
    value(
        "--headrank-in-batch-weight",
        float,
        0.0,
        "Late layout: weight of the contrastive term, a query's best passages against other queries' on all "
        "data-parallel ranks; ours.",
    ),
    switch(
        "--headrank-train-readout", "Train the log-mass readout's weights too, without decay, at --headrank-readout-lr."
    ),
    value("--headrank-readout-lr", float, None, "Peak learning rate of trained readout weights; by default --lr."),
    switch("--headrank-freeze-embeddings", "Leave the token embeddings as they are: less memory, a cheaper update."),
    value(
        "--headrank-permutations",
        int,
        0,
        "Train on this many fixed shuffles of each list, up to 100; 0 keeps the retriever's order.",
    ),
    switch(
        "--headrank-with-retriever-order",
        "With --headrank-permutations: take the retriever's order in turn with the shuffles.",
    ),
    value(
        "--headrank-loss",
        str,
        "headrank",
        "'ranknet' is the ablation 'w/ SFT': -log sigmoid alone; 'teacher' has the teacher's terms only and needs "
        "no pairs.",
        choices=list(OBJECTIVES),
    ),
    value("--headrank-alpha", float, 0.05, "Weight alpha of the linear term; the paper's."),
    value(
        "--headrank-beta", float, 0.05, "Weight beta of the proximal term; the paper's. 0 is the ablation 'w/o L_prox'."
    ),
    value("--headrank-margin", float, 1.0, "Margin m of the hinge; ours."),
    value(
        "--headrank-gamma",
        float,
        0.01,
        "Weight gamma of the entropy in Omega; ours. Gamma and eta 0 is the ablation 'w/o Omega'.",
    ),
    value("--headrank-eta", float, 0.01, "Weight eta of the middle-zone variance in Omega; ours."),
    value("--headrank-temperature", float, 1.0, "Temperature of p = softmax(s / T); ours."),
    value(
        "--headrank-teacher-ranknet", float, 0.0, "Weight of RankNet against the teacher's margins (soft labels); ours."
    ),
    value("--headrank-teacher-listwise", float, 0.0, "Weight of the listwise KL divergence from the teacher; ours."),
    value(
        "--headrank-teacher-margin-mse",
        float,
        0.0,
        "Weight of the squared error of pair margins against the teacher's; ours.",
    ),
    value(
        "--headrank-teacher-temperature",
        float,
        1.0,
        "Divides the teacher's scores, to bring them to the scale of logits; ours.",
    ),
    value(
        "--headrank-score-scaling",
        str,
        "constant",
        "How scores are brought to the scale of the loss, for policy and reference alike; ours.",
        choices=list(SCALINGS),
    ),
    value(
        "--headrank-score-scale",
        float,
        None,
        "The constant, the deviation or the range of scaled scores; ours. By default "
        + ", ".join(f"{scale:g} for {name}" for name, scale in DEFAULT_SCALES.items())
        + "; of log masses with fitted weights 1, which are fitted to that scale, with equal weights "
        f"{EQUAL_LOG_MASS_SCALE:g} over their sum.",
        metavar="X",
    ),
    switch("--headrank-full-depth", "Build every layer although nothing above l_max is ever trained; for comparison."),
    value(
        "--headrank-lora-rank",
        int,
        0,
        "Freeze the model and train low-rank adapters (LoRA) of this rank; 0 trains all weights, the paper's way.",
    ),
    value(
        "--headrank-lora-alpha",
        float,
        None,
        "The adapter's product is multiplied by alpha / rank. By default twice the rank.",
        metavar="X",
    ),
    value(
        "--headrank-lora-targets",
        str,
        None,
        "Projections that have an adapter; by default all seven.",
        nargs="+",
        choices=list(PROJECTIONS),
    ),
    value(
        "--headrank-reference-cache",
        str,
        None,
        "File of the frozen model's scores; by default SAVE/reference_scores.jsonl.",
        metavar="FILE",
    ),
    value(
        "--headrank-reference-model",
        str,
        None,
        "Hugging Face directory of the frozen model that the proximal term is measured from, where it is not the "
        "model that training "
        "starts from: in a second round the first round's. It has the same shape.",
        metavar="DIR",
    ),
    value(
        "--headrank-trainer",
        str,
        "ours",
        "The loop: ours, or Megatron-LM's own trainer (in the wheels of Megatron-Core from 0.17 on) with the same "
        "losses.",
        choices=["ours", "megatron"],
    ),
    value(
        "--headrank-megatron-flags",
        str,
        None,
        "More flags of Megatron-LM's trainer, in one string behind an equals sign: "
        "--headrank-megatron-flags='--log-straggler'.",
        metavar="FLAGS",
    ),
    value(
        "--headrank-max-nan-steps",
        int,
        5,
        "Stop after this many steps with a NaN or infinite loss or gradient in a row.",
    ),
    value("--headrank-keep-checkpoints", int, 2, "Keep this many newest checkpoints, and the best one; 0 keeps all."),
    value(
        "--headrank-keep-iters",
        int,
        None,
        "Save at these steps whatever --save-interval says, and keep those checkpoints.",
        nargs="+",
    ),
]
