"""The test files that a change can reach: `python -m tests.selection --since COMMIT` lists them.

A file of Python depends on the files of the repository that
- it imports, inside a function too, with the packages above; a test file also on the conftest.py of its folders;
- define a name that it uses: the table of graphscale/__init__.py gives the module of `gs.scale`;
- its texts name: a module (`-m tests.replicas.programs.ending`), a file, or a folder and the suffix of its files;
- are commands of graphscale whose names are words of its texts, if it depends on the command line.

Any other file is read by the modules of its folder, and by those that name it so. In doubt a file depends on too much.
A new release of an installed package is no change of a file: a run of everything tries it.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import functools
import itertools
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
# The file with the commit at which everything passed.
PASSED = ".ci/passed"
# Changes that reach all tests: what every engine asks, and the environments of the tests.
EVERYTHING = ("graphscale/operators/", "graphscale/flow/", "pyproject.toml", "noxfile.py", ".ci/run")
# Tests of what all files say, and of code that stands in pages: any change reaches them.
ALWAYS = ("tests/project/", "tests/examples/test_notebook.py")
# Folders of programs, which import each other without the folder's name.
PROGRAMS = ("benchmarks", "docs", "docs/examples")
PACKAGE, COMMAND_LINE = "graphscale", "graphscale.cli"
# The names of the command line that lead to all commands.
ALL_COMMANDS = {"COMMANDS", "load_command", "make_command", "make_group"}
_ANY = "\0"  # in a text: what is computed; last in a dotted name: each module and name of a package
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?:\.\0)?")


class _Paths:
    """Paths of the file system that texts name.

    Attributes:
        names: names of files, without their folders.
        folders: folders, from the repository's root on.
        suffixes: suffixes of files whose names are computed, or match a pattern.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        paths = [word.split("/") for text in texts for word in re.split(r"[\s'\"(),=`]+", text) if word]
        self.names = {parts[-1] for parts in paths}
        self.suffixes = {match[1] for name in self.names if (match := re.search(r"(?:^|[*\0])(\.\w+)$", name))}
        self.folders = {
            "/".join(itertools.takewhile(re.compile(r"[\w-]+").fullmatch, parts))
            for parts in paths
            if not re.fullmatch(r"[\w-]+\.\w+", parts[-1])
        }

    def have_folder_of(self, path: str) -> bool:
        """Return whether a folder above a file is named; for a file at the root, whether a pattern stands alone."""
        above = [place.as_posix() for place in PurePosixPath(path).parents]
        return not self.folders.isdisjoint(above[:-1] or [""])


