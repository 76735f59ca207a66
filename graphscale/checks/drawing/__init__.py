"""Drawings of training graphs: a page of HTML that needs nothing else."""

from graphscale.checks.drawing.pages import draw_comparison, draw_inspection, write_page

__all__ = ["draw_comparison", "draw_inspection", "write_page"]
