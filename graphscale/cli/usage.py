"""Messages for command lines that cannot be parsed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from graphscale.errors import GraphscaleError, suggest

__all__ = ["explain_usage", "refuse_empty"]

# Options of other tools, and those that stand for them here.
_SYNONYMS = {
    "--lr": "--learning-rate",
    "--steps": "--max-steps",
    "--batch": "--batch-size",
    "--out": "--output",
    "--dtype": "--autocast",
    "--fp16": "--autocast float16",
    "--bf16": "--autocast bfloat16",
    "--device": "--provider",
    "--ckpt": "--checkpoint-dir",
}


def refuse_empty(words: Sequence[str]) -> None:
    """Refuse empty words, as of a shell's variable without a value: an empty path would be the current folder.

    Raises:
        GraphscaleError: a word is empty, or the value in `--option=`; a title may be.
    """
    for before, word in zip(("graphscale", *words), words, strict=False):
        name = before if not word else word[:-1] if word.startswith("--") and word.endswith("=") else None
        if name is not None and name != "--title":
            raise GraphscaleError(f"the argument behind {name} is empty; give it a value, or leave it out")


def explain_usage(error: Any, values: Mapping[str, str]) -> str:
    """Return the message of an error of click, with the remedy, and the command whose help to read.

    Args:
        error: the error.
        values: the value of each option of the command, as in its usage line.
    """
    context = getattr(error, "ctx", None)
    command = context.command_path if context else " ".join(["graphscale", *sys.argv[1:2]])
    return f"{_explain(error, context, values)} ({command} --help shows what there is)"


def _explain(error: Any, context: Any, values: Mapping[str, str]) -> str:
    parameters = context.command.params if context else []
    text: str = error.format_message().rstrip(".")
    kind = type(error).__name__
    if kind == "NoSuchOption":
        known = {name for each in parameters for name in each.opts}
        other = _SYNONYMS.get(error.option_name, "")
        is_known = other.partition(" ")[0] in known
        return f"there is no option {error.option_name}" + (
            f"; did you mean {other}?" if is_known else suggest(error.option_name, known).replace("'", "")
        )
    if kind == "MissingParameter" and error.param is not None:
        param = error.param
        name = "/".join(param.opts) if param.param_type_name == "option" else param.metavar or param.name.upper()
        return f"{name} is missing: {param.help[:1].lower()}{param.help[1:].rstrip('.')}"
    if kind == "BadOptionUsage" and error.option_name in values:
        return f"{error.option_name} needs a value: {error.option_name} {values[error.option_name]}"
    if text.startswith("Got unexpected extra argument"):
        writes = any("--output" in each.opts for each in parameters)
        hint = "; the file to write goes behind -o" if writes else ""
        return f"there are too many arguments: {text.rpartition('(')[2].rstrip(')')}{hint}"
    if text.startswith("No such command") and not text.endswith("?"):
        return f"{text}; the command comes first, such as graphscale scale MODEL -o OUT"
    return text.removeprefix("Invalid value: ")
