"""Drawings of training graphs: a page of HTML that needs nothing else."""

from graphscale.checks.drawing.pages import check_page, comparison_page, inspection_page, write_page

__all__ = ["check_page", "comparison_page", "inspection_page", "write_page"]
