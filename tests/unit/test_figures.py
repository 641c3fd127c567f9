"""Figures: each is written as PNG and PDF, shows what it was given, and is the same bytes when drawn again."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from headrank.evaluation.homogenisation import score_by_position
from headrank.evaluation.scored_lists import parse_scores
from headrank.method.heads import HeadSet
from headrank.reports import figures
from headrank.reports.figures import lists, outcomes, style, zones
from headrank.reports.figures.zones import short_count
from headrank.reports.pareto import CostPoint

PANELS = {
    model: {method: {"dl19": 0.1, "nfc": 0.2, "nq": 0.3} for method in ("icr", "headrank")} for model in ("0.6B", "4B")
}
LIST = {
    "query_id": "q",
    "doc_ids": list("abcdefgh"),
    "scores": [8, 7, 1, 2, 3, 4, 5, 6],
    "ranks": list(range(1, 9)),
    "grades": [1, 0] * 4,
}


def head_set(*heads: tuple[int, int], with_table: bool = True) -> HeadSet:
    table = [
        {"rank": 1, "name": "", "layer": layer, "head": head, "is_chosen": True, "phi": 0.1 * head}
        for layer in range(6)
        for head in range(4)
    ]
    return HeadSet(heads, "entropy", "models/tiny", 6, 4, table=tuple(table) if with_table else ())


DRAWINGS: dict[str, Callable[[Path], list[Path]]] = {
    "head_map": lambda path: figures.draw_head_map(head_set((3, 1), (2, 0)), path),
    "head_map_without_table": lambda path: figures.draw_head_map(head_set((5, 1), with_table=False), path),
    "head_depth": lambda path: figures.draw_head_depth(
        {"before": head_set((3, 1), (3, 2)), "after": head_set((1, 1))}, path
    ),
    "heatmap": lambda path: figures.draw_std_heatmap(PANELS, path),
    "radar": lambda path: figures.draw_std_radar(PANELS, path),
    "scaling": lambda path: figures.draw_std_scaling(PANELS, {"0.6B": 6e8, "4B": 4e9}, path),
    "promotion": lambda path: figures.draw_promotion(
        {"0.6B": {"icr": (0.3, 0.2, 0.1), "headrank+control": (0.5, 0.1, 0.4)}}, path
    ),
    "positions": lambda path: figures.draw_position_curves(
        {"icr": score_by_position([parse_scores(LIST, "test")])}, path
    ),
    "measures": lambda path: figures.draw_measures([("bm25", "BM25", 0.5, (0.4, 0.6))], "nDCG@10", path),
    "changes": lambda path: figures.draw_query_changes(
        {"1": 0.1, "2": -0.2, "3": 0.0}, "nDCG@10", path, "new against old"
    ),
    "pareto": lambda path: figures.draw_pareto(
        [CostPoint(4, 0.4, "0.6B", "icr"), CostPoint(2, 0.5, "0.6B", "headrank")], "nDCG@10", path, {"bm25": 0.38}
    ),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_each_figure_is_written_as_png_and_pdf(name: str, tmp_path: Path) -> None:
    png, pdf = DRAWINGS[name](tmp_path / "figure.png")
    assert (png.name, pdf.name) == ("figure.png", "figure.pdf")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert pdf.read_bytes().startswith(b"%PDF")


def test_a_figure_drawn_again_is_the_same_byte_for_byte(tmp_path: Path) -> None:
    first, second = (DRAWINGS["pareto"](tmp_path / name) for name in ("one", "two"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were drawn, laid out and not written."""
    drawn: list[Figure] = []

    def keep(figure: Figure, path: Path) -> list[Path]:
        figure.canvas.draw()
        drawn.append(figure)
        return [path, path]

    for module in (outcomes, lists, zones):
        monkeypatch.setattr(module, "save_figure", keep)
    return drawn


@pytest.mark.parametrize("seconds", [(2.36, 3.17, 3.55), (0.02, 0.5, 40.0)])
def test_the_pareto_figure_keeps_its_names_inside_and_its_ticks_apart(
    seconds: tuple[float, ...], kept: list[Figure]
) -> None:
    models = ["smollm2-135m-instruct", "smollm2-135m-instruct", "model"]
    points = [
        CostPoint(at, 0.4, model, method)
        for at, model, method in zip(seconds, models, ("icr", "core", "headrank"), strict=True)
    ]
    figures.draw_pareto(points, "nDCG@10", Path("x"))
    (figure,) = kept
    (axes,) = figure.axes
    names = [text.get_window_extent() for text in axes.texts if "," in text.get_text()]
    assert len(names) == 3
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in names)
    assert axes.get_position().width > 0.7
    labels = [label for label in (*axes.get_xticklabels(), *axes.get_xticklabels(minor=True)) if label.get_text()]
    extents = [label.get_window_extent() for label in labels]
    boxes = sorted(
        (box for box in extents if axes.bbox.x0 <= (box.x0 + box.x1) / 2 <= axes.bbox.x1), key=lambda box: box.x0
    )
    assert len(boxes) >= 2
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def test_names_of_points_that_nearly_coincide_do_not_cover_each_other(kept: list[Figure]) -> None:
    figures.draw_pareto([CostPoint(2, 0.4, model, "icr") for model in ("0.6B", "1.7B", "4B")], "nDCG@10", Path("x"))
    boxes = [text.get_window_extent() for text in kept[0].axes[0].texts if "ICR" in text.get_text()]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


@pytest.mark.parametrize("methods", [["icr"], ["icr", "core"], ["icr", "core", "qr", "headrank"]])
def test_the_legend_of_the_position_curves_is_not_cut_off(methods: list[str], kept: list[Figure]) -> None:
    curve = score_by_position([parse_scores(LIST, "test")])
    figures.draw_position_curves(dict.fromkeys(methods, curve), Path("x"))
    box = kept[0].legends[0].get_window_extent()
    assert kept[0].bbox.x0 <= box.x0 and box.x1 <= kept[0].bbox.x1


