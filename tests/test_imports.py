from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import statetrain

ROOT = Path(statetrain.__file__).resolve().parent

# A module imports only what stands above it here. A new file gets its place in this list.
ORDER = (
    "errors",
    "loop",
    "arguments",
    "lanes",
    "diagram",
    "run",
    "callbacks",
    "walk",
    "machine",
    "persist",
    "persist.randomness",
    "persist.parts",
    "persist.snapshot",
    "persist.tensors",
    "persist.values",
    "persist.registry",
    "persist.codec",
    "persist.layout",
    "persist.plan",
    "persist.chunks",
    "persist.container",
    "persist.arena",
    "persist.writer",
    "persist.record",
    "persist.attributes",
    "persist.compare",
    "persist.failures",
    "persist.local",
    "persist.remote",
    "persist.store",
    "persist.keep",
    "persist.mirror",
    "cluster",
    "persist.checkpoint",
    "cluster.preempt",
    "cluster.determinism",
    "data",
    "data.order",
    "data.memory",
    "data.indexed",
    "data.sources",
    "data.loader",
    "data.device",
    "exactness",
    "supervised",
    "supervised.batches",
    "supervised.means",
    "supervised.optimizers",
    "supervised.passes",
    "supervised.predictions",
    "supervised.module",
    "supervised.hooks",
    "supervised.setup",
    "supervised.loop",
    "supervised.evaluation",
    "loggers",
    "loggers.csv",
    "pace",
    "progress",
    "summary",
    "fitting",
    "session",
    "trainer",
    "",  # statetrain/__init__.py: the public names
    "cli",
    "cli.target",
    "cli.draw",
    "cli.child",
    "cli.run",
    "cli.text",
    "cli.tree",
    "cli.facts",
    "cli.stored",
    "cli.ls",
    "cli.show",
    "cli.verify",
    "cli.elements",
    "cli.diff",
    "cli.pin",
    "cli.prune",
    "cli.check_store",
    "cli.cp",
    "cli.weights",
    "cli.statedict",
    "cli.export",
    "cli.import_",
    "cli.main",
)

# Imports of what stands below, made in a function when it is called.
LATE = {("loop", "diagram")}  # notebooks ask a loop for its picture

# What a module must not know although it stands above it, or comes from elsewhere.
MUST_NOT_KNOW = {
    "errors": {"torch"},
    "loop": {"torch"},
    "lanes": {"torch"},
    "diagram": {"torch"},
    "run": {"torch", "loop"},
    "callbacks": {"torch"},
    "machine": {"torch"},
    "persist.codec": {"run"},
    "persist.store": {"torch", "run"},
    "persist.checkpoint": {"machine", "callbacks"},
    "cluster.preempt": {"loop", "persist.checkpoint"},
    "data.loader": {"loop", "machine"},
    "cli.verify": {"torch", "run", "cli.target"},
    "cli.elements": {"run", "persist.container"},
    "cli.diff": {"torch", "run", "cli.target"},
    "cli.cp": {"torch", "run", "cli.target"},
    "cli.weights": {"run", "cli.target"},
    "cli.statedict": {"run", "persist.container"},
    "cli.export": {"run", "cli.target"},
    "cli.import_": {"run", "cli.target"},
}

# The one file that imports a foreign package.
HOMES = {
    "transitions": "machine",
    "msgpack": "persist.codec",
    "fsspec": "persist.remote",
    "pygraphviz": "diagram",
    "apex": "plugins.apex",
    "rich": "progress",
    "safetensors": "cli.statedict",
}

# `import statetrain` works without these, and does not wait for them.
NOT_AT_IMPORT = ("apex", "hypothesis", "pygraphviz", "pytest", "rich", "sklearn", "tensorboard")


@dataclass(frozen=True, kw_only=True)
class Import:
    name: str  # of the module as it is known here, or a foreign top-level package
    late: bool


def module_name(file: Path) -> str:
    return (
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").strip(".")
    )


