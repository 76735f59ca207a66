"""Digests of scaled graphs: the same for all orders that mean nothing, and for the version in their metadata."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any

import onnx

__all__ = ["digest_of", "digests", "steady"]

# The record of the original, the report, which is in the tables by itself, and the version.
_LEFT_OUT = ("graphscale.original", "graphscale.report", "graphscale.version")
_INSTALLED = re.compile(r" \([^()]*, installed here,[^()]*\)")


def digest_of(*parts: bytes) -> str:
    """Return a short digest of parts, whose borders count."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def digests(model: onnx.ModelProto) -> dict[str, str]:
    """Return a digest of the content of a graph, one of the order of its nodes, and one of the model around it."""
    graph = model.graph
    return {
        "graph": digest_of(
            graph.name.encode(),
            graph.doc_string.encode(),
            *_in_order(graph.input),
            *_in_order(graph.output),
            *_sorted(graph.node),
            *_sorted(graph.initializer),
            *_sorted(graph.sparse_initializer),
            *_sorted(graph.quantization_annotation),
            *_sorted(graph.value_info),
        ),
        "order": digest_of(*(",".join(node.output).encode() for node in graph.node)),
        "model": digest_of(
            str(model.ir_version).encode(),
            model.doc_string.encode(),
            *_sorted(model.opset_import),
            *_sorted(model.functions),
            *_sorted(model.training_info),
            *_sorted(entry for entry in model.metadata_props if entry.key not in _LEFT_OUT),
        ),
    }


def steady(error: Exception, length: int) -> str:
    """Return the class and the beginning of the message of an error, without the installed packages."""
    text = _INSTALLED.sub("", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:length]}"


def digest_of_json(content: Any) -> str:
    """Return the digest of plain data."""
    return digest_of(json.dumps(content, sort_keys=True).encode())


def _in_order(messages: Iterable[Any]) -> list[bytes]:
    return [message.SerializeToString(deterministic=True) for message in messages]


def _sorted(messages: Iterable[Any]) -> list[bytes]:
    return sorted(_in_order(messages))
