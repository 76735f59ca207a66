"""Translation validation: whether a scaled graph is exactly what the passes make of the original."""

from graphscale.checks.translation.validation import Claims, Translation, validate_translation

__all__ = ["Claims", "Translation", "validate_translation"]
