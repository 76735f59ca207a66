"""Artifact folders of ONNX Runtime training sessions, one-file steps from them, and their operators' standard forms."""
