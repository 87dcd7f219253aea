"""Callbacks: which fires where, in which order, how often; what is refused; what is saved."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest

import statetrain as st
from statetrain.callbacks import Callbacks, point
from statetrain.machine import Machine


@dataclass(kw_only=True)
class Trace(st.Run):
    rounds: int = 3
    calls: list[Any] = field(default_factory=list)


def work_a(run: Trace) -> None:
    run.step += 1
    run.calls.append("work a")


def work_b(run: Trace) -> None:
    run.calls.append("work b")


def over(run: Trace) -> bool:
    return run.step >= run.rounds


def ring() -> st.Loop:
    """Return a loop that goes from a to b and back, three times."""
    return st.Loop(
        initial="a",
        states=[st.State("a", work_a), st.State("b", work_b), st.State("end", final=True)],
        transitions=[
            st.Transition("a", "b"),
            st.Transition("b", "end", when=over),
            st.Transition("b", "a"),
        ],
    )


def record(name: str) -> Any:
    return lambda run: run.calls.append(name)


def walk(callbacks: Callbacks, **fields: Any) -> list[Any]:
    run = Trace(**fields)
    for _ in Machine.of(callbacks.loop, run, callbacks):
        pass
    return run.calls


def visits(place: str, **how: Any) -> list[int]:
    """Return the visits of a point, out of eight, at which a callback with these filters fires."""
    callbacks = Callbacks(ring())
    fired: list[int] = []
    callbacks.attach(lambda run: fired.append(run.step), point(place, **how))
    walk(callbacks, rounds=8)
    return fired


def refusal(function: Any, place: Any = "a", **how: Any) -> str:
    with pytest.raises(st.CallbackError) as caught:
        Callbacks(ring()).attach(function, point(place, **how))
    return str(caught.value)


def test_the_order_around_a_transition() -> None:
    callbacks = Callbacks(ring())
    for place in ("b", "a", "b -> a", "a -> b"):
        callbacks.attach(record(f"on {place}"), point(place))
    for place in ("b", "a"):
        callbacks.attach(record(f"before {place}"), point(place, leading=True))
    assert walk(callbacks, rounds=2)[:12] == [
        "before a",
        "work a",
        "on a",
        "on a -> b",
        "before b",
        "work b",
        "on b",
        "on b -> a",
        "before a",
        "work a",
        "on a",
        "on a -> b",
    ]


def test_the_state_is_the_source_until_the_work_of_the_next_begins() -> None:
    callbacks = Callbacks(ring())
    seen: list[Any] = []
    for place, leading in (("a -> b", False), ("b", True), ("b", False)):
        callbacks.attach(lambda run: seen.append(run.state), point(place, leading=leading))
    walk(callbacks, rounds=1)
    assert seen == ["a", "a", "b"]


def test_higher_priority_fires_first_then_the_order_of_attaching() -> None:
    callbacks = Callbacks(ring())
    for name, priority in (("x", 0), ("y", 5), ("z", 0), ("last", -1), ("first", 9), ("w", 5)):
        callbacks.attach(record(name), point("b", priority=priority))
    assert walk(callbacks, rounds=1) == [
        *("work a", "work b"),
        *("first", "y", "w", "x", "z", "last"),
    ]


@pytest.mark.parametrize(
    ("how", "fired"),
    [
        ({}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"every": 1}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"every": 3}, [3, 6]),
        ({"every": 9}, []),
        ({"once": True}, [1]),
        ({"once": True, "every": 3}, [3]),
        ({"once": True, "when": lambda run: run.step > 4}, [5]),
        ({"at": 1}, [1]),
        ({"at": [8, 2]}, [2, 8]),
        ({"at": {2, 4, 6}, "every": 4}, [4]),
        ({"when": lambda run: run.step % 2}, [1, 3, 5, 7]),
        ({"when": lambda run: run.step > 2, "every": 2}, [4, 6, 8]),
        ({"when": lambda run: run.step > 2, "at": (1, 3)}, [3]),
    ],
)
@pytest.mark.parametrize("place", ["a", "b", "a -> b"])
def test_filters_count_visits_from_one_before_when_is_asked(
    place: str, how: dict[str, Any], fired: list[int]
) -> None:
    assert visits(place, **how) == fired


def test_when_is_not_asked_at_visits_that_every_or_at_leave_out() -> None:
    asked: list[int] = []

    def when(run: Any) -> bool:
        asked.append(run.step)
        return True

    visits("a", every=3, when=when)
    visits("a", at=(2, 5), when=when)
    assert asked == [3, 6, 2, 5]


def test_visits_before_a_state_are_counted_too() -> None:
    callbacks = Callbacks(ring())
    callbacks.attach(record("before"), point("a", leading=True, at=(1, 3)))
    assert walk(callbacks) == [
        *("before", "work a", "work b"),
        *("work a", "work b"),
        *("before", "work a", "work b"),
    ]


class Counter:
    """An object that can be called, as functions can."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, run: Any) -> None:
        self.count += 1


