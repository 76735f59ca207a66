"""Hooks of MkDocs: the parts of pages that are made from the code, and files of the project as pages.

In a page, `<!-- generated: NAME -->` becomes what the function NAME of `GENERATORS` returns, and
`<!-- include: FILE -->` the content of a Markdown file of the project, its links made to fit, and
`<!-- source: FILE [NAME ...] -->` a program, or functions of one in Python, as code. In the `nav`,
`lint/` stands for the pages of all lint codes.
"""

# ruff: noqa: D103

from __future__ import annotations

import ast
import inspect
import json
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from graphscale import errors
from graphscale.analysis.roles.roles_file import roles_schema
from graphscale.checks.linting.codes import CODES, GROUPS
from graphscale.cli import COMMANDS, load_command
from graphscale.cli.help import by_panel, describe, parameters_of, usage_of
from graphscale.operators import Colour
from graphscale.passes.casting.settings import default_rules
from graphscale.policy import presets
from graphscale.policy.loss_scale import DynamicLossScale
from graphscale.targets import RELEASES, TARGETS, WITHOUT_KERNEL

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

# Where files of the project are to be found on the site.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "benchmarks/RESULTS.md": "project/performance.md",
    "models/README.md": "project/models.md",
}
LANGUAGES = {".py": "python", ".cpp": "cpp", ".js": "js"}
MARKER = re.compile(r"^<!-- (generated|include|source): (.+) -->$", re.MULTILINE)
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def expand(markdown: str, page: str) -> str:
    """Replace the markers of a page; `page` is its path in docs/."""

    def made(match: re.Match[str]) -> str:
        kind, name = match.groups()
        if kind == "generated":
            return GENERATORS[name]()
        return include(name, page) if kind == "include" else source(*name.split())

    return MARKER.sub(made, markdown)


def include(name: str, page: str) -> str:
    """Return a Markdown file of the project, without its title where the page has one of its own."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if (DOCS / page).read_text(encoding="utf-8").startswith("# "):
        text = re.sub(r"^# .*\n", "", text)

    def fitted(match: re.Match[str]) -> str:
        label, link, anchor = match[1], match[2], match[3] or ""
        if "://" in link:
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), link))
        place = PAGES.get(target)
        if target.startswith("docs/") and target.endswith(".md"):
            place = target.removeprefix("docs/")
        if place:
            return f"[{label}]({posixpath.relpath(place, posixpath.dirname(page) or '.')}{anchor})"
        return label if label.startswith("`") else f"`{label}`"

    return LINK.sub(fitted, text)


def source(name: str, *functions: str) -> str:
    """Return a program of the project, or functions and constants of one in Python."""
    text = (ROOT / name).read_text(encoding="utf-8")
    shown = text.rstrip()
    if functions:
        found = dict(_definitions(text))
        shown = "\n\n\n".join(found[function] for function in functions)
    title = name.removeprefix("docs/examples/")
    return f'```{LANGUAGES[posixpath.splitext(name)[1]]} title="{title}"\n{shown}\n```'


def _definitions(text: str) -> Iterator[tuple[str, str]]:
    for node in ast.parse(text).body:
        segment = ast.get_source_segment(text, node) or ""
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            decorators = "".join(f"@{ast.get_source_segment(text, item)}\n" for item in node.decorator_list)
            yield node.name, decorators + segment
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, segment
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield ast.unparse(node.value.func), segment


# --- tables ----------------------------------------------------------------------------------------------------------


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def operators(colour: Colour) -> str:
    """List the operators of one list, by domain; the denied ones by reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for (domain, name), rule in default_rules().items():
        if rule.colour is colour:
            groups.setdefault((rule.reason, domain), []).append(name + ("*" if _is_wide(rule) else ""))
    if colour is not Colour.DENY:
        rows = [[f"`{domain or 'ai.onnx'}`", _codes(names)] for (_, domain), names in sorted(groups.items())]
        return table(["domain", "operators"], rows)
    reasons: dict[str, list[str]] = {}
    for (reason, _), names in groups.items():
        reasons.setdefault(reason, []).extend(names)
    return table(["operators", "why"], [[_codes(sorted(names)), reason] for reason, names in reasons.items()])


def _is_wide(rule: Any) -> bool:
    return bool(rule.wide_inputs or rule.wide_outputs)


def _codes(names: list[str]) -> str:
    return ", ".join(f"`{name.removesuffix('*')}`" + ("\\*" if name.endswith("*") else "") for name in names)


def preset_table() -> str:
    """List the presets with the options that differ from those of DynamicLossScale."""
    policies = {"DynamicLossScale()": DynamicLossScale()}
    policies |= {name: getattr(presets, name)() for name in presets.NAMES}
    columns = ["initial_loss_scale", "increment_period", "min_loss_scale", "max_loss_scale"]
    default = vars(policies["DynamicLossScale()"].rule)
    rows = []
    for name, policy in policies.items():
        rule = vars(policy.rule)
        others = [f"`{key}={rule[key]!r}`" for key in rule if key not in columns and rule[key] != default[key]]
        rows.append([f"`{name}`", *(_number(rule[key]) for key in columns), " ".join(others)])
    return table(["preset", "start", "period", "floor", "ceiling", "other options"], rows)


def _number(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, str):
        return f"`{value}`"
    if value == float(2**127 * (2 - 2**-23)):
        return "largest float32"
    exponent = len(bin(int(value))) - 3
    if value >= 1024 and value == 2**exponent:
        return f"2<sup>{exponent}</sup>"
    return "smallest normal float32" if 0 < value < 1e-30 else f"{value:g}"


