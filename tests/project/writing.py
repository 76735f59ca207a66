"""Rules of writing, and the texts of the project that they hold for: docstrings, comments, messages and pages."""

from __future__ import annotations

import ast
import dataclasses
import functools
import io
import re
import tokenize
from collections.abc import Iterator
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
    kinds: tuple[str, ...] = ("docstring", "comment", "message", "page")
    under: str = ""

    def covers(self, text: Text) -> bool:
        return text.kind in self.kinds and text.place.startswith(self.under)

    def finds(self, sentence: str) -> re.Match[str] | None:
        return re.search(self.pattern, sentence)


RULES = (
    Rule(
        "clause as subject",
        r"^(What|Whatever|Whoever)\b(?! is (?:a|the)\b[^.]*\?$)[^?]*$",
        "name the subject",
        "What is left over must be a piece that a pass inserted.",
        "Every remaining node must be a piece that a pass inserted.",
    ),
    Rule(
        "clause as parameter",
        r"^\w+: (what|how many|how often|how much|how|which|where|when)\b",
        "a noun: the name, the number, the place",
        "steps: how many.",
        "steps: number of steps.",
        kinds=("docstring",),
    ),
    Rule("shall", r"\b[Ss]hall\b", "must, or will", "The scale shall fall.", "The scale must fall."),
    Rule("likewise", r"\b[Ll]ikewise\b", "so, too", "Moments likewise.", "Moments, too."),
    Rule("of which", r"\bof which\b", "a second sentence", "A step of which a part runs.", "A part of a step runs."),
    Rule(
        "as it is",
        r"\bas (it is|they are)\b(?=$|[.,;:)])",
        "unchanged",
        "The rest stays as it is.",
        "The rest is unchanged.",
    ),
    Rule("as it was", r"\bas (it|they) (was|were)\b", "unchanged", "The file is as it was.", "The file is unchanged."),
    Rule(
        "told",
        r"\b(is|are|was|be) told\b",
        "known from, reported, named",
        "It is told by its type.",
        "Its type shows it.",
    ),
    Rule(
        "takes for",
        r"\b[Tt]ak(es?|en|ing) (\w+ ){1,4}for (a|an|the)\b",
        "mistakes, treats as",
        "It takes it for a loss.",
        "It treats it as a loss.",
    ),
    Rule("by the clock", r"\bby the clock\b", "in wall time", "Ten times by the clock.", "Ten times the wall time."),
    Rule("says of", r"\b(say|says|said) of\b", "states about", "The file says of its roles.", "The roles in the file."),
    Rule(
        "clause as object",
        r"\b(of|from|for|with|by|to|in|on|at|as|than|into|behind|and|or|but|not|[Rr]eturn|[Cc]ompute|[Ff]ind) what\b",
        "name the object",
        "Return what the policy counts.",
        "Return the counts of the policy.",
        kinds=("docstring", "comment", "message"),
        under="graphscale/",
    ),
    Rule(
        "hold against",
        r"\b([Hh]eld|[Hh]old(s|ing)?) (?!even\b)(\w+ ){0,3}against\b",
        "compare with",
        "Hold the file against its original.",
        "Compare the file with its original.",
    ),
    Rule(
        "looked at",
        r"\b(is|are|was|were|be) looked (at|into|through)\b",
        "is read, is checked",
        "Each node is looked at.",
        "Each node is checked.",
    ),
    Rule("way round", r"\bother way round\b", "the reverse", "back: the other way round.", "back: the inverse."),
    Rule(
        "wants",
        r"\b([Ii]t|which|that) wants?\b",
        "needs, expects",
        "It wants to know the scale.",
        "It needs the scale.",
    ),
    Rule("for ever", r"\bfor ever\b", "forever", "They wait for ever.", "They wait forever."),
    Rule("nobody", r"\b[Nn]obody\b", "name it, or use the passive", "Nobody reads it.", "It has no readers."),
    Rule(
        "one a",
        r"\b(one|two|three) a (file|module|line|place|row|step)\b",
        "per",
        "A pass, one a file.",
        "One per file.",
    ),
    Rule("that which", r"\b[Tt]hat which\b", "a noun", "That which remains.", "The remaining nodes."),
    Rule(
        "doubled word",
        r"(?<!-)\b(?!that\b|had\b|long\b|graphscale\b)([a-z]{2,}) \1\b",
        "once",
        "Divide the the gradient.",
        "Divide the gradient.",
    ),
    Rule("it's", r"\bit's\b", "it is, or its", "it's state", "its state"),
    Rule("curly quotes", "[\u2018\u2019\u201c\u201d]", "straight quotes", "\u201ca\u201d", '"a"'),
    Rule(
        "two spellings",
        r"\b([Bb]ehavior|[Nn]ormalis|[Oo]ptimis(?!t)|[Ii]nitialis|[Rr]ecognis|[Ss]erialis|[Nn]eighbor|[Ff]avor|[Aa]nalyz|[Ll]abeled|artefact)",
        "the spelling of the other pages: behaviour, normalize, optimize, initialize, recognize, neighbour, analyse",
        "Normalise the optimised behavior.",
        "Normalize the optimized behaviour.",
    ),
    Rule(
        "another word of the glossary",
        r"(?i)\b(upstream gradient|adjoint|descal\w+|overflow check|finite(ness)? test|persistent state)s?\b",
        "cotangent, unscale, finite check, carried state, next value",
        "The upstream gradient is descaled.",
        "The cotangent is unscaled.",
    ),
)

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