@pytest.mark.parametrize("name", ["heatmap", "promotion"])
def test_a_long_model_name_fits_above_its_panel(name: str, kept: list[Figure]) -> None:
    models = ["model", "smollm2-135m-instruct-trained-again"]
    if name == "heatmap":
        figures.draw_std_heatmap({model: {"icr": {"toy": 0.1}} for model in models}, Path("x"))
    else:
        figures.draw_promotion({model: {"icr": (0.3, 0.2, 0.1)} for model in models}, Path("x"))
    boxes = [
        axes.title.get_window_extent() if axes.title.get_text() else axes._left_title.get_window_extent()
        for axes in kept[0].axes[:2]
    ]
    assert boxes[0].x1 < boxes[1].x0
    assert boxes[1].x1 <= kept[0].bbox.x1


def test_the_band_is_named_for_the_prompt_which_need_not_follow_the_retriever(kept: list[Figure]) -> None:
    shuffled = LIST | {"positions": [3, 8, 1, 6, 4, 7, 2, 5]}  # ranks 3-6, the middle zone, stand at 1, 6, 4 and 7
    figures.draw_position_curves({"icr": score_by_position([parse_scores(shuffled, "test")])}, Path("x"))
    (figure,) = kept
    assert [text.get_text() for text in figure.legends[0].get_texts()][-1] == "middle of the prompt"
    band = figure.axes[0].patches[0]
    assert (band.get_x(), band.get_x() + band.get_width()) == (2.5, 6.5)


def test_rows_known_by_label_keep_name_and_colour_of_their_own(kept: list[Figure]) -> None:
    methods = {"HeadRank (trained), a": "headrank+trained", "HeadRank, trained": "headrank", "ICR": "icr"}
    curve = score_by_position([parse_scores(LIST, "test")])
    figures.draw_position_curves(dict.fromkeys(methods, curve), Path("x"), methods=methods)
    figures.draw_promotion(
        {"dl19": {label: (0.1 * place, 0, 0) for place, label in enumerate(methods, 1)}}, Path("x"), methods=methods
    )
    positions, promotion = kept
    names = ["ICR", "HeadRank\ntrained", "HeadRank (trained)\na"]
    assert [axes.get_title(loc="left") for axes in positions.axes] == names
    (axes,) = promotion.axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == names
    assert [round(bar.get_height()) for bar in axes.patches[::2]] == [30, 20, 10]
    assert to_hex(axes.patches[2].get_facecolor()) == style.method_style("headrank").colour.lower()


def test_places_in_the_prompt_are_whole_numbers(kept: list[Figure]) -> None:
    row = {
        "query_id": "q",
        "doc_ids": list("abcdefghijkl"),
        "scores": list(range(12)),
        "ranks": list(range(1, 13)),
        "grades": [1, 0] * 6,
    }
    figures.draw_position_curves({"icr": score_by_position([parse_scores(row, "test")])}, Path("x"))
    assert all(float(tick).is_integer() for tick in kept[0].axes[0].get_xticks())


def test_a_method_has_one_colour_everywhere_and_its_variants_share_it() -> None:
    styles = {
        method: style.method_style(method) for method in ("bm25", "rankgpt", "icr", "core", "qr", "niah", "headrank")
    }
    assert (
        len({entry.colour for entry in styles.values()})
        == len({entry.marker for entry in styles.values()})
        == len(styles)
    )
    control = style.method_style("headrank+control")
    assert control.colour == styles["headrank"].colour
    assert control.marker != styles["headrank"].marker
    assert style.method_style("something else") == style.method_style("something else")


def simulate_deuteranopia(colour: str) -> np.ndarray:
    """Viénot's linear model of the commonest colour blindness, on linear RGB."""
    rgb = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]) ** 2.2
    lms = np.array([[17.8824, 43.5161, 4.11935], [3.45565, 27.1554, 3.86714], [0.0299566, 0.184309, 1.46709]])
    blind = np.array([[1, 0, 0], [0.494207, 0, 1.24827], [0, 0, 1]])
    return np.clip(np.linalg.inv(lms) @ blind @ lms @ rgb, 0, 1) ** (1 / 2.2)


def test_the_palette_stays_apart_without_green_cones() -> None:
    seen = {
        method: simulate_deuteranopia(style.method_style(method).colour)
        for method in ("rankgpt", "icr", "core", "qr", "niah", "headrank")
    }
    seen |= {"gain": simulate_deuteranopia(style.GAIN), "loss": simulate_deuteranopia(style.LOSS)}
    pairs = [
        (first, second)
        for first in seen
        for second in seen
        if first < second and {first, second} not in ({"gain", "qr"}, {"loss", "niah"})
    ]
    closest = min(pairs, key=lambda pair: np.linalg.norm(seen[pair[0]] - seen[pair[1]]))
    assert np.linalg.norm(seen[closest[0]] - seen[closest[1]]) > 0.12, closest


def test_labels_on_fills_are_dark_on_light_and_light_on_dark() -> None:
    assert style.readable_on((1, 1, 1)) == style.INK
    assert style.readable_on((0.3, 0.05, 0.2)) == style.PAPER


def test_parameter_counts_are_written_as_people_say_them() -> None:
    assert [short_count(number) for number in (135e6, 0.6e9, 1.7e9, 4e9, 12)] == ["135M", "0.6B", "1.7B", "4B", "12"]


def test_drawing_leaves_matplotlibs_global_settings_alone(tmp_path: Path) -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    DRAWINGS["measures"](tmp_path / "figure")
    assert dict(mpl.rcParams) == before