def test_lambdas_closures_partials_and_objects_may_be_attached() -> None:
    callbacks = Callbacks(ring())
    got: list[Any] = []
    counter = Counter()

    def closure(run: Any) -> None:
        got.append("closure")

    def extra(text: str, run: Any) -> None:
        got.append(text)

    for function in (lambda run: got.append("lambda"), closure, functools.partial(extra, "p")):
        callbacks.attach(function, point("b", once=True))
    callbacks.attach(counter, point("b"))
    walk(callbacks)
    assert (got, counter.count) == (["lambda", "closure", "p"], 3)


def test_one_function_on_several_points_and_twice_on_one() -> None:
    callbacks = Callbacks(ring())
    say = record("say")
    for where in (point("a"), point("b"), point("b", every=2), point("a -> b")):
        callbacks.attach(say, where)
    assert walk(callbacks, rounds=2).count("say") == 2 + 2 + 1 + 2
    assert len({callback.key for callback in callbacks}) == 4


def f(run: Any) -> None: ...


def none() -> None: ...


def two(run: Any, more: Any) -> None: ...


async def later(run: Any) -> None: ...


def yielding(run: Any) -> Any:
    yield


async def both(run: Any) -> Any:
    yield


class Later:
    async def __call__(self, run: Any) -> None: ...


REFUSED = [
    (f, "aa", {}, "on('aa'): no such state: did you mean 'a'?"),
    (f, "zzz", {}, "on('zzz'): no such state: there are a, b, end"),
    (f, "a->b", {}, "on('a->b'): no such transition: did you mean 'a -> b'?"),
    (
        f,
        "a -> end",
        {},
        "on('a -> end'): no such transition: did you mean 'b -> end'?",
    ),
    (f, "a -> b", {"leading": True}, "before('a -> b'): no such state: there are a, b, end"),
    (f, "edn", {"leading": True}, "before('edn'): no such state: did you mean 'end'?"),
    (3, "a", {}, "3 at state 'a' is no function: give def callback(run)"),
    (
        none,
        "a",
        {},
        "callback 'none' at state 'a' must take one argument, the run: write def none(run)",
    ),
    (
        two,
        "a -> b",
        {},
        "callback 'two' at transition 'a -> b' must take one argument, the run: write def two(run)",
    ),
    (
        two,
        "b",
        {"leading": True},
        "callback 'two' before state 'b' must take one argument, the run: write def two(run)",
    ),
    (
        later,
        "a",
        {},
        "callback 'later' at state 'a' must be a plain function, def later(run)",
    ),
    (
        yielding,
        "a",
        {},
        "callback 'yielding' at state 'a' must be a plain function, def yielding(run)",
    ),
    (both, "a", {}, "callback 'both' at state 'a' must be a plain function, def both(run)"),
    (Later(), "a", {}, "callback 'Later' at state 'a' must be a plain function, def Later(run)"),
    (f, "a", {"every": 0}, "every=0: give a whole number from 1"),
    (f, "a", {"every": 1.5}, "every=1.5: give a whole number from 1"),
    (f, "a", {"at": 0}, "at=(0,): give visit numbers, counted from 1"),
    (f, "a", {"at": "12"}, "at=('1', '2'): give visit numbers, counted from 1"),
    (f, "a", {"when": True}, "when=True: give a function of the run"),
    (f, "a", {"when": none}, f"when={none!r}: give a function of the run"),
    (f, "a", {"priority": "high"}, "priority='high': give a number, 0 is the usual one"),
]


