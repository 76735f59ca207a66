"""Artifact folders of ONNX Runtime training sessions, and one-file steps made of them."""