def target_table() -> str:
    """List the facts of each target."""
    rows = [
        [
            f"`{target.name}`",
            "`com.microsoft.IsAllFinite`" if target.is_all_finite else "standard operators",
            "written in place" if target.in_place else "inputs and outputs",
            str(target.max_ir_version),
            f"10 to {target.max_opset}",
            "yes" if target.bfloat16 else "no",
            target.runs_on,
        ]
        for target in TARGETS.values()
    ]
    return table(["target", "finite check", "state", "IR version, at most", "opset", "bfloat16", "read off"], rows)


def release_table() -> str:
    """List the newest versions that each release of ONNX Runtime loads."""
    names = [".".join(map(str, release.number)) for release in RELEASES]
    last = [f"{after.number[0]}.{after.number[1] - 1}" for after in RELEASES[1:]] + names[-1:]
    spans = [first if first == end else f"{first} to {end}" for first, end in zip(names, last, strict=True)]
    rows = [[span, str(each.max_opset), str(each.max_ir_version)] for span, each in zip(spans, RELEASES, strict=True)]
    return table(["release", "opset, at most", "IR version, at most"], rows)


def cost_table() -> str:
    """List the medians of the first table of benchmarks/RESULTS.md, without their quartiles."""
    lines = (ROOT / "benchmarks/RESULTS.md").read_text(encoding="utf-8").split("\n\n")
    first = next(part for part in lines if part.startswith("| "))
    return re.sub(r" \([^)|]* to [^)|]*\)", "", first)


def missing_kernels() -> str:
    """List the operators without a CPU kernel, by the opset from which on they have none."""
    groups: dict[int, list[str]] = {}
    for name, opset in WITHOUT_KERNEL.items():
        groups.setdefault(opset, []).append(name)
    rows = [[str(opset), ", ".join(f"`{name}`" for name in sorted(groups[opset]))] for opset in sorted(groups)]
    return table(["from opset", "operators"], rows)


def wide_operators() -> str:
    """List the operators that stay float32 on the CPU in any case."""
    return ", ".join(f"`{name}`" for name in sorted(TARGETS["onnx"].wide_ops))


def option_table() -> str:
    """List the arguments of DynamicLossScale, from its docstring."""
    text = inspect.cleandoc(DynamicLossScale.__doc__ or "").split("Args:\n")[1].split("\n\n")[0]
    said = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", text, re.MULTILINE)
    defaults = inspect.signature(DynamicLossScale).parameters
    rows = [[f"`{name}`", _number(defaults[name].default), _sentence(meaning)] for name, meaning in said]
    assert [name for name, _ in said] == list(defaults)
    return table(["option", "default", "meaning"], rows)


def _sentence(text: str) -> str:
    text = re.sub(r"2\*\*(\d+)", r"2<sup>\1</sup>", " ".join(text.split()))
    return re.sub(r'"(\w+)"', r"`\1`", text[0].upper() + text[1:])


# --- command line ----------------------------------------------------------------------------------------------------


def command_line() -> str:
    """Every command with its arguments and options, read off the annotations that typer reads."""
    return "\n\n".join(_command(load_command(name)) for name in COMMANDS)


def _command(function: Any) -> str:
    parameters = list(parameters_of(function))
    tables = []
    for title, entries in by_panel(parameters).items():
        rows = []
        for each in entries:
            names = ", ".join(f"`{name}`" for name in each.names) + (f" `{each.metavar}`" if each.metavar else "")
            rows.append([names, each.help.replace("Required.", "**Required.**")])
        tables.append(f"**{title}**\n\n{table(['', ''], rows)}")
    paragraphs, examples = describe(function)
    name = function.__name__.replace("_", "-")
    code = [f"```text\n{usage_of(function, parameters)}\n```", "\n".join(["```bash", *examples, "```"])]
    return "\n\n".join([f"## {name}", *paragraphs, *code, *tables])


def error_table() -> str:
    """List the classes of errors, with the first sentence of each docstring."""
    found = [kind for _, kind in sorted(vars(errors).items()) if isinstance(kind, type)]
    rows = [[f"`{kind.__name__}`", (kind.__doc__ or "").split("\n\n")[0].replace("\n    ", " ")] for kind in found]
    return table(["class", "when"], rows)


GENERATORS: dict[str, Callable[[], str]] = {
    "command-line": command_line,
    "cost": cost_table,
    "dynamic-options": option_table,
    "errors": error_table,
    "operators-allow": lambda: operators(Colour.ALLOW),
    "operators-clear": lambda: operators(Colour.CLEAR),
    "operators-deny": lambda: operators(Colour.DENY),
    "operators-infer": lambda: operators(Colour.INFER),
    "operators-wide": wide_operators,
    "missing-kernels": missing_kernels,
    "presets": preset_table,
    "releases": release_table,
    "roles-schema": lambda: f"```json\n{json.dumps(roles_schema(), indent=2)}\n```",
    "targets": target_table,
}


# --- what MkDocs calls ----------------------------------------------------------------------------------------------


def spelled_out(nav: list[Any]) -> list[Any]:
    """Return the nav with `lint/` replaced by the pages of all codes."""
    return [{title: lint_pages() if entry == "lint/" else entry for title, entry in item.items()} for item in nav]


def lint_pages() -> list[Any]:
    pages: dict[str, list[dict[str, str]]] = {title: [] for title in GROUPS.values()}
    for code in CODES.values():
        pages[GROUPS[code.code[2]]].append({f"{code.code} {code.name}": code.page})
    return ["lint/index.md", *({title: entries} for title, entries in pages.items())]


def on_config(config: Any) -> None:
    config["nav"] = spelled_out(config["nav"])


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return expand(markdown, page.file.src_uri)