class _Reader(ast.NodeVisitor):
    """Names in a file of Python.

    Attributes:
        names: dotted names of modules, and of what they define.
        texts: the texts of its code.
        paths: the paths in the texts; nothing for the package, which reads the files of its folders alone.
    """

    def __init__(self, path: str, source: str) -> None:
        self.names: set[str] = set()
        self.texts: set[str] = set()
        self._module = module_name(path)
        self._above = self._module if path.endswith("__init__.py") else self._module.rpartition(".")[0]
        self._in_package = path.startswith(f"{PACKAGE}/")
        self._aliases: dict[str, str] = {}
        self.visit(ast.parse(source))
        self.paths = _Paths(() if self._in_package else self.texts)

    def visit_If(self, node: ast.If) -> None:
        """Skip imports for type checkers."""
        typing = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for each in node.orelse if typing else [node.test, *node.body, *node.orelse]:
            self.visit(each)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Skip a module's own `__getattr__`: its imports belong to the files that use the names."""
        if node.name != "__getattr__" or len(node.args.args) > 1:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.names.add(alias.name)
            bound = alias.name if alias.asname else alias.name.partition(".")[0]
            self._aliases[alias.asname or bound] = bound

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        above = self._above.split(".")[: 1 - node.level or None] if node.level else []
        origin = ".".join([*above, *filter(None, [node.module])])
        for alias in node.names:
            name = f"{origin}.{_ANY if alias.name == '*' else alias.name}"
            self.names.add(name)
            self._aliases[alias.asname or alias.name] = name

    def visit_Name(self, node: ast.Name) -> None:
        """Note a module that is used as a value, as in `getattr(gs, name)`: any name of it."""
        if node.id in self._aliases:
            self.names.add(f"{self._aliases[node.id]}.{_ANY}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if (name := self._dotted(node)) is None:
            self.generic_visit(node)
        else:
            self.names.add(name)

    def _dotted(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Attribute):
            above = self._dotted(node.value)
            return above and f"{above}.{node.attr}"
        return self._aliases.get(node.id) if isinstance(node, ast.Name) else None

    def visit_Expr(self, node: ast.Expr) -> None:
        """Skip docstrings."""
        if not isinstance(node.value, ast.Constant):
            self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._read_text(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._read_text(self._render(node))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Note imports of a module whose name is computed, except commands."""
        self.generic_visit(node)
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if called == "import_module" and isinstance(node.args[0], ast.JoinedStr) and self._module != COMMAND_LINE:
            self.names.add(self._render(node.args[0]))

    def _render(self, node: ast.expr) -> str:
        """Return a text; `{__name__}` and `{module.__name__}` in it are known."""
        match node:
            case ast.JoinedStr(values=values):
                return "".join(map(self._render, values))
            case ast.Constant(value=value):
                return str(value)
            case ast.FormattedValue(value=ast.Name(id="__name__")):
                return self._module
            case ast.FormattedValue(value=ast.Attribute(value=module, attr="__name__")):
                return self._dotted(module) or _ANY
        return _ANY

    def _read_text(self, text: str) -> None:
        self.texts.add(text)
        if self._in_package:  # whose texts are messages, and keys of metadata such as graphscale.state
            return
        self.names.update(_DOTTED.findall(text))
        if text == PACKAGE or f"-m {PACKAGE}" in text:
            self.names.add(f"{PACKAGE}.__main__")
        if "import graphscale as gs" in text:
            self.names.update(f"{PACKAGE}.{name}" for name in re.findall(r"\bgs\.(\w+)", text))
        for module, names in re.findall(r"from ([\w.]+) import ([\w, ]+)", text):
            self.names.update(f"{module}.{name.strip()}" for name in names.split(","))


class Tree:
    """The files of the repository, and what each depends on.

    Attributes:
        files: all paths, those of deleted files among them.
        tests: the files that pytest collects.
    """

    def __init__(self, files: Iterable[str], root: Path = ROOT) -> None:
        self.files, self._root = frozenset(files), root
        self.tests = frozenset(filter(_is_test, self.files))
        self._modules = {module_name(path): path for path in self.files if path.endswith(".py")}
        self._by_name = collections.defaultdict(list)
        for path in self._modules.values():
            self._by_name[PurePosixPath(path).name].append(path)
        self._lazy = self._read_lazy_table()

    @functools.cache  # noqa: B019
    def source(self, path: str) -> str:
        """Return the text of a file; that of a deleted one is empty."""
        place = self._root / path
        return place.read_text(encoding="utf-8") if place.exists() else ""

    @functools.cache  # noqa: B019
    def _read(self, path: str) -> _Reader:
        return _Reader(path, self.source(path))

    def _read_lazy_table(self) -> dict[str, str]:
        """Return the modules of the names that the package imports on first use."""
        for node in ast.parse(self.source(f"{PACKAGE}/__init__.py")).body:
            match node:
                case ast.Assign(targets=[ast.Name(id="_MODULES")], value=value):
                    table: dict[str, tuple[str, ...]] = ast.literal_eval(value)
                    return {name: f"{PACKAGE}.{module}" for module, names in table.items() for name in names}
        return {}

    def _resolve(self, name: str) -> Iterator[str]:
        """Yield the files of a dotted name: its packages and its module, or the module that defines it."""
        parts = name.split(".")
        for count, part in enumerate(parts):
            above, whole = ".".join(parts[:count]), ".".join(parts[: count + 1])
            if whole in self._modules:
                yield self._modules[whole]
            elif above == PACKAGE and part in self._lazy:
                yield from self._resolve(self._lazy[part])
            elif part == _ANY and above in self._modules:
                yield from (path for module, path in self._modules.items() if module.rpartition(".")[0] == above)
                for module in self._lazy.values() if above == PACKAGE else ():
                    yield from self._resolve(module)

    @functools.cache  # noqa: B019
    def dependencies(self, path: str) -> frozenset[str]:
        """Return the files that a file of Python depends on by itself."""
        reader, folder = self._read(path), PurePosixPath(path).parent
        found: set[str] = set()
        beside = () if path.startswith(f"{PACKAGE}/") else [place.replace("/", ".") for place in PROGRAMS]
        for name in reader.names:
            for each in (name, *(f"{place}.{name}" for place in beside)):
                found.update(self._resolve(each))
        for name in reader.paths.names & self._by_name.keys():
            found.update(self._by_name[name])
        if ".py" in reader.paths.suffixes:
            found.update(filter(reader.paths.have_folder_of, self._modules.values()))
        for above in (folder, *folder.parents):
            found.add((above / "__init__.py").as_posix())
            if _is_test(path):
                found.add((above / "conftest.py").as_posix())
        return frozenset(found & self.files - {path})

    @functools.cache  # noqa: B019
    def reach(self, path: str) -> frozenset[str]:
        """Return a file of Python, and all that it depends on."""
        reached: set[str] = set()
        left = {path}
        while left:
            reached |= left
            left = {each for one in left for each in self.dependencies(one)} - reached
            if not left and self._modules.get(COMMAND_LINE) in reached:
                left = self._named_commands(reached) - reached
        return frozenset(reached)

    def _named_commands(self, reached: Iterable[str]) -> set[str]:
        """Return the commands that files outside the package name, or all if one of them goes through all."""
        commands = {
            module.rpartition(".")[2].replace("_", "-"): path
            for module, path in self._modules.items()
            if module.rpartition(".")[0] == COMMAND_LINE
        }
        readers = [self._read(path) for path in reached if not path.startswith(f"{PACKAGE}/")]
        if any(f"{COMMAND_LINE}.{name}" in reader.names for reader in readers for name in (*ALL_COMMANDS, _ANY)):
            return set(commands.values())
        texts = (text for reader in readers for text in reader.texts)
        words = {word for text in texts for word in re.findall(r"[a-z]+(?:-[a-z]+)*", text)}
        return {commands[word] for word in words & commands.keys()}

    def readers(self, path: str) -> Iterator[str]:
        """Yield the modules that read a file which is no module."""
        place = PurePosixPath(path)
        folders = {PurePosixPath(each).parent for each in self._modules.values()}
        owner = next((above for above in place.parents if above in folders), None)
        for each in self._modules.values():
            paths = self._read(each).paths
            # Who names a folder reads its data; its pages, if a suffix says so.
            by_suffix = place.suffix in paths.suffixes or (place.suffix != ".md" and len(place.parts) > 1)
            by_folder = by_suffix and paths.have_folder_of(path)
            if PurePosixPath(each).parent == owner or place.name in paths.names or by_folder:
                yield each


@dataclasses.dataclass(frozen=True)
class Selection:
    """The test files that a change can reach.

    Attributes:
        tree: all files.
        tests: these test files.
        reason: why these.
    """

    tree: Tree
    tests: frozenset[str]
    reason: str

    def marked(self, mark: str) -> frozenset[str]:
        """Return the test files that have a mark, or use a module of the tests that has it."""
        marking = {
            path
            for path in self.tree.files
            if path.startswith("tests/") and path.endswith(".py") and f"mark.{mark}" in self.tree.source(path)
        }
        helpers = marking - self.tree.tests
        return frozenset(
            path for path in self.tests if path in marking or not helpers.isdisjoint(self.tree.reach(path))
        )


def module_name(path: str) -> str:
    """Return the name by which Python imports a file."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _is_test(path: str) -> bool:
    return path.startswith("tests/") and PurePosixPath(path).match("test_*.py")


def select(changed: Collection[str] | None, tree: Tree) -> Selection:
    """Select the test files that changed files can reach; all, if the changes are unknown."""
    if changed is None:
        return Selection(tree, tree.tests, "no known commit at which everything passed")
    if everywhere := sorted(path for path in changed if path.startswith(EVERYTHING)):
        return Selection(tree, tree.tests, f"everything depends on {everywhere[0]}")
    modules = {path for path in changed if path.endswith(".py")}
    modules.update(reader for path in {*changed} - modules for reader in tree.readers(path))
    tests = {path for path in tree.tests if path.startswith(ALWAYS) or not modules.isdisjoint(tree.reach(path))}
    count = "1 changed file" if len(changed) == 1 else f"{len(changed)} changed files"
    return Selection(tree, frozenset(tests if changed else ()), count)


def _git(*words: str) -> set[str] | None:
    """Return the files that git lists; None if it does not know the commit."""
    done = subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True, check=False)
    return None if done.returncode else {name for name in done.stdout.split("\0") if name}


def select_since(commit: str) -> Selection:
    """Select the test files that the changes since a commit can reach, those in the working tree among them."""
    changed = _git("diff", "-z", "--name-only", "--no-renames", commit, "--") if commit else None
    new = _git("ls-files", "-z", "--others", "--exclude-standard") or set()
    if changed is not None:
        changed = (changed | new) - {PASSED}
    return select(changed, Tree((_git("ls-files", "-z") or set()) | new | (changed or set())))


def main() -> None:
    """List the selected test files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", required=True, metavar="COMMIT")
    selection = select_since(parser.parse_args().since)
    print(*sorted(selection.tests), sep="\n")
    print(f"{len(selection.tests)} of {len(selection.tree.tests)} test files: {selection.reason}", file=sys.stderr)


if __name__ == "__main__":
    main()
