"""The training steps of step_cost.py: the same ones for ONNX Runtime, PyTorch and TensorFlow."""
