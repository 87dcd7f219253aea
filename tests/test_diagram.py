from __future__ import annotations

import builtins
import functools
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from statetrain.diagram import dot, draw, mermaid, mimebundle, svg
from statetrain.errors import LoopError, StatetrainError
from statetrain.lanes import LEFT, RIGHT, Places
from statetrain.loop import Loop, State, Transition, path

SUPERVISED = """
epoch_start       -> batch_start [has_next] | validation_start [validation_due] | epoch_end
batch_start       -> forward [trainable]    | pass_end
forward           -> backward [has_loss]    | pass_end
backward          -> step [window_due]      | pass_end
step              -> zero_grad [stepped]    | pass_end
zero_grad         -> pass_end
pass_end          -> step [window_due] | forward [more_passes] | batch_end [has_batch]\
 | validation_start [validation_due] | epoch_end
batch_end         -> pass_end [window_due] | validation_start [validation_due]\
 | epoch_end [epoch_over] | done [paused] | batch_start
validation_start  -> validation_step [has_val] | validation_end
validation_step   -> validation_step [has_val] | validation_end
validation_end    -> pass_end [window_due] | epoch_end [epoch_over] | done [paused] | batch_start
epoch_end         -> done [finished]        | epoch_start
"""


def act(run: Any) -> None: ...


def guard(name: str) -> Any:
    def stand_in(run: Any) -> bool:
        return True

    stand_in.__name__ = name
    return stand_in


def declared(table: str) -> Loop:
    states, edges = [], []
    for line in table.strip().splitlines():
        source, _, rest = line.partition("->")
        name = source.strip()
        states.append(State(name, act, replay=name == "forward"))
        for text in rest.split("|"):
            dest, _, when = text.strip().partition(" ")
            edges.append(Transition(name, dest, guard(when[1:-1]) if when else None))
    return Loop(
        initial=states[0].name,
        states=(*states, State("done", final=True)),
        transitions=tuple(edges),
    )


def gan() -> Loop:
    names = ("batch_start", "forward_d", "backward_d", "step_d", "forward_g", "backward_g")
    return Loop(
        initial="batch_start",
        states=(
            *(State(name, act, replay=name.startswith("forward")) for name in names),
            State("step_g", act),
            State("done", final=True),
        ),
        transitions=(
            Transition("batch_start", "forward_d", guard("has_batch")),
            Transition("batch_start", "done"),
            *path(*names[1:], "step_g", "batch_start"),
        ),
    )


def small(name: str = "work", when: Any = None) -> Loop:
    return Loop(
        initial=name,
        states=(State(name, act, replay=True), State("rest", act), State("done", final=True)),
        transitions=(
            Transition(name, "rest", when or guard("tired")),
            Transition(name, "done"),
            Transition("rest", name),
        ),
    )


