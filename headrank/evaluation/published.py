"""The numbers printed in the paper, as data: always to be shown as the paper's, never as ours. All in percent.

Tables are kept as they are printed so that they can be compared with the page by eye. Methods and benchmarks carry the
names of this project's registries; "headrank+..." are the rows of the ablation, named as in configs/ablations.yaml.
"""

from __future__ import annotations

from dataclasses import dataclass

Head = tuple[int, int]  # (layer, head), as in headrank.method.heads, which would load torch

TABLE_1 = "Table 1: NDCG@10, BM25 top-40"
TABLE_2 = "Table 2: Recall@2 and Recall@5, ColBERTv2 top-20"
TABLE_3 = "Table 3: ablation, Qwen3-0.6B"
AVERAGE, SUCCESS_RATE = "average", "success rate"  # in the place of a benchmark's name

_TABLE_1_COLUMNS = "dl19 dl20 trec-covid arguana trec-news fiqa scidocs nfcorpus nq dbpedia fever".split()
_TABLE_1 = """
first-stage    bm25      50.58 47.96 59.47 29.99 39.52 23.61 14.90 33.75 30.55 31.80 65.13  38.84 100.0
Qwen3-0.6B     rankgpt   49.17 48.54 60.28 26.44 37.81 23.22 14.60 33.48 30.89 32.18 60.85  37.95  76.6
Qwen3-0.6B     icr       50.09 41.75 63.28 32.43 41.13 22.70 13.75 34.06 33.62 32.57 65.59  39.18 100.0
Qwen3-0.6B     core      50.46 44.24 65.53 33.61 42.55 25.66 15.48 33.22 36.61 34.20 71.00  41.14 100.0
Qwen3-0.6B     qr        51.96 43.32 67.84 34.39 40.04 24.42 13.93 34.28 35.45 33.22 66.18  40.46 100.0
Qwen3-0.6B     niah      46.55 38.87 59.76 33.87 39.34 23.53 14.58 32.40 33.83 31.82 71.65  38.75 100.0
Qwen3-0.6B     headrank  59.93 51.71 68.71 34.62 44.02 25.99 16.36 35.09 43.25 37.02 73.47  44.56 100.0
Qwen3-1.7B     rankgpt   56.32 52.77 68.15 27.47 46.30 25.95 16.46 28.82 39.50 36.44 54.69  41.17  97.1
Qwen3-1.7B     icr       52.11 46.14 65.42 30.63 43.47 27.17 15.59 34.65 37.09 33.24 69.39  41.35 100.0
Qwen3-1.7B     core      51.26 45.81 68.67 34.59 42.71 28.49 16.57 34.91 40.00 34.39 71.02  42.58 100.0
Qwen3-1.7B     qr        52.36 46.56 67.77 33.52 43.89 27.61 16.00 34.70 40.00 33.36 65.45  41.93 100.0
Qwen3-1.7B     niah      48.98 43.25 63.39 33.00 41.22 26.29 15.44 33.42 35.98 32.15 72.59  40.52 100.0
Qwen3-1.7B     headrank  61.32 57.85 70.81 36.59 46.40 28.11 16.96 36.23 43.32 37.06 71.86  46.05 100.0
Qwen3-4B       rankgpt   63.58 59.52 71.12 27.72 49.32 27.23 16.68 30.24 44.86 41.34 62.18  44.89  95.8
Qwen3-4B       icr       54.38 48.17 66.63 23.68 42.69 24.53 14.47 34.61 37.67 32.81 61.06  40.06 100.0
Qwen3-4B       core      56.67 50.89 70.08 32.93 43.32 29.88 16.52 35.13 42.80 35.84 73.39  44.31 100.0
Qwen3-4B       qr        57.45 53.84 73.04 32.35 44.46 28.18 15.98 35.68 44.30 36.27 69.82  44.67 100.0
Qwen3-4B       niah      48.13 40.94 63.64 24.91 38.30 25.00 14.69 32.26 34.40 30.82 70.83  38.54 100.0
Qwen3-4B       headrank  64.33 59.89 73.94 35.30 46.27 28.73 16.89 36.44 45.36 37.24 69.69  46.73 100.0
"""

