"""Rules of writing, and the texts of the project that they hold for: docstrings, comments, messages and pages."""

from __future__ import annotations

import ast
import dataclasses
import functools
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = ("graphscale", "benchmarks", "models", "fuzz", "tests", "docs", "examples")
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs", "benchmarks", "models", "examples")
LONGEST_SENTENCE = 50  # words
LONG = "long sentence"

_HELP = ("option", "argument", "output_path")  # functions of the command line that take a help text
_FENCES = re.compile(r"^```.*?^```|^<!--.*?-->$|^ {4,}.*$|^\|.*\|$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"``.+?``|`[^`\n]+`")
_LINKS = re.compile(r"\]\([^)]*\)|<[^>\n]+>|https?://\S+")
_BREAK = re.compile(r"(?<=[.!?;])\s+|\n\s*\n|\n\s*[-*] |\n\s*\d+\. |\n(?=\s*\w+: )|\n#+ ")


@dataclasses.dataclass(frozen=True)
class Text:
    """A piece of text.

    Attributes:
        kind: `docstring`, `comment`, `message` or `page`.
        place: its file, with a line or a name.
        text: the text, without code.
    """

    kind: str
    place: str
    text: str

    def sentences(self) -> Iterator[str]:
        for sentence in _BREAK.split(self.text):
            yield " ".join(sentence.split())


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule of writing.

    Attributes:
        name: the name in failures and exceptions.
        pattern: the wrong words, searched in each sentence.
        advice: the right ones.
        bad: a sentence with a match.
        good: the same sentence without.
        kinds: the kinds of text that it holds for.
        under: the beginning of the places that it holds for.
    """

    name: str
    pattern: str
    advice: str
    bad: str
    good: str
    kinds: Sequence[str] = ("docstring", "comment", "message", "page")
    under: str = ""

    def covers(self, text: Text) -> bool:
        return text.kind in self.kinds and text.place.startswith(self.under)

    def finds(self, sentence: str) -> re.Match[str] | None:
        return re.search(self.pattern, sentence)


_TABLE = tomllib.loads(Path(__file__).with_name("writing_rules.toml").read_text(encoding="utf-8"))["rule"]
RULES = tuple(Rule(**row) for row in _TABLE)

# A text may break a rule here: (place, rule), and the reason.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("docs/project/zoo.md", "two spellings"): "written by models/zoo: the names of its steps",
    ("docs/project/zoo.md", LONG): "written by models/zoo: lists of its steps",
}


def count_words(sentence: str) -> int:
    """Count the words of a sentence, without code."""
    return len(re.findall(r"[A-Za-z]{2,}", sentence.replace("`code`", "")))


def texts() -> Iterator[Text]:
    """Find all texts of the project."""
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "node_modules" not in path.parts:
                yield from _texts_of_module(path)
    for name in PAGES:
        for path in [ROOT / name] if name.endswith(".md") else sorted((ROOT / name).rglob("*.md")):
            if "node_modules" not in path.parts:
                yield Text("page", str(path.relative_to(ROOT)), _without_code(path.read_text("utf-8")))


def _without_code(text: str) -> str:
    return _LINKS.sub("]", _CODE.sub("`code`", _FENCES.sub("\n\n", text)))


@functools.cache
def _texts_of_module(path: Path) -> tuple[Text, ...]:
    source = path.read_text(encoding="utf-8")
    place = str(path.relative_to(ROOT))
    found = []
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            name = getattr(node, "name", "module")
            found.append(Text("docstring", f"{place}:{name}", _CODE.sub("`code`", _examples_cut(text))))
        elif place.startswith("graphscale/") and (
            isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and getattr(node.func, "id", "") in _HELP)
        ):
            found.append(Text("message", f"{place}:{node.lineno}", " ".join(_strings(node))))
    comments = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT]
    last = -1
    lines: list[str] = []
    for token in comments:
        row = token.start[0]
        follows_code = bool(token.line[: token.start[1]].strip())
        if (row != last + 1 or follows_code) and lines:
            found.append(Text("comment", f"{place}:{last}", _CODE.sub("`code`", "\n".join(lines))))
            lines = []
        lines.append(token.string.lstrip("# "))
        last = -1 if follows_code else row
    if lines:
        found.append(Text("comment", f"{place}:{last}", _CODE.sub("`code`", "\n".join(lines))))
    return tuple(found)


def _examples_cut(text: str) -> str:
    """Leave out indented blocks, and the diagrams of passes."""
    text = re.sub(r"^ {8,}.*$", "", text, flags=re.MULTILINE)
    return re.sub(r"^(Before|After): .*?(?=\n\n|\Z)", "", text, flags=re.MULTILINE | re.DOTALL)


def _strings(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value
