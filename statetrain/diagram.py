"""A loop as a picture: Mermaid and DOT text, and SVG and PNG drawn from the DOT by pygraphviz.

It knows loops as data only, not how they run: what is attached to one is given as names. The DOT
text holds all positions (`layout=nop2`), so any Graphviz draws the same picture.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path

from statetrain.errors import LoopError, StatetrainError
from statetrain.lanes import LEFT, ROW, SIZE, SMALL, XY, Places, text_width
from statetrain.loop import ARROW, Guard, Loop, State, Transition, nearest

__all__ = ["Attached", "dot", "draw", "mermaid", "mimebundle", "svg"]

Attached = Mapping[str, Sequence[str]]
"""Names of callbacks by point: `{"step": [...], "before forward": [...], "a -> b": [...]}`."""

BEFORE = "before "
ON = "on: "
INK, PAPER, NOW = "#24364b", "#f4f7fb", "#ffe2a8"  # text and border, fill, fill of `current`
SPINE, NOTE, FAINT = "#5b6b7d", "#a34a1a", "#6b7785"
LANES = ("#2f6f9f", "#2d7d6e", "#8a5a96", "#94691b", "#a24d55", "#4f5fb0")
FONT = "DejaVu Sans,Verdana,Helvetica,sans-serif"
RADIUS, ARROW_LENGTH = 7, 7  # points

# words and signs that mean something to Mermaid where a state's id stands
RESERVED = frozenset(
    [
        *("call", "class", "classDef", "click", "default", "direction", "end", "flowchart"),
        *("graph", "href", "interpolate", "linkStyle", "style", "subgraph"),
    ]
)


def mermaid(loop: Loop, callbacks: Attached | None = None, *, current: str | None = None) -> str:
    """Return the loop as Mermaid text, which GitHub and notebooks show as a diagram.

    The number before a guard is its place in the order in which they are asked. States that are
    done again on resume (`replay=True`) are dashed, final ones have a double border. `callbacks`
    are shown at their points, and the state `current` is highlighted.

    Raises:
        LoopError: `callbacks` or `current` names a point that the loop does not have.
    """
    texts = _texts(loop, callbacks, current)
    ids = {name: _mermaid_id(name, number) for number, name in enumerate(loop.names)}
    lines = ["flowchart TD", f"    initial-mark(( )) --> {ids[loop.initial]}"]
    for state in loop.states:
        text = "<br/>".join(_mermaid_text(line) for line in texts[state.name])
        left, right = ('[["', '"]]') if state.final else ('("', '")')
        lines.append(f"    {ids[state.name]}{left}{text}{right}")
    for edge in loop.transitions:
        text = "<br/>".join(_mermaid_text(line) for line in texts[edge.name])
        label = f'|"{text}"|' if text else ""
        lines.append(f"    {ids[edge.source]} -->{label} {ids[edge.dest]}")
    lines += [
        f"    classDef default fill:{PAPER},stroke:{INK},color:{INK}",
        f"    style initial-mark fill:{INK}",
        *(f"    style {ids[s.name]} stroke-dasharray:5 3" for s in loop.states if s.replay),
    ]
    if current is not None:
        lines.append(f"    style {ids[current]} fill:{NOW},stroke-width:3px")
    return "\n".join(lines) + "\n"


def dot(loop: Loop, callbacks: Attached | None = None, *, current: str | None = None) -> str:
    """Return the loop as DOT text with all positions in it, for `dot -Tsvg` and the like.

    Raises:
        LoopError: `callbacks` or `current` names a point that the loop does not have.
    """
    places = Places(loop, _texts(loop, callbacks, current))
    return "\n".join(
        [
            "digraph loop {",
            f'    graph [layout=nop2 bgcolor=white pad=0.2 fontname="{FONT}"]',
            f'    node [shape=box style="rounded,filled" fillcolor="{PAPER}" color="{INK}" '
            f'fontcolor="{INK}" fontname="{FONT}" fontsize={SIZE} fixedsize=true penwidth=1.2]',
            f'    edge [fontname="{FONT}" fontsize={SMALL} arrowsize=0.7 penwidth=1.1]',
            *_dot_initial(loop),
            *(_dot_state(state, places, current) for state in loop.states),
            *(_dot_edge(edge, places) for edge in loop.transitions),
            _dot_legend(places),
            "}\n",
        ]
    )


def svg(loop: Loop, callbacks: Attached | None = None, *, current: str | None = None) -> str:
    """Return the loop as the text of an SVG image.

    Raises:
        StatetrainError: pygraphviz is not installed.
        LoopError: `callbacks` or `current` names a point that the loop does not have.
    """
    return _graphviz(dot(loop, callbacks, current=current), "svg").decode()


def draw(
    loop: Loop,
    path: str | os.PathLike[str],
    *,
    callbacks: Attached | None = None,
    current: str | None = None,
) -> None:
    """Write the loop to `path`: its suffix, .svg, .png, .mmd or .dot, says in which form.

    Raises:
        StatetrainError: another suffix, `path` cannot be written, or pygraphviz is not installed,
            which only .svg and .png need.
        LoopError: `callbacks` or `current` names a point that the loop does not have.
    """
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in (".svg", ".png", ".mmd", ".dot"):
        raise StatetrainError(
            f"cannot draw to {str(target)!r}: give it the suffix .svg, .png, .mmd or .dot"
        )
    if suffix == ".mmd":
        data = mermaid(loop, callbacks, current=current).encode()
    else:
        data = dot(loop, callbacks, current=current).encode()
    if suffix in (".svg", ".png"):
        data = _graphviz(data.decode(), suffix[1:])
    try:
        target.write_bytes(data)
    except OSError as error:
        raise StatetrainError(
            f"cannot write the diagram to {str(target)!r}: {error.strerror or error}"
        ) from error


def mimebundle(loop: Loop) -> dict[str, str]:
    """Return what notebooks show for the loop: SVG, or Mermaid where pygraphviz is missing."""
    fenced = f"```mermaid\n{mermaid(loop)}```"
    bundle = {"text/plain": repr(loop), "text/markdown": fenced}
    with contextlib.suppress(StatetrainError):  # without pygraphviz the text remains
        bundle["image/svg+xml"] = svg(loop)
    return bundle


def _graphviz(text: str, form: str) -> bytes:
    try:
        import pygraphviz
    except ImportError as error:
        raise StatetrainError(
            'SVG and PNG need pygraphviz: pip install "statetrain[diagram]", or write .mmd or .dot'
        ) from error
    args = "-Gdpi=144" if form == "png" else ""
    graph = pygraphviz.AGraph(string=text)
    return bytes(graph.draw(format=form, prog="nop2", args=args))


# -- what is written where


def _texts(loop: Loop, callbacks: Attached | None, current: str | None) -> dict[str, list[str]]:
    """Return the lines to write at each state and transition, by its name."""
    if current is not None:
        loop.state(current)
    notes = callbacks or {}
    edges = [edge.name for edge in loop.transitions]
    for point in notes:
        state = point.removeprefix(BEFORE)
        if state not in loop.names and point not in edges:
            hint = nearest(state, edges if ARROW in point else loop.names)
            raise LoopError(f"callbacks are given for the unknown point {point!r}{hint}")
    texts = {}
    for name in loop.names:
        before = [f"{BEFORE.strip()}: {function}" for function in notes.get(BEFORE + name, ())]
        texts[name] = [*before, name]
    for edge in loop.transitions:
        texts[edge.name] = _edge_text(loop, edge)
    for name, lines in texts.items():
        lines += [f"{ON}{function}" for function in notes.get(name, ())]
    return texts


def _edge_text(loop: Loop, edge: Transition) -> list[str]:
    rivals = loop.leaving(edge.source)
    words = [str(rivals.index(edge) + 1)] if len(rivals) > 1 else []
    words += [f"[{_name(edge.when)}]"] if edge.when is not None else []
    return [" ".join(words)] if words else []


def _name(guard: Guard) -> str:
    while isinstance(guard, functools.partial):
        guard = guard.func
    return str(getattr(guard, "__name__", type(guard).__name__))


# -- Mermaid


def _mermaid_id(name: str, number: int) -> str:
    # a state's name has no hyphen, so the second form cannot meet a name
    return name if name.isascii() and name not in RESERVED else f"state-{number}"


def _mermaid_text(text: str) -> str:
    plain = " _-.,:[]()=/"
    return "".join(c if c.isalnum() or c in plain else f"#{ord(c)};" for c in text)


# -- DOT


def _dot_initial(loop: Loop) -> list[str]:
    # no state can be called "initial mark" or "what the signs mean": names have no spaces
    return [
        '    "initial mark" [shape=circle label="" width=0.13 height=0.13 style=filled '
        f'fillcolor="{INK}" pos="0,24"]',
        f'    "initial mark" -> "{loop.initial}" '
        f'[color="{INK}" pos="{_spline([(0, 19), (0, 0)])}"]',
    ]


def _dot_state(state: State, places: Places, current: str | None) -> str:
    height = places.height[state.name]
    cells = [
        f"<TD>{escape(line)}</TD>"
        if line == state.name
        else f'<TD><FONT POINT-SIZE="{SMALL}" COLOR="{NOTE}">{escape(line)}</FONT></TD>'
        for line in places.texts[state.name]
    ]
    more = ' style="rounded,filled,dashed"' if state.replay else ""
    more += " peripheries=2" if state.final else ""
    more += f' fillcolor="{NOW}" penwidth=2.4' if state.name == current else ""
    return (
        f'    "{state.name}" [pos="0,{places.top[state.name] - height / 2:g}" '
        f"width={places.half / 36:.4f} height={height / 72:.4f} label=<{_table(cells)}>{more}]"
    )


def _dot_edge(edge: Transition, places: Places) -> str:
    side = places.side(edge)
    number = places.numbers.get((side, edge.dest))
    shift = len(LANES) // 2 if side == LEFT else 0
    color = SPINE if number is None else LANES[(number + shift) % len(LANES)]
    attributes = f'color="{color}" pos="{_spline(places.route(edge))}"'
    if places.texts[edge.name]:
        attributes += _dot_label(edge, places, color)
    return f'    "{edge.source}" -> "{edge.dest}" [{attributes}]'


def _dot_label(edge: Transition, places: Places, color: str) -> str:
    lines = places.texts[edge.name]
    (x, y), width = places.label(edge), text_width(lines, SMALL)
    side, middle = ("RIGHT", x - width / 2) if x < 0 else ("LEFT", x + width / 2)
    cells = [
        f'<TD WIDTH="{width}" ALIGN="{side}">'
        f'<FONT COLOR="{NOTE if line.startswith(ON) else color}">{escape(line)}</FONT></TD>'
        for line in lines
    ]
    return f' lp="{middle:g},{y:g}" label=<{_table(cells)}>'


def _table(cells: Sequence[str]) -> str:
    rows = "".join(f"<TR>{cell}</TR>" for cell in cells)
    return f'<TABLE BORDER="0" CELLPADDING="0" CELLSPACING="0">{rows}</TABLE>'


def _dot_legend(places: Places) -> str:
    lines = ["double border: the end"]
    if any(len(places.loop.leaving(name)) > 1 for name in places.order):
        lines.append("1, 2, 3: the first open transition is taken")
    if any(state.replay for state in places.loop.states):
        lines.append("dashed: done again on resume")
    y = places.bottom - 16 - ROW * len(lines) / 2
    return (
        f'    "what the signs mean" [shape=plain style="" fixedsize=false fontsize={SMALL} '
        f'fontcolor="{FAINT}" pos="0,{y:g}" label=<{"<BR/>".join(lines)}>]'
    )


def _spline(points: Sequence[XY]) -> str:
    """Return a DOT spline along straight lines with round corners, ending in an arrow."""
    (x, y), tip = points[-2], points[-1]
    back = ARROW_LENGTH / (abs(x - tip[0]) + abs(y - tip[1]))  # lines are level or upright
    points = [*points[:-1], (tip[0] + (x - tip[0]) * back, tip[1] + (y - tip[1]) * back)]
    at, curve = points[0], [points[0]]
    for corner, after in pairwise(points[1:]):
        entry, leave = _towards(corner, at), _towards(corner, after)
        curve += [at, entry, entry, corner, corner, leave]
        at = leave
    curve += [at, points[-1], points[-1]]
    return f"e,{tip[0]:g},{tip[1]:g} " + " ".join(f"{x:g},{y:g}" for x, y in curve)


def _towards(corner: XY, other: XY) -> XY:
    length = abs(other[0] - corner[0]) + abs(other[1] - corner[1])
    part = min(RADIUS / length, 0.5) if length else 0
    return corner[0] + (other[0] - corner[0]) * part, corner[1] + (other[1] - corner[1]) * part