_TABLE_2_COLUMNS = ["hotpotqa", "2wiki", "musique", AVERAGE]  # each with Recall@2 and Recall@5
_TABLE_2 = """
first-stage    colbertv2 64.65 79.30 59.23 68.20 37.94 49.52  53.94 65.67     -
Qwen3-0.6B     rankgpt   52.85 62.90 39.50 46.70 30.42 37.49  40.92 49.03  80.1
Qwen3-0.6B     icr       57.50 75.35 51.28 62.95 31.23 43.69  46.67 60.66 100.0
Qwen3-0.6B     headrank  67.50 85.25 60.98 72.12 36.72 51.02  55.07 69.46 100.0
Qwen3-1.7B     rankgpt   57.25 73.20 46.45 59.15 35.02 47.83  46.24 60.06  93.7
Qwen3-1.7B     icr       66.95 82.10 59.65 70.60 39.61 51.07  55.40 67.92 100.0
Qwen3-1.7B     headrank  69.35 86.20 62.65 72.88 39.05 54.47  57.02 71.18 100.0
Qwen3-4B       rankgpt   71.60 84.25 65.18 73.28 41.25 52.99  59.34 70.17  98.9
Qwen3-4B       icr       57.45 74.20 53.93 66.00 34.23 46.52  48.54 62.24 100.0
Qwen3-4B       headrank  72.65 86.45 63.60 73.75 42.67 55.10  59.64 71.77 100.0
Mistral-7B     rankgpt   64.80 79.80 56.30 67.10 36.20 48.70  52.40 65.20  20.5
Llama-3.1-8B   rankgpt   69.90 84.80 60.80 72.00 39.30 51.40  56.60 69.40  98.2
GPT-3.5-Turbo  rankgpt   71.80 84.90 61.60 72.80 38.70 54.10  57.40 70.60  98.6
"""

_TABLE_3_COLUMNS = [("nq", "nDCG@10"), ("fiqa", "nDCG@10"), ("2wiki", "R@5"), ("hotpotqa", "R@5")]
_TABLE_3 = """
Qwen3-0.6B     headrank                  43.25 25.99 72.12 85.25
Qwen3-0.6B     headrank+sft              37.39 22.92 69.65 79.60
Qwen3-0.6B     headrank+all-heads        20.52  8.97 67.05 54.80
Qwen3-0.6B     headrank+no-gate          39.50 24.12 69.80 82.15
Qwen3-0.6B     headrank+no-alps          40.85 23.50 70.45 83.20
Qwen3-0.6B     headrank+no-omega         38.60 23.95 68.20 80.50
Qwen3-0.6B     headrank+no-prox          36.45 21.30 68.85 80.10
"""

_TABLE_4 = {  # rank 1 to 8: before | after
    "Qwen3-0.6B": (
        "L11-H2 L11-H3 L16-H7 L21-H9 L21-H8 L6-H7 L17-H12 L13-H14",
        "L14-H14 L11-H3 L16-H13 L11-H2 L14-H6 L13-H6 L16-H8 L16-H14",
    ),
    "Qwen3-1.7B": (
        "L14-H14 L11-H2 L11-H3 L13-H14 L14-H6 L16-H14 L16-H13 L19-H5",
        "L11-H2 L14-H6 L16-H8 L11-H3 L16-H7 L16-H15 L14-H15 L16-H14",
    ),
    "Qwen3-4B": (
        "L21-H8 L21-H10 L22-H4 L23-H10 L24-H29 L21-H11 L20-H16 L20-H15",
        "L24-H29 L21-H8 L21-H10 L23-H10 L22-H4 L23-H30 L21-H18 L15-H11",
    ),
}

