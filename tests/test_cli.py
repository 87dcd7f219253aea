from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import statetrain as st
from statetrain.cli.main import main

ROOT = Path(__file__).resolve().parent.parent

SCRIPT = """\
from __future__ import annotations

from dataclasses import dataclass

import statetrain as st
from {helper} import tired


@dataclass(kw_only=True)
class Work(st.Run):
    hours: int = 0


def work(run: Work) -> None:
    run.hours += 1


loop = st.Loop(
    initial="work",
    states=[st.State("work", work), st.State("done", final=True)],
    transitions=[st.Transition("work", "done", when=tired), st.Transition("work", "work")],
)


class Shelf:
    loop = loop


def factory():
    return loop


def failing():
    raise ValueError("no\\nluck")


number = 3
"""

TEXT = """\
flowchart TD
    initial-mark(( )) --> work
    work("work")
    done[["done"]]
    work -->|"1 [tired]"| done
    work -->|"2"| work
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """Go to a folder with a package and a script, whose modules no other test has imported."""
    stem = re.sub(r"\W", "_", request.node.name)
    (tmp_path / f"helper_{stem}.py").write_text("def tired(run): return run.hours > 8\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / f"work_{stem}.py").write_text(SCRIPT.format(helper=f"helper_{stem}"))
    (tmp_path / f"broken_{stem}.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.fixture
def module(folder: Path) -> str:
    return next(folder.glob("work_*.py")).stem


@pytest.mark.parametrize("name", ["loop", "factory", "Shelf.loop"])
def test_draw_prints_mermaid_text(
    module: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["draw", f"{module}:{name}"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(TEXT)
    assert err == ""


def test_draw_takes_the_path_of_a_script(
    folder: Path, module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder / "sub")
    assert main(["draw", f"../{module}.py:loop"]) == 0
    assert capsys.readouterr().out.startswith(TEXT)


def test_draw_writes_a_file_where_asked(
    folder: Path, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["draw", f"{module}:loop", "-o", "loop.mmd"]) == 0
    assert capsys.readouterr().out == "wrote loop.mmd\n"
    assert (folder / "loop.mmd").read_text().startswith(TEXT)


def test_draw_shows_the_supervised_loop_by_its_maker(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", "statetrain:supervised"]) == 0
    assert capsys.readouterr().out == st.mermaid(st.supervised())


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("{module}", "'{module}' names no loop: write pkg.mod:name or path/to/file.py:name"),
        ("{module}:", "'{module}:' names no loop: write pkg.mod:name or path/to/file.py:name"),
        ("{module}:lop", "no 'lop' in '{module}': did you mean 'loop'?"),
        ("{module}:gan", "no 'gan' in '{module}': there are loop"),
        ("{module}:Shelf.lop", "no 'lop' in '{module}': did you mean 'loop'?"),
        (
            "{module}:number",
            "'{module}:number' is of type int, not a loop: name an st.Loop, or a function of no "
            "arguments that returns one",
        ),
        ("{module}:failing", "calling '{module}:failing' failed: ValueError: no luck"),
        ("nowhere.at_all:loop", "cannot import 'nowhere.at_all': ModuleNotFoundError: No module "
         "named 'nowhere'"),
        ("sub/nothing.py:loop", "no file 'sub/nothing.py' in '{folder}'"),
        ("{broken}:loop", "cannot import '{broken}': ZeroDivisionError: division by zero"),
        ("{broken}.py:loop", "cannot load '{broken}.py': ZeroDivisionError: division by zero"),
    ],
)  # fmt: skip
def test_a_wrong_target_is_one_line_and_exit_code_2(
    folder: Path, module: str, target: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {
        "module": module,
        "folder": folder,
        "broken": next(folder.glob("broken_*.py")).stem,
    }
    assert main(["draw", target.format(**names)]) == 2
    assert capsys.readouterr() == ("", f"statetrain: {message.format(**names)}\n")


def test_a_wrong_suffix_is_one_line_and_exit_code_2(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["draw", f"{module}:loop", "-o", "loop.gif"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "give it the suffix .svg, .png, .mmd or .dot" in err


def test_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"statetrain {st.__version__}\n"


def test_help_names_the_commands_and_gives_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in (["--help"], "draw a loop"), (["draw", "-h"], "-o loop.svg"):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 0
        assert expected in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["drwa", "a:b"], ["draw"]])
def test_wrong_usage_has_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert "usage: statetrain" in capsys.readouterr().err


def test_the_command_runs_as_a_process_and_searches_the_current_folder(
    folder: Path, module: str
) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from statetrain.cli.main import main"
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{code}; sys.exit(main())", "draw", f"{module}:loop"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(TEXT)
