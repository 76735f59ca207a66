"""Drawings of training graphs: a page of HTML that needs nothing else."""

from graphscale.checks.drawing.pages import check_page, draw_comparison, draw_inspection, write_page

__all__ = ["check_page", "draw_comparison", "draw_inspection", "write_page"]