SOURCES = {module_name(file): file.read_text("utf-8") for file in sorted(ROOT.rglob("*.py"))}


def imports(source: str) -> list[Import]:
    return [
        Import(name=_known(name), late=late)
        for name, late in _imported(ast.parse(source), late=False)
    ]


def _imported(tree: ast.AST, *, late: bool) -> Iterator[tuple[str, bool]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from (pair for rest in node.orelse for pair in _imported(rest, late=late))
        elif isinstance(node, ast.Import):
            yield from ((alias.name, late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = "." * node.level + (node.module or "")
            yield from ((f"{here}.{alias.name}", late) for alias in node.names)
        else:
            inside = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _imported(node, late=inside)


def _known(name: str) -> str:
    first, _, rest = name.partition(".")
    if first != "statetrain":
        return first  # "" for a relative import, which is a complaint of its own
    while rest and rest not in ORDER and rest not in SOURCES:
        rest = rest.rpartition(".")[0]
    return rest or "statetrain"


def against_order(module: str, source: str) -> list[str]:
    if module not in ORDER:
        return [f"{module or 'statetrain'} has no place: put it into ORDER in test_imports.py"]
    above = ORDER[: ORDER.index(module)]
    return [
        f"{module} imports {found.name}, which does not stand above it"
        for found in imports(source)
        if (found.name in ORDER or found.name == "statetrain")
        and found.name.replace("statetrain", "") not in above
        and not (found.late and (module, found.name) in LATE)
    ]


def forbidden_knowledge(module: str, source: str) -> list[str]:
    names = {found.name for found in imports(source)}
    return [f"{module} must not know {n}" for n in sorted(names & MUST_NOT_KNOW.get(module, set()))]


def away_from_home(module: str, source: str) -> list[str]:
    return [
        f"{module} imports {found.name}, whose home is {HOMES[found.name]}"
        for found in imports(source)
        if HOMES.get(found.name, module) != module
    ]


def relative(module: str, source: str) -> list[str]:
    return [f"{module} has a relative import" for found in imports(source) if not found.name]


def environment_reads(module: str, source: str) -> list[str]:
    if module.partition(".")[0] == "cluster":
        return []
    names = {"environ", "environb", "getenv", "getenvb"}
    return [
        f"{module} line {node.lineno} reads the environment: only cluster/ does"
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.ImportFrom) and names & {alias.name for alias in node.names})
    ]


def prints(module: str, source: str) -> list[str]:
    if module.partition(".")[0] == "cli":
        return []
    streams = ("sys.stdout", "sys.stderr", "sys.__stdout__", "sys.__stderr__")
    streams = () if module == "progress" else streams  # it draws on the terminal
    return [
        f"{module} line {node.lineno} prints: only cli/ does"
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Name) and node.id == "print")
        or (isinstance(node, ast.Attribute) and ast.unparse(node) in streams)
    ]


