"""Roles: the part of each input and output of a training graph in the step."""