@pytest.mark.parametrize(("function", "place", "how", "said"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_attached_is_refused_at_once(
    function: Any, place: str, how: dict[str, Any], said: str
) -> None:
    assert refusal(function, place, **how) == said


def test_a_refused_callback_is_not_attached() -> None:
    callbacks = Callbacks(ring())
    for function, place, how, _ in REFUSED:
        with pytest.raises(st.CallbackError):
            callbacks.attach(function, point(place, **how))
    assert list(callbacks) == []


class Watcher:
    """A callback object with state."""

    def __init__(self, name: str | None = None) -> None:
        self.seen: list[str] = []
        if name is not None:
            self.name = name

    @st.on("b", every=2)
    def zeta(self, run: Any) -> None:
        self.seen.append(f"zeta {run.step}")

    @st.before("b")
    @st.on("a -> b", at=1)
    def alpha(self, run: Any) -> None:
        self.seen.append(f"alpha {run.step}")

    @st.on("b")
    def beta(self, run: Any) -> None:
        self.seen.append(f"beta {run.step}")

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


def test_marked_methods_of_an_object_fire_in_the_order_they_are_written() -> None:
    callbacks = Callbacks(ring())
    watcher = Watcher()
    callbacks.attach_object(watcher)
    walk(callbacks, rounds=2)
    assert watcher.seen == [
        *("alpha 1", "alpha 1", "beta 1"),
        *("alpha 2", "zeta 2", "beta 2"),
    ]


def test_a_subclass_inherits_marks_and_an_unmarked_override_drops_them() -> None:
    class Silent(Watcher):
        def alpha(self, run: Any) -> None: ...

    callbacks = Callbacks(ring())
    callbacks.attach_object(Silent())
    assert [(c.label.rpartition(".")[2], c.point.place) for c in callbacks] == [
        ("zeta", "b"),
        ("beta", "b"),
    ]


def test_an_object_without_marks_is_refused() -> None:
    with pytest.raises(st.CallbackError) as caught:
        Callbacks(ring()).attach_object(Counter())
    assert str(caught.value) == (
        "Counter has no callback: mark its methods with @st.on('state'), or attach a function "
        "with trainer.on('state')"
    )


def test_objects_of_one_name_clash_and_a_name_of_its_own_helps() -> None:
    callbacks = Callbacks(ring())
    callbacks.attach_object(Watcher())
    before = list(callbacks)
    with pytest.raises(st.CallbackError) as caught:
        callbacks.attach_object(Watcher())
    assert str(caught.value) == (
        "two callback objects are called 'Watcher': give each an attribute `name` of its own, "
        "under which its state is saved"
    )
    assert list(callbacks) == before
    callbacks.attach_object(Watcher("second"))
    assert set(callbacks.state_dict()["objects"]) == {"Watcher", "second"}


def test_two_callbacks_of_one_name_clash() -> None:
    callbacks = Callbacks(ring())
    callbacks.attach(f, point("a", name="log"))
    with pytest.raises(st.CallbackError) as caught:
        callbacks.attach(f, point("b", name="log"))
    assert str(caught.value) == "name='log' is taken by another callback"


def test_keys_are_the_point_the_function_and_an_ordinal() -> None:
    callbacks = Callbacks(ring())
    for where in (
        point("a"),
        point("a", every=2),
        point("b"),
        point("a", leading=True),
        point("a -> b"),
        point("b", name="mine"),
    ):
        callbacks.attach(f, where)
    assert [callback.key for callback in callbacks] == [
        "at state 'a': f #0",
        "at state 'a': f #1",
        "at state 'b': f #0",
        "before state 'a': f #0",
        "at transition 'a -> b': f #0",
        "mine",
    ]


def test_a_key_does_not_change_with_what_else_is_attached() -> None:
    alone, among = Callbacks(ring()), Callbacks(ring())
    key = alone.attach(f, point("a", every=2)).key
    among.attach(record("other"), point("a"))
    among.attach_object(Watcher())
    assert among.attach(f, point("a", every=2)).key == key


def attached() -> tuple[Callbacks, Watcher, list[int]]:
    callbacks, watcher, fired = Callbacks(ring()), Watcher(), []
    callbacks.attach(lambda run: fired.append(run.step), point("a", every=3))
    callbacks.attach(lambda run: fired.append(-run.step), point("b", once=True, at=(2, 4)))
    callbacks.attach_object(watcher)
    return callbacks, watcher, fired


def interrupted(stop: int, *, loaded: bool) -> tuple[list[int], list[str]]:
    """Stop after `stop` states, go on with new callbacks; return what fired, and what was seen."""
    callbacks, watcher, fired = attached()
    run = Trace(rounds=7)
    walking = iter(Machine.of(callbacks.loop, run, callbacks))
    for _ in range(stop):
        next(walking)
    saved = callbacks.state_dict()
    later, new_watcher, new_fired = attached()
    if loaded:
        later.load_state_dict(saved)
    for _ in Machine.of(later.loop, run, later):
        pass
    seen = new_watcher.seen if loaded else watcher.seen + new_watcher.seen
    return fired + new_fired, seen


def test_counters_and_objects_go_on_from_saved_ones_at_every_state() -> None:
    callbacks, watcher, fired = attached()
    walk(callbacks, rounds=7)
    for stop in range(1, 15):
        assert interrupted(stop, loaded=True) == (fired, watcher.seen)


def test_without_the_saved_counters_the_same_comparison_fails() -> None:
    callbacks, watcher, fired = attached()
    walk(callbacks, rounds=7)
    assert interrupted(5, loaded=False) != (fired, watcher.seen)


def test_a_saved_state_holds_plain_data_of_filtered_callbacks_only() -> None:
    callbacks = Callbacks(ring())
    callbacks.attach(f, point("a"))
    callbacks.attach(f, point("b", every=2, name="log"))
    walk(callbacks)
    assert callbacks.state_dict() == {"counters": {"log": [3, 1]}, "objects": {}}


def test_differences_name_the_objects_of_one_side_only() -> None:
    old, new = Callbacks(ring()), Callbacks(ring())
    old.attach_object(Watcher("gone"))
    new.attach_object(Watcher("come"))
    assert new.differences(old.state_dict()) == [
        "callback 'gone' has saved state, but is not attached",
        "callback 'come' has no saved state",
    ]
    new.load_state_dict(old.state_dict())


def test_a_reset_counts_from_the_beginning() -> None:
    callbacks = Callbacks(ring())
    callbacks.attach(record("once"), point("a", once=True))
    assert walk(callbacks).count("once") == 1
    assert walk(callbacks).count("once") == 0
    callbacks.reset()
    assert walk(callbacks).count("once") == 1


class OwnError(Exception):
    """What a callback raises; it has no place in our tree."""


def fails(run: Any) -> None:
    if run.step == 2:
        raise OwnError("told")


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("where", "note"),
    [
        (point("b"), "in callback 'fails' after state 'b' (epoch 0, step 2)"),
        (point("b", at=2), "in callback 'fails' after state 'b' (epoch 0, step 2)"),
        (point("a", leading=True), "in callback 'fails' before state 'a' (epoch 0, step 2)"),
        (point("b -> a"), "in callback 'fails' at transition 'b -> a' (epoch 0, step 2)"),
    ],
)
def test_an_exception_keeps_its_type_and_says_where_it_came_from(
    where: Any, note: str, *, compiled: bool
) -> None:
    callbacks = Callbacks(ring())
    for place in ("a", "b"):
        callbacks.attach(f, point(place))
    callbacks.attach(fails, where)
    machine = Machine.of(callbacks.loop, Trace(), callbacks)
    if not compiled:
        machine.after_state_change = [lambda: None]  # transitions' own triggers walk
    with pytest.raises(OwnError, match="told") as caught:
        list(machine)
    assert caught.value.__notes__ == [note]


def test_an_exception_in_an_action_a_guard_or_before_the_first_state_says_so() -> None:
    def broken(run: Any) -> bool:
        raise OwnError

    edges = [st.Transition("a", "end", when=broken)]
    loops = [
        (st.State("a", broken), st.path("a", "end")),
        (st.State("a", work_a), edges),
    ]
    notes = []
    for state, transitions in loops:
        loop = st.Loop(
            initial="a", states=[state, st.State("end", final=True)], transitions=transitions
        )
        with pytest.raises(OwnError) as caught:
            list(Machine.of(loop, Trace()))
        notes += caught.value.__notes__
    callbacks = Callbacks(ring())
    callbacks.attach(broken, point("a", leading=True))
    with pytest.raises(OwnError) as caught:
        list(Machine.of(callbacks.loop, Trace(), callbacks))
    name = broken.__qualname__
    assert [*notes, *caught.value.__notes__] == [
        "in the action of state 'a' (epoch 0, step 0)",
        f"in guard {name!r} (epoch 0, step 1)",
        f"in callback {name!r} before state 'a' (epoch 0, step 0)",
    ]


def test_an_exception_beside_an_attaching_callback_is_placed_rightly() -> None:
    callbacks = Callbacks(ring())
    run = Trace()

    def attaches(run: Any) -> None:
        callbacks.attach(f, point("b"))
        machine.refresh()

    callbacks.attach(attaches, point("a"))
    callbacks.attach(fails, point("a"))
    machine = Machine.of(callbacks.loop, run, callbacks)
    with pytest.raises(OwnError) as caught:
        list(machine)
    assert caught.value.__notes__ == ["in callback 'fails' after state 'a' (epoch 0, step 2)"]


def test_attaching_during_a_walk_takes_effect_from_the_next_transition() -> None:
    callbacks = Callbacks(ring())
    run = Trace()

    def attaches(run: Any) -> None:
        for place in ("a", "b", "b -> a"):
            callbacks.attach(record(f"new at {place}"), point(place))
        machine.refresh()
        run.calls.append("attached")

    callbacks.attach(attaches, point("a", once=True))
    machine = Machine.of(callbacks.loop, run, callbacks)
    list(machine)
    assert run.calls[:8] == [
        *("work a", "attached"),
        *("work b", "new at b"),
        *("new at b -> a", "work a", "new at a"),
        "work b",
    ]


def test_attaching_through_the_trainer_during_fit_takes_effect() -> None:
    trainer = st.Trainer(ring())

    @trainer.on("a", once=True)
    def attaches(run: Any) -> None:
        trainer.before("b")(record("new"))

    run = trainer.fit(Trace(rounds=1))
    assert run.calls == ["work a", "new", "work b"]
