"""Where the states and transitions of a loop stand in its picture.

The states stand one below the other in declared order. A transition to the next state is the line
between the two; one further down leaves and arrives on the right, one back up on the left. The
lines to one state share a lane. It knows no DOT: it gives points, with y upwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from statetrain.loop import Loop, Transition

__all__ = ["LEFT", "ROW", "SIZE", "SMALL", "XY", "Places", "text_width"]

XY = tuple[float, float]

SIZE, SMALL = 12, 10  # font sizes
ROW, GAP, PAD = 14, 22, 16  # a line of small text, the space between states, around a state's text
PORT = 21  # the height that a line leaving or arriving sideways takes
MARGIN, LANE = 14, 15  # between the texts and the first lane, and from lane to lane
BORDER = 4  # how far the second border of a final state stands out

RIGHT, SPINE, LEFT = 1, 0, -1


def text_width(lines: Sequence[str], size: int) -> int:
    """Return the width that `lines` need at most, in points: fonts differ from place to place."""
    return round(max((len(line) for line in lines), default=0) * size * 0.64)


@dataclass(eq=False)
class Places:
    """The positions of a loop's states and transitions, whose texts are given by their names.

    Attributes:
        order: the states from top to bottom, the initial one first.
        half: half the width of every state.
        top, height: of each state.
        lanes: the x of the lane to a state on one side.
        numbers: the number of that lane's colour, no two the same on one side.
    """

    loop: Loop
    texts: Mapping[str, Sequence[str]]
    order: list[str] = field(init=False)
    half: float = field(init=False)
    top: dict[str, float] = field(init=False, default_factory=dict)
    height: dict[str, float] = field(init=False, default_factory=dict)
    lanes: dict[tuple[int, str], float] = field(init=False, default_factory=dict)
    numbers: dict[tuple[int, str], int] = field(init=False, default_factory=dict)
    _exits: dict[str, float] = field(init=False, default_factory=dict)
    _entries: dict[tuple[int, str], float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        first = self.loop.initial
        self.order = [first, *(name for name in self.loop.names if name != first)]
        widths = [text_width(self.texts[name], SIZE) for name in self.order]
        self.half = max(widths) / 2 + 12
        y = 0.0
        for name in self.order:
            needs = [self._ports_height(name, side) + 6 for side in (LEFT, RIGHT)]
            self.height[name] = max(ROW * len(self.texts[name]) + PAD, *needs)
            self.top[name] = y
            for side in (LEFT, RIGHT):
                self._place_ports(name, side)
            y -= self.height[name] + GAP + self._spine_text_height(name)
        for side in (LEFT, RIGHT):
            self._lay_lanes(side)

    @property
    def bottom(self) -> float:
        """The y of the lowest state's lower edge."""
        return self.top[self.order[-1]] - self.height[self.order[-1]]

    def side(self, edge: Transition) -> int:
        """Return 0 for a line down the spine, 1 for one on the right, -1 for one on the left."""
        down = self.order.index(edge.dest) - self.order.index(edge.source)
        if down == 1:
            return SPINE
        return RIGHT if down >= 0 else LEFT

    def route(self, edge: Transition) -> list[XY]:
        """Return the corners of a transition's line, from its source to its dest."""
        side = self.side(edge)
        border = BORDER if self.loop.state(edge.dest).final else 0
        if side == SPINE:
            start = self.top[edge.source] - self.height[edge.source]
            return [(0, start), (0, self.top[edge.dest] + border)]
        start, end = self._exits[edge.name], self._entries[side, edge.dest]
        lane = self.lanes[side, edge.dest]
        wall, outside = side * self.half, side * (self.half + border)
        return [(wall, start), (lane, start), (lane, end), (outside, end)]

    def label(self, edge: Transition) -> XY:
        """Return the point at which a transition's text starts (on the left side: ends)."""
        side = self.side(edge)
        if side == SPINE:
            lower = self.top[edge.source] - self.height[edge.source]
            return 6, (lower + self.top[edge.dest]) / 2 + 1
        return side * (self.half + 5), self._exits[edge.name] + 1 + self._text_height(edge) / 2

    def _text_height(self, edge: Transition) -> float:
        return ROW * len(self.texts[edge.name])

    def _spine_text_height(self, name: str) -> float:
        return sum(self._text_height(edge) for edge in self._leaving(name, SPINE))

    def _leaving(self, name: str, side: int) -> list[Transition]:
        return [edge for edge in self.loop.leaving(name) if self.side(edge) == side]

    def _entered(self, name: str, side: int) -> bool:
        return any(e.dest == name and self.side(e) == side for e in self.loop.transitions)

    def _port_height(self, edge: Transition) -> float:
        return max(PORT, PORT - ROW + self._text_height(edge))

    def _ports_height(self, name: str, side: int) -> float:
        leaving = sum(self._port_height(edge) for edge in self._leaving(name, side))
        return leaving + (PORT if self._entered(name, side) else 0)

    def _place_ports(self, name: str, side: int) -> None:
        """Give each line its height: those that arrive come in above on the right, else below."""
        y = self.top[name] - (self.height[name] - self._ports_height(name, side)) / 2
        if side == RIGHT and self._entered(name, side):
            self._entries[side, name] = y - PORT / 2
            y -= PORT
        for edge in self._leaving(name, side):
            y -= self._port_height(edge)
            self._exits[edge.name] = y + 4
        if side == LEFT and self._entered(name, side):
            self._entries[side, name] = y - PORT / 2

    def _lay_lanes(self, side: int) -> None:
        """Give each state's arriving lines a lane: short ones inside, none over another."""
        edges = [edge for edge in self.loop.transitions if self.side(edge) == side]
        spans = []
        for dest in {edge.dest: None for edge in edges}:
            ys = [self._exits[edge.name] for edge in edges if edge.dest == dest]
            ys.append(self._entries[side, dest])
            spans.append((max(ys) - min(ys), min(ys), max(ys), dest))
        taken: list[list[XY]] = []
        for _, low, high, dest in sorted(spans):
            free = (all(high < a - 4 or low > b + 4 for a, b in lane) for lane in taken)
            number = next((n for n, is_free in enumerate(free) if is_free), len(taken))
            taken[number:number] = [[]] if number == len(taken) else []
            taken[number].append((low, high))
            self.lanes[side, dest] = side * (self._first_lane(side) + LANE * number)
            self.numbers[side, dest] = sum(1 for known, _ in self.numbers if known == side)

    def _first_lane(self, side: int) -> float:
        """Return how far out the first lane lies: beyond all texts, also those of the spine."""
        reach = {side: self.half, SPINE: 6.0}
        ends = [self.half] + [
            reach[self.side(edge)] + text_width(self.texts[edge.name], SMALL)
            for edge in self.loop.transitions
            if self.side(edge) == side or (side == RIGHT and self.side(edge) == SPINE)
        ]
        return max(ends) + MARGIN
