"""The selection of test files: what each kind of change reaches, in small trees and in this one."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.selection import EVERYTHING, Tree, select, select_since

pytestmark = pytest.mark.static

PACKAGE = {
    "graphscale/__init__.py": """
        from graphscale import errors
        _MODULES = {"pipeline": ("scale", "inspect"), "session": ("Session",)}
        def __getattr__(name):
            return getattr(importlib.import_module(f"graphscale.{name}"), name)
        """,
    "graphscale/errors.py": "",
    "graphscale/pipeline.py": "from graphscale.passes import one",
    "graphscale/session/__init__.py": "from .carried import Carried",
    "graphscale/session/carried.py": "",
    "graphscale/passes/__init__.py": "",
    "graphscale/passes/one.py": "",
    "graphscale/__main__.py": "from graphscale.cli import main",
    "graphscale/cli/__init__.py": """
        def load_command(name):
            return importlib.import_module(f"{__name__}.{name}")
        """,
    "graphscale/cli/lint.py": "KEY = 'graphscale.session'",
    "graphscale/cli/train_step.py": "",
    "tests/__init__.py": "",
    "tests/conftest.py": "",
}


class Files:
    """A tree of a few files."""

    def __init__(self, folder: Path, /, **sources: str) -> None:
        self.folder, self.files = folder, dict.fromkeys(PACKAGE, "")
        for name, source in (
            PACKAGE | {f"tests/{name}/test_it.py": source for name, source in sources.items()}
        ).items():
            self.write(name, source)

    def write(self, name: str, source: str = "") -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        self.files[name] = source

    def select(self, *changed: str) -> set[str]:
        """The names of the tests that a change of these files reaches."""
        chosen = select({*changed}, Tree({*self.files, *changed}, self.folder)).tests
        return {name.split("/")[1] for name in chosen}


def test_imports_reach_modules_their_packages_and_what_these_import(tmp_path: Path) -> None:
    files = Files(
        tmp_path,
        above="from graphscale.pipeline import scale",
        inside="def test():\n    import graphscale.pipeline",
        package="from graphscale import passes",
        relative="from .helper import help",
        typing="if TYPE_CHECKING:\n    from graphscale.passes import one",
        none="",
    )
    files.write("tests/relative/helper.py", "import graphscale.session as s")
    assert files.select("graphscale/passes/one.py") == {"above", "inside"}
    assert files.select("graphscale/passes/__init__.py") == {"above", "inside", "package"}
    assert files.select("graphscale/session/carried.py") == {"relative"}
    assert files.select("graphscale/errors.py") == {"above", "inside", "package", "relative"}
    assert files.select("tests/relative/conftest.py", "tests/none/test_it.py") == {"relative", "none"}
    assert len(files.select("tests/conftest.py")) == 6


def test_names_of_the_package_are_in_the_modules_of_its_table(tmp_path: Path) -> None:
    files = Files(
        tmp_path,
        attribute="import graphscale as gs\ngs.scale(1)",
        imported="from graphscale import Session",
        any="import graphscale as gs\ngetattr(gs, name)",
        code="run('import graphscale as gs; gs.Session()')",
        errors="import graphscale as gs\ngs.errors",
    )
    assert files.select("graphscale/pipeline.py") == {"attribute", "any"}
    assert files.select("graphscale/session/carried.py") == {"imported", "any", "code"}
    assert len(files.select("graphscale/errors.py")) == 5


def test_a_deleted_module_reaches_those_that_import_it(tmp_path: Path) -> None:
    files = Files(tmp_path, gone="from graphscale.passes import two", other="from graphscale.passes import one")
    assert files.select("graphscale/passes/two.py") == {"gone"}


def test_texts_name_modules(tmp_path: Path) -> None:
    files = Files(
        tmp_path,
        process="COMMAND = ('-m', 'tests.process.program')",
        computed="COMMAND = ('-m', f'tests.process.{name}')",
        patched="patch('graphscale.session.carried.Carried')",
        docstring='"""As graphscale.session.carried does."""',
    )
    files.write("tests/process/__init__.py")
    files.write("tests/process/program.py", "from graphscale import scale")
    assert (
        files.select("tests/process/program.py") == files.select("graphscale/passes/one.py") == {"process", "computed"}
    )
    assert files.select("graphscale/session/carried.py") == {"patched"}, "nor is a key of metadata a module"


def test_a_test_of_the_command_line_reaches_the_commands_that_it_names(tmp_path: Path) -> None:
    files = Files(
        tmp_path,
        process="run('-m', 'graphscale', 'train-step', '--help')",
        called="from graphscale.cli import main\nmain('lint x.onnx')",
        all="from graphscale.cli import COMMANDS",
        word="SAID = 'lint'",
    )
    assert files.select("graphscale/cli/__init__.py") == {"process", "called", "all"}
    assert files.select("graphscale/cli/train_step.py") == {"process", "all"}
    assert files.select("graphscale/cli/lint.py") == {"called", "all"}
    assert files.select("graphscale/session/__init__.py") == set()


def test_other_files_reach_the_modules_that_read_them(tmp_path: Path) -> None:
    files = Files(
        tmp_path,
        beside="",
        named="ROOT / 'tests/beside/golden/a.txt'",
        below="(ROOT / 'models').glob('*/*.onnx')",
        pages="for page in (ROOT / 'docs').rglob('*.md'): page",
        script="runpy.run_path('docs/examples/step.py')",
        sources="(ROOT / 'graphscale').rglob('*.py')",
    )
    files.write("docs/examples/step.py", "from graphscale import Session")
    assert files.select("tests/beside/golden/a.txt") == {"beside", "named"}
    assert files.select("tests/beside/golden/b.txt") == {"beside"}
    assert files.select("models/zoo/steps.json") == {"below"}
    assert files.select("models/README.md") == files.select(".gitignore") == set()
    assert files.select("docs/index.md") == {"pages"}
    assert files.select("docs/examples/step.py") == {"script"}
    assert files.select("graphscale/session/carried.py") == {"script", "sources"}
    files.write("graphscale/passes/page.css")
    assert files.select("graphscale/passes/page.css") == {"sources"}


@pytest.mark.parametrize("place", EVERYTHING)
def test_some_changes_reach_everything(place: str, tmp_path: Path) -> None:
    files = Files(tmp_path, one="", two="")
    assert files.select(f"{place}table.py" if place.endswith("/") else place) == {"one", "two"}
    assert files.select() == set()


def test_without_a_known_commit_everything_is_selected(tmp_path: Path) -> None:
    tree = Tree(Files(tmp_path, one="", two="").files, tmp_path)
    assert select(None, tree).tests == tree.tests
    for commit in ("", "0" * 40):
        selection = select_since(commit)
        assert selection.tests == selection.tree.tests
        assert selection.reason.startswith("no known commit")


def test_marks_are_those_of_a_test_and_its_helpers(tmp_path: Path) -> None:
    files = Files(tmp_path, own="@pytest.mark.gpu\ndef test(): ...", helped="from tests.helper import needs", other="")
    files.write("tests/helper.py", "needs = pytest.mark.gpu")
    marked = select(None, Tree(files.files, tmp_path)).marked("gpu")
    assert marked == {"tests/own/test_it.py", "tests/helped/test_it.py"}


@pytest.fixture(scope="module")
def tree() -> Tree:
    folders = ("graphscale", "tests", "docs", "benchmarks", "fuzz")
    return Tree(path.relative_to(ROOT).as_posix() for folder in folders for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize(
    ("module", "reaching", "others"),
    [
        ("replicas/cut.py", "replicas/test_cut.py", "policy/test_loss_scale.py"),
        ("policy/presets.py", "policy/test_presets.py", ""),
        ("cli/split.py", "replicas/test_split.py", "cli/test_inspect.py"),
        ("exporters/jax/contractions.py", "exporters/test_jax_rules.py", "exporters/test_keras_steps.py"),
        ("checks/linting/flow.py", "checks/linting/test_pages.py", "lowering/test_rates.py"),
        ("session/state_file.py", "session/test_state.py", ""),
    ],
)
def test_tests_of_this_repository(module: str, reaching: str, others: str, tree: Tree) -> None:
    assert f"graphscale/{module}" in tree.files
    assert f"graphscale/{module}" in tree.reach(f"tests/{reaching}")
    if others:
        assert f"graphscale/{module}" not in tree.reach(f"tests/{others}")