Rule = Callable[[str, str], list[str]]
RULES = (
    against_order,
    forbidden_knowledge,
    away_from_home,
    relative,
    environment_reads,
    prints,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_module_keeps_the_rule(rule: Rule) -> None:
    assert [words for module, source in SOURCES.items() for words in rule(module, source)] == []


@pytest.mark.parametrize(
    ("rule", "module", "source", "complaint"),
    [
        (against_order, "loop", "from statetrain.machine import Machine", "loop imports machine"),
        (against_order, "loop", "from statetrain import diagram", "loop imports diagram"),
        (against_order, "run", "import statetrain.trainer", "run imports trainer"),
        (against_order, "run", "def f():\n    import statetrain.trainer", "run imports trainer"),
        (against_order, "run", "import statetrain as st", "run imports statetrain"),
        (against_order, "run", "from statetrain import Loop", "run imports statetrain"),
        (against_order, "cli.draw", "import statetrain.cli.main", "cli.draw imports cli.main"),
        (against_order, "loop", "from statetrain.loop import Loop", "loop imports loop"),
        (against_order, "brand.new", "", "brand.new has no place"),
        (forbidden_knowledge, "machine", "from torch import nn", "machine must not know torch"),
        (
            forbidden_knowledge,
            "persist.checkpoint",
            "if True:\n    from statetrain.callbacks import on",
            "persist.checkpoint must not know callbacks",
        ),
        (away_from_home, "loop", "import transitions.core", "whose home is machine"),
        (away_from_home, "trainer", "def f():\n    import fsspec", "whose home is persist.remote"),
        (away_from_home, "persist.store", "from msgpack import packb", "home is persist.codec"),
        (away_from_home, "cli.draw", "import pygraphviz as p", "whose home is diagram"),
        (away_from_home, "trainer", "from apex import amp", "whose home is plugins.apex"),
        (relative, "loop", "from .errors import LoopError", "loop has a relative import"),
        (relative, "loop", "from . import errors", "loop has a relative import"),
        (environment_reads, "trainer", "import os\nos.environ['RANK']", "trainer line 2 reads"),
        (environment_reads, "trainer", "import os as o\no.getenv('RANK')", "trainer line 2 reads"),
        (environment_reads, "run", "from os import environ", "run line 1 reads"),
        (prints, "trainer", "x = 1\nprint(x)", "trainer line 2 prints"),
        (prints, "trainer", "import sys\nsys.stderr.write('x')", "trainer line 2 prints"),
        (prints, "progress", "x = 1\nprint(x)", "progress line 2 prints"),
    ],
)
def test_a_module_that_breaks_the_rule_is_reported(
    rule: Rule, module: str, source: str, complaint: str
) -> None:
    found = rule(module, source)
    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("rule", "module", "source"),
    [
        (against_order, "run", "from typing import Any\nfrom statetrain.errors import LoopError"),
        (against_order, "loop", "def f():\n    from statetrain import diagram"),
        (
            against_order,
            "loop",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import statetrain.trainer",
        ),
        (against_order, "cli.main", "import statetrain\nfrom statetrain.cli import draw"),
        (away_from_home, "machine", "from transitions.core import Machine"),
        (environment_reads, "cluster.preempt", "import os\nos.environ['RANK']"),
        (prints, "cli.draw", "print('here')"),
        (prints, "trainer", "'print(x)'  # print(x)"),
    ],
)
def test_a_module_that_keeps_the_rule_is_not_reported(rule: Rule, module: str, source: str) -> None:
    assert rule(module, source) == []


def test_the_order_names_every_file_once_and_no_other() -> None:
    assert sorted(ORDER) == sorted(SOURCES)


def test_homes_of_what_is_used_really_import_it() -> None:
    used = {found.name: m for m, source in SOURCES.items() for found in imports(source)}
    built = {package: home for package, home in HOMES.items() if home in SOURCES}
    assert {package: used.get(package) for package in built} == built


def missing_names(module: object) -> list[str]:
    return [name for name in getattr(module, "__all__", ()) if not hasattr(module, name)]


@pytest.mark.parametrize("name", SOURCES, ids=lambda name: name or "statetrain")
def test_every_name_in_all_exists_and_stands_there_once(name: str) -> None:
    module = importlib.import_module(f"statetrain.{name}".rstrip("."))
    assert missing_names(module) == []
    names = list(getattr(module, "__all__", ()))
    assert len(names) == len(set(names))


def test_a_name_in_all_that_does_not_exist_is_reported() -> None:
    class Module:
        __all__ = ("here", "gone")
        here = 1

    assert missing_names(Module) == ["gone"]


def loaded_by(code: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has after running `code`."""
    path = f"import sys; sys.path.insert(0, {str(ROOT.parent)!r}); {code}; "
    command = path + "print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_importing_statetrain_imports_nothing_optional() -> None:
    assert loaded_by("import statetrain") & set(NOT_AT_IMPORT) == set()


def test_an_optional_import_would_be_seen() -> None:
    assert "hypothesis" in loaded_by("import hypothesis")