@pytest.fixture
def no_pygraphviz(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process one in which pygraphviz is not installed."""
    real = builtins.__import__

    def importing(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "pygraphviz":
            raise ModuleNotFoundError("No module named 'pygraphviz'", name="pygraphviz")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", importing)


def test_mermaid_text_is_this_to_the_letter() -> None:
    assert (
        mermaid(small())
        == """\
flowchart TD
    initial-mark(( )) --> work
    work("work")
    rest("rest")
    done[["done"]]
    work -->|"1 [tired]"| rest
    work -->|"2"| done
    rest --> work
    classDef default fill:#f4f7fb,stroke:#24364b,color:#24364b
    style initial-mark fill:#24364b
    style work stroke-dasharray:5 3
"""
    )


def test_mermaid_shows_callbacks_at_their_points() -> None:
    attached = {"work": ["log"], "before work": ["start_clock"], "rest -> work": ["look", "tell"]}
    text = mermaid(small(), attached)
    assert 'work("before: start_clock<br/>work<br/>on: log")' in text
    assert 'rest -->|"on: look<br/>on: tell"| work' in text


def test_mermaid_highlights_the_current_state() -> None:
    assert "style rest fill:#ffe2a8" in mermaid(small(), current="rest")
    assert "ffe2a8" not in mermaid(small())


@pytest.mark.parametrize("name", ["end", "graph", "style", "état"])
def test_state_names_that_mean_something_to_mermaid_stand_in_labels_only(name: str) -> None:
    text = mermaid(small(name))
    assert f'state-0("{name}")' in text
    assert "rest --> state-0" in text


def test_names_of_functions_are_escaped() -> None:
    loop = small(when=lambda run: True)
    attached = {"work": ['say("hi") & <go>; #1 `x`|']}
    text = mermaid(loop, attached)
    assert '|"1 [#60;lambda#62;]"|' in text
    assert '("work<br/>on: say(#34;hi#34;) #38; #60;go#62;#59; #35;1 #96;x#96;#124;")' in text
    text = dot(loop, attached)
    assert "1 [&lt;lambda&gt;]" in text
    assert "on: say(&quot;hi&quot;) &amp; &lt;go&gt;; #1 `x`|" in text


def test_a_guard_is_called_by_the_function_in_it() -> None:
    class Tired:
        def __call__(self, run: Any) -> bool:
            return True

    assert "[tired]" in mermaid(small(when=functools.partial(guard("tired"))))
    assert "[Tired]" in mermaid(small(when=Tired()))


def test_only_states_with_several_transitions_number_them() -> None:
    labels = re.findall(r'-->(?:\|"(.*?)"\|)? ', mermaid(gan()).partition("backward_d -->")[0])
    assert labels == ["", "1 [has_batch]", "2", ""]


@pytest.mark.parametrize("write", [mermaid, dot])
def test_unknown_points_are_errors_that_name_the_nearest(write: Any) -> None:
    with pytest.raises(LoopError, match="unknown point 'wrok': did you mean 'work'"):
        write(small(), {"wrok": ["log"]})
    with pytest.raises(LoopError, match="'before rset': did you mean 'rest'"):
        write(small(), {"before rset": ["log"]})
    with pytest.raises(LoopError, match="did you mean 'rest -> work'"):
        write(small(), {"rest -> wrk": ["log"]})
    with pytest.raises(LoopError, match="did you mean 'rest'"):
        write(small(), current="res")


def test_svg_names_every_state_transition_and_guard() -> None:
    pytest.importorskip("pygraphviz")
    loop = declared(SUPERVISED)
    text = svg(loop, {"step": ["log"]}, current="forward")
    picture = ET.fromstring(text)  # noqa: S314  it is our own
    texts = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    titles = [title.text for title in picture.iter("{http://www.w3.org/2000/svg}title")]
    guards = [f"[{edge.when.__name__}]" for edge in loop.transitions if edge.when is not None]
    assert set(loop.names) <= set(texts)
    assert {edge.name.replace(" ", "") for edge in loop.transitions} <= set(titles)
    assert sorted(t.partition(" ")[2] for t in texts if t and "[" in t) == sorted(guards)
    assert "on: log" in texts


def test_initial_replay_and_final_states_are_marked_in_dot() -> None:
    text = dot(small())
    lines = [line for line in text.splitlines() if "height=" in line]
    boxes = {line.split('"')[1]: line for line in lines}
    assert '"initial mark" -> "work"' in text
    assert [name for name, line in boxes.items() if "dashed" in line] == ["work"]
    assert [name for name, line in boxes.items() if "peripheries=2" in line] == ["done"]


def overlaps(places: Places, side: int) -> list[tuple[str, str]]:
    """Return the pairs of states whose lanes on one side lie over each other."""
    spans = {}
    for dest in (dest for s, dest in places.lanes if s == side):
        edges = [e for e in places.loop.transitions if (places.side(e), e.dest) == (side, dest)]
        ys = [y for edge in edges for _, y in places.route(edge)]
        spans[dest] = (places.lanes[side, dest], min(ys), max(ys))
    return [
        (a, b)
        for a, (x, low, high) in spans.items()
        for b, (other, bottom, top) in spans.items()
        if a < b and x == other and low <= top and bottom <= high
    ]


@pytest.mark.parametrize(
    "loop", [declared(SUPERVISED), gan(), small()], ids=["sup", "gan", "small"]
)
@pytest.mark.parametrize("side", [LEFT, RIGHT])
def test_no_two_lines_to_different_states_lie_over_each_other(loop: Loop, side: int) -> None:
    edges = [edge.name for edge in loop.transitions]
    texts = {name: ["1 [guard]"] for name in edges} | {name: [name] for name in loop.names}
    places = Places(loop, texts)
    assert overlaps(places, side) == []
    assert len({places.numbers[key] for key in places.lanes if key[0] == side}) == sum(
        1 for key in places.lanes if key[0] == side
    )


def test_lines_over_each_other_would_be_seen() -> None:
    loop = declared(SUPERVISED)
    edges = [edge.name for edge in loop.transitions]
    places = Places(loop, {name: ["x"] for name in edges} | {name: [name] for name in loop.names})
    for key in places.lanes:
        places.lanes[key] = 100.0
    assert overlaps(places, RIGHT)


def test_lines_that_leave_a_state_start_apart_by_more_than_their_text() -> None:
    loop = declared(SUPERVISED)
    texts = {name: [name] for name in loop.names}
    texts |= {edge.name: ["1 [guard]", "on: log"] for edge in loop.transitions}
    places = Places(loop, texts)
    for name in loop.names:
        for side in (LEFT, RIGHT):
            leaving = [edge for edge in loop.leaving(name) if places.side(edge) == side]
            ys = [places.route(edge)[0][1] for edge in leaving]
            assert all(a - b >= 28 for a, b in pairwise(ys))


@pytest.mark.parametrize(
    ("suffix", "start"),
    [("svg", b"<?xml"), ("png", b"\x89PNG\r\n"), ("mmd", b"flowchart TD"), ("dot", b"digraph")],
)
def test_the_suffix_says_what_is_written(tmp_path: Path, suffix: str, start: bytes) -> None:
    if suffix in ("svg", "png"):
        pytest.importorskip("pygraphviz")
    target = tmp_path / f"loop.{suffix}"
    draw(gan(), target, callbacks={"step_g": ["log"]}, current="forward_d")
    assert target.read_bytes().startswith(start)


def test_another_suffix_is_an_error_that_lists_them(tmp_path: Path) -> None:
    with pytest.raises(StatetrainError, match=r"'loop\.jpeg': .* \.svg, \.png, \.mmd or \.dot"):
        draw(gan(), "loop.jpeg")
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_written_is_an_error_with_its_cause(tmp_path: Path) -> None:
    with pytest.raises(StatetrainError, match=r"cannot write .*missing.*: No such file") as caught:
        draw(gan(), tmp_path / "missing" / "loop.mmd")
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.usefixtures("no_pygraphviz")
@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_pictures_without_pygraphviz_say_what_to_install(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(StatetrainError, match=re.escape('pip install "statetrain[diagram]"')):
        draw(gan(), tmp_path / f"loop.{suffix}")


@pytest.mark.usefixtures("no_pygraphviz")
@pytest.mark.parametrize("suffix", ["mmd", "dot"])
def test_text_needs_no_pygraphviz(tmp_path: Path, suffix: str) -> None:
    draw(gan(), tmp_path / f"loop.{suffix}")
    assert (tmp_path / f"loop.{suffix}").stat().st_size > 0


def test_notebooks_show_a_loop_as_svg() -> None:
    pytest.importorskip("pygraphviz")
    loop = gan()
    bundle = loop._repr_mimebundle_(include=None, exclude=None)
    assert bundle == mimebundle(loop)
    assert "<svg" in bundle["image/svg+xml"]


def test_notebooks_without_pygraphviz_show_a_loop_as_mermaid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pygraphviz", None)
    bundle = gan()._repr_mimebundle_()
    assert "image/svg+xml" not in bundle
    assert bundle["text/markdown"] == f"```mermaid\n{mermaid(gan())}```"
