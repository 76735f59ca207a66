"""Options and their parsing that several commands share."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphscale.errors import InvalidLossScaleError, RolesError, UpdateError, reporting
from graphscale.files.contents import parse_json
from graphscale.files.descriptors import STDIN, STDOUT, descriptor_of
from graphscale.files.reading import read_file
from graphscale.policy import presets
from graphscale.policy.loss_scale import DynamicLossScale, LossScale, get_policy
from graphscale.targets import CPU_PROVIDER, CUDA_PROVIDER, TARGETS, target_names

if TYPE_CHECKING:
    from graphscale.analysis.roles.answers import Answers

__all__ = [
    "BUCKET_SIZE",
    "GENERAL",
    "LIMITS",
    "Accept",
    "AlsoScale",
    "Dim",
    "DryRun",
    "Dtype",
    "DtypeBefore",
    "EachNode",
    "Feeds",
    "Force",
    "ForceRoles",
    "Gradient",
    "IncrementPeriod",
    "InitialLossScale",
    "Json",
    "Keep",
    "Loss",
    "LossScaleOption",
    "ModelPath",
    "Multiplier",
    "Provider",
    "Quiet",
    "RandomSeed",
    "RolesFile",
    "SeedEdge",
    "Target",
    "Update",
    "Verbose",
    "argument",
    "check_whole",
    "complete_telemetry",
    "is_folder",
    "name_streams",
    "option",
    "output_path",
    "parse_dims",
    "parse_loss_scale",
    "parse_updates",
    "read_roles",
    "refuse_one_file",
    "refuse_with_folder",
]

LOSS_SCALE = f"dynamic, a number, a preset ({', '.join(presets.NAMES)}) or FILE.json."
BUCKET_SIZE = "25MiB"
# The panels of the options that every command has.
LIMITS, GENERAL = "Limits for input files", "General"
PROVIDERS = (CPU_PROVIDER, CUDA_PROVIDER)
_DTYPES = ("float16", "bfloat16")


def option(help: str, *names: str, choices: Iterable[str] = (), **more: Any) -> Any:
    """Declare an option.

    Args:
        help: its meaning.
        names: its names; by default that of the parameter.
        choices: values that the shell completes.
        more: other settings of typer.
    """
    if choices:
        more["autocompletion"] = lambda incomplete: [each for each in choices if each.startswith(incomplete)]
    return typer.Option(*names, help=help, **more)


def output_path(help: str, **more: Any) -> Any:
    """Declare the option -o."""
    return option(help, "-o", "--output", rich_help_panel="Output", **more)


def argument(help: str, **more: Any) -> Any:
    """Declare an argument without a default."""
    return typer.Argument(help=help, show_default=False, **more)


_roles = functools.partial(option, rich_help_panel="Names and roles, where they are not found")
_policy = functools.partial(option, rich_help_panel="Loss scale")
_output = functools.partial(option, rich_help_panel="Output")

ModelPath = Annotated[Path, argument("An ONNX training graph.")]
Loss = Annotated[list[str] | None, _roles("A loss. Repeatable.", metavar="NAME")]
SeedEdge = Annotated[str | None, _roles("The input of a node where the scale enters.", metavar="NODE:INDEX")]
Gradient = Annotated[list[str] | None, _roles("A value that is a gradient. Repeatable.", metavar="NAME")]
Update = Annotated[
    list[str] | None,
    _roles("Output OUT is the next value of input IN. {}_next={} pairs all. Repeatable.", metavar="OUT=IN"),
]
RolesFile = Annotated[Path | None, _roles("The roles of outputs, from inspect --roles-out.", metavar="FILE.json")]
EachNode = Annotated[
    bool, option("With --html: draw each node, however large the drawing becomes.", rich_help_panel="Output")
]
Keep = Annotated[list[str] | None, _roles("This state advances on skipped steps, too. Repeatable.", metavar="OUT")]
ForceRoles = Annotated[bool, _roles("Accept named roles even against the graph.")]
Accept = Annotated[bool, _roles("Take the proposals for open roles.")]
Dim = Annotated[list[str] | None, option("The size of a symbolic axis. Repeatable.", metavar="NAME=SIZE")]
Feeds = Annotated[Path | None, option("Arrays for inputs, by name. Default: random ones.", metavar="FILE.npz")]
RandomSeed = Annotated[int, option("The random seed.", min=0)]
Provider = Annotated[
    list[str] | None,
    option(
        "An execution provider, such as CUDAExecutionProvider. Repeatable. Default: the CPU.",
        choices=PROVIDERS,
        metavar="NAME",
    ),
]
Dtype = Annotated[str, option("float16 or bfloat16.", choices=_DTYPES, metavar="TYPE")]
DtypeBefore = Annotated[
    str | None, option("Use mixed precision first: float16 or bfloat16.", choices=_DTYPES, metavar="TYPE")
]
LossScaleOption = Annotated[str, _policy(LOSS_SCALE, choices=("dynamic", *presets.NAMES), metavar="SCALE")]
AlsoScale = Annotated[
    str | None, _policy(f"Scale the result, too: {LOSS_SCALE}", choices=("dynamic", *presets.NAMES), metavar="SCALE")
]
InitialLossScale = Annotated[float | None, _policy("The first dynamic scale. Default: 32768.")]
IncrementPeriod = Annotated[int | None, _policy("Good steps before a growth. Default: 2000.")]
Multiplier = Annotated[float | None, _policy("The factor of growth and decrease. Default: 2.")]
Target = Annotated[
    str | None,
    _output(
        f"The runtime: {target_names()}. Default: onnx; for a folder ort-training.",
        choices=TARGETS,
        metavar="TARGET",
    ),
]
Force = Annotated[bool, _output("Replace an output that is read, or that graphscale did not write.")]
DryRun = Annotated[bool, _output("Write nothing.")]
_general = functools.partial(option, rich_help_panel=GENERAL)
Quiet = Annotated[bool, _general("Print nothing but errors.", "-q", "--quiet")]
Verbose = Annotated[bool, _general("Print all details.", "-v", "--verbose")]
Json = Annotated[bool, _general("Print one JSON object instead of text.", "--json")]


def check_whole(whole: bool, html: Path | None) -> None:
    """Refuse --whole without --html."""
    if whole and html is None:
        raise typer.BadParameter("--whole goes with --html")


def refuse_one_file(outputs: Mapping[str, Path | None]) -> None:
    """Refuse two outputs, by the names of their options, at one path.

    Raises:
        BadParameter: two options name one file.
    """
    named: dict[Path, str] = {}
    for name, path in outputs.items():
        if path is not None and (other := named.setdefault(path.resolve(), name)) != name:
            raise typer.BadParameter(f"{other} and {name} both write {path}; name two files")


def is_folder(
    model: Path, output: Path | None, dry_run: bool, graph_options: Mapping[str, object], marked: bool = True
) -> bool:
    """Return whether a model is a folder of artifacts, and check the options that depend on it.

    Args:
        model: a file or a folder.
        output: the path to write.
        dry_run: True for no output file.
        graph_options: the options that go with a single graph alone, by name.
        marked: the written model will name its writer.

    Raises:
        BadParameter: the output is missing, or an option does not go with a folder.
        OutputError: the output file cannot be written.
    """
    from graphscale.files import writing
    from graphscale.ort.artifacts.folder import holds_artifacts

    if output is None and not dry_run:
        raise typer.BadParameter("name the file to write with -o, or pass --dry-run")
    if not holds_artifacts(model):
        if output is not None:
            writing.check_output(output) if dry_run else writing.check_new_output(output, marked)
        return False
    refuse_with_folder(model, graph_options)
    return True


def refuse_with_folder(folder: Path, graph_options: Mapping[str, object]) -> None:
    """Refuse options that go with a single graph alone, by name.

    Raises:
        BadParameter: such an option is given.
    """
    for name, value in graph_options.items():
        if value:
            raise typer.BadParameter(f"{name} is for a single graph; {folder} is a folder of artifacts")


def parse_updates(updates: list[str] | None) -> dict[str, str]:
    """Turn `OUT=IN` options into `{output name: input name}`.

    Raises:
        UpdateError: an option has no `=`, or an output is named twice.
    """
    pairs: dict[str, str] = {}
    for option in updates or []:
        output, separator, source = option.partition("=")
        if not (output and separator and source):
            raise UpdateError(f"--update {option}: expected OUT=IN, an output's and an input's name")
        if output in pairs:
            raise UpdateError(f"--update {option}: output {output!r} is named twice")
        pairs[output] = source
    return pairs


def parse_dims(options: list[str] | None) -> dict[str, int]:
    """Turn `NAME=SIZE` options into `{name: size}`."""
    sizes: dict[str, int] = {}
    for given in options or []:
        name, separator, size = given.rpartition("=")
        if not (name and separator and size.isascii() and size.isdecimal() and 0 < int(size) < 2**31):
            raise typer.BadParameter(f"--dim {given}: expected NAME=SIZE, an axis and a number from 1 to 2**31 - 1")
        sizes[name] = int(size)
    return sizes


def complete_telemetry(words: Sequence[str]) -> list[str]:
    """Give `--telemetry` an empty value where no name of a form follows it: it may stand alone."""
    form = re.compile("(ranges|activations)(,.*)?")
    pairs = itertools.zip_longest(words, words[1:], fillvalue="")
    return [f"{word}=" if word == "--telemetry" and not form.fullmatch(after) else word for word, after in pairs]


def name_streams(words: Sequence[str]) -> list[str]:
    """Replace `-` by the path of standard input, or behind -o by that of standard output.

    Raises:
        BadParameter: standard input is named twice.
    """
    named, before = list[str](), ""
    for word in words:
        name, equals, value = word.partition("=")
        if (value == "-" and name.startswith("--")) or word in ("-", "-o-"):
            is_output = "-o" in (before, word[:2]) or "--output" in (before, name)
            path = STDOUT if is_output else STDIN
            word = path if word == "-" else f"{name}={path}" if equals else f"-o{path}"
        named.append(word)
        before = word
    if sum(word in (STDIN, f"--{word[2:].partition('=')[0]}={STDIN}") for word in named) > 1:
        raise typer.BadParameter("standard input can be read once; name a file for the other")
    return named


def read_roles(path: Path | None) -> Answers | None:
    """Read a roles file.

    Raises:
        RolesError: the file cannot be read, or has another form.
    """
    if path is None:
        return None
    from graphscale.analysis.roles.answers import Answers

    with reporting(RolesError, f"--roles {path}: cannot read the file"):
        answers = Answers.parse(read_file(path), f"--roles {path}")
    return dataclasses.replace(answers, file=f"--roles {path}", filed=frozenset((*answers.outputs, *answers.kept)))


def parse_loss_scale(
    text: str,
    initial: float | None = None,
    increment_period: int | None = None,
    multiplier: float | None = None,
    option: str = "--loss-scale",
) -> LossScale:
    """Turn the loss-scale options into a loss scale; the numbers override its own.

    Args:
        text: "dynamic", a number, the name of a preset, or the path of a JSON file with
            `{"class_name": ..., "config": {...}}`.
        initial: the first scale.
        increment_period: good steps before a growth.
        multiplier: the factor of growth and decrease.
        option: the name of the option with the text.

    Raises:
        InvalidLossScaleError: the file cannot be read, or a value is out of range.
    """
    try:
        policy = get_policy(_identifier(text))
    except InvalidLossScaleError as error:
        raise InvalidLossScaleError(f"{option} {text}: {error}") from error
    given = {"initial_loss_scale": initial, "increment_period": increment_period, "multiplier": multiplier}
    overrides = {key: value for key, value in given.items() if value is not None}
    if not overrides:
        return policy
    if not isinstance(policy, DynamicLossScale):
        override = "--" + next(iter(overrides)).replace("_", "-")
        raise InvalidLossScaleError(f"{override} goes with a dynamic loss scale; --loss-scale {text} is fixed")
    if text in presets.NAMES:
        overridden: LossScale = getattr(presets, text)(**overrides)
        return overridden
    return DynamicLossScale.from_config({**policy.get_config(), **overrides})


def _identifier(text: str) -> Any:
    if text == "dynamic":
        return text
    if text in presets.NAMES:
        return getattr(presets, text)()
    try:
        return float(text)
    except ValueError:
        pass
    if not text.endswith(".json") and descriptor_of(text) is None:
        raise InvalidLossScaleError(
            f"expected dynamic, a number, a preset ({', '.join(presets.NAMES)}), or the path of a .json file"
        )
    with reporting(InvalidLossScaleError, "cannot read the file"):
        content = read_file(text)
    with reporting(InvalidLossScaleError, "the file is not JSON", RecursionError, ValueError):
        config = parse_json(content)
    if not isinstance(config, dict):
        raise InvalidLossScaleError('the file must hold {"class_name": ..., "config": {...}}')
    return config
