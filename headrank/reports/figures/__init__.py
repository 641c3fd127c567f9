"""Figures of the paper's analyses, one style, each written as PNG and PDF. Importing this package loads matplotlib."""

from headrank.reports.figures.heads import draw_head_depth, draw_head_map
from headrank.reports.figures.lists import draw_position_curves, draw_promotion
from headrank.reports.figures.outcomes import draw_learning_curves, draw_measures, draw_pareto, draw_query_changes
from headrank.reports.figures.readout import draw_readout
from headrank.reports.figures.zones import draw_std_heatmap, draw_std_radar, draw_std_scaling

__all__ = [
    "draw_head_depth",
    "draw_head_map",
    "draw_learning_curves",
    "draw_measures",
    "draw_pareto",
    "draw_position_curves",
    "draw_promotion",
    "draw_readout",
    "draw_query_changes",
    "draw_std_heatmap",
    "draw_std_radar",
    "draw_std_scaling",
]
