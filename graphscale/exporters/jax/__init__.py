"""Training steps of JAX: one ONNX file of forward pass, backward pass and optimizer, and the trained tree back."""

from graphscale.exporters.jax.step_export import export_step
from graphscale.exporters.jax.trained_tree import load_weights

__all__ = ["export_step", "load_weights"]