# Figures of the deep analysis: the datasets that are averaged over, and the queries whose attention is shown (Section
# "Case study" and
# its appendices). Multi-hop questions are numbered by their place in the file, from 0.
FIGURE_BENCHMARKS = ("dl19", "dl20", "trec-covid", "nq", "trec-news", "hotpotqa", "2wiki", "musique")
CASE_STUDIES = (
    ("fever", "194182", "Jeb Bush's mother is Laura Bush."),
    ("dbpedia", "INEX_LD-2012383", "famous computer scientists disappeared at sea"),
    ("fiqa", "9565", "What are the tax benefits of dividends vs selling stock"),
    ("dl20", "997622", "where is the show shameless filmed"),
    ("trec-covid", "46", "what evidence is there for dexamethasone as a treatment for COVID-19?"),
    ("dl19", "1106007", "define visceral?"),
    ("dl20", "1131069", "how many sons robert kraft has"),
    ("dbpedia", "QALD2_tr-62", "Who created Wikipedia?"),
    ("hotpotqa", "321", "What occupation was shared by David Yates and Pietro Germi?"),
    (
        "hotpotqa",
        "348",
        'Between Joe Orton and Henry James, which author is the adjective "Ortonesque" used to refer to his work?',
    ),
    ("2wiki", "104", "Where did the composer of film Camille (1926 Feature Film) die?"),
    ("2wiki", "99", "Who is Marianus V Of Arborea's mother?"),
    ("musique", "4", "When was Lady Godiva's birthplace abolished?"),
    ("musique", "9", "What is the Till dom ensamma performer's birth date?"),
)

# Section "Deep Analysis": relevant minus irrelevant middle-zone documents promoted to the top quartile, percentage
# points
SELECTIVITY_GAP = {"Qwen3-0.6B": 36.6, "Qwen3-1.7B": 40.4, "Qwen3-4B": 43.1}
PROMOTED_AT_4B = {"relevant": 57.4, "irrelevant": 14.2}
TRAINING_QUERIES, TRAINING_PAIRS = 211, 91_000  # "about 91K" for the 0.6B and 1.7B models


@dataclass(frozen=True)
class PublishedNumber:
    """One cell of a table. ``benchmark`` may be AVERAGE or SUCCESS_RATE; the measure of a success rate is empty."""

    table: str
    model: str
    method: str
    benchmark: str
    measure: str
    value: float


def published_numbers() -> list[PublishedNumber]:
    """Every number of Tables 1 to 3, in the order in which they are printed."""
    table_1 = [(name, "nDCG@10") for name in [*_TABLE_1_COLUMNS, AVERAGE]] + [(SUCCESS_RATE, "")]
    table_2 = [(name, measure) for name in _TABLE_2_COLUMNS for measure in ("R@2", "R@5")] + [(SUCCESS_RATE, "")]
    return [
        *_read_table(TABLE_1, _TABLE_1, table_1),
        *_read_table(TABLE_2, _TABLE_2, table_2),
        *_read_table(TABLE_3, _TABLE_3, _TABLE_3_COLUMNS),
    ]


def published_heads() -> dict[str, dict[str, list[Head]]]:
    """Table 4: model -> "before" and "after" -> heads as (layer, head), best first."""
    return {
        model: {
            moment: [_read_head(name) for name in listed.split()]
            for moment, listed in zip(("before", "after"), lists, strict=True)
        }
        for model, lists in _TABLE_4.items()
    }


def _read_table(table: str, text: str, columns: list[tuple[str, str]]) -> list[PublishedNumber]:
    numbers = []
    for line in text.strip().splitlines():
        model, method, *cells = line.split()
        for (benchmark, measure), cell in zip(columns, cells, strict=True):
            if cell != "-":
                numbers.append(PublishedNumber(table, model, method, benchmark, measure, float(cell)))
    return numbers


def _read_head(name: str) -> Head:
    layer, head = name.removeprefix("L").split("-H")
    return int(layer), int(head)
