"""Runs of graphs on random feeds, with access to inner values: private copies, runners, feeds."""
