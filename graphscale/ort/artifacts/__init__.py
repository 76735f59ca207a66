"""Artifact folders of ONNX Runtime training sessions: training, eval and optimizer model, and a checkpoint.

`onnxruntime.training.artifacts.generate_artifacts` writes such a folder, and `onnxruntime.training.api` trains with it.
"""

from graphscale.ort.artifacts.resume import ResumedArtifacts, resume_artifacts
from graphscale.ort.artifacts.scale_folder import ScaledArtifacts, scale_artifacts

__all__ = ["ResumedArtifacts", "ScaledArtifacts", "resume_artifacts", "scale_artifacts"]
