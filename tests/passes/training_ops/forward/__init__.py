"""Forward operators that onnxruntime-training differentiates, with PyTorch's forms; see `forward/node.py`."""
