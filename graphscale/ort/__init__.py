"""Artifact folders of ONNX Runtime training sessions, one-file steps made of them, and training operators replaced."""
