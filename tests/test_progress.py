"""Progress: what it shows, what it costs the run, and how it leaves a terminal."""

from __future__ import annotations

import io
import logging
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

import pytest
import torch
from torch import nn

import statetrain as st
from statetrain.callbacks import Callbacks, point
from statetrain.machine import Machine
from statetrain.progress import SILENCE, Progress
from statetrain.run import Limits

THREAD = "statetrain progress"
END = "<that is all>"


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Model(st.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_nb: int) -> torch.Tensor:
        return self.net(batch).mean() * 0.0 + 0.25

    def validation_step(self, batch: Any, batch_nb: int) -> dict[str, float]:
        return {"val_acc": 0.97, "val_loss": 0.11}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def supervised(
    *, batches: int = 4, limits: Limits | None = None, **options: Any
) -> tuple[st.Run, st.Loop]:
    loop = st.supervised(**options)
    data = [torch.ones(1, 2)] * batches
    assert loop.begin is not None
    run: st.Run = loop.begin(loop.options, Model(), data, data[:2])
    run.limits = Limits(max_epochs=2) if limits is None else limits
    run.ready()
    return run, loop


def walked(
    run: st.Run, loop: st.Loop, progress: Progress, clock: Clock, *, until: str = "", visit: int = 1
) -> Callbacks:
    """Drive the run inside the progress, half a second a batch; stop after a visit of a state."""
    callbacks = Callbacks(loop)
    attached = progress.attach(callbacks)
    assert all(c.point.place in ("epoch_end", "validation_end") for c in attached)

    def half_a_second(_run: Any) -> None:
        clock.now += 0.5

    callbacks.attach(half_a_second, point("step"))
    with progress:
        for state in Machine.of(loop, run, callbacks):
            visit -= state == until
            if visit == 0:
                break
    return callbacks


def plain(
    run: st.Run, loop: st.Loop, clock: Clock | None = None, **how: Any
) -> tuple[list[str], Callbacks]:
    stream, clock = io.StringIO(), clock or Clock()
    callbacks = walked(run, loop, Progress(run, loop, stream=stream, clock=clock), clock, **how)
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()
    return stream.getvalue().splitlines(), callbacks


def shown(run: st.Run, loop: st.Loop, *, width: int = 200, **how: Any) -> str:
    """Return the line as it is at a visit of a state."""
    clock = Clock()
    progress = Progress(run, loop, stream=io.StringIO(), clock=clock)
    text = ""

    def look(_run: Any) -> None:
        nonlocal text
        text = progress.text(width).plain

    callbacks = Callbacks(loop)
    callbacks.attach(look, point(how["until"], at=how.get("visit", 1), priority=-1))
    callbacks.attach(lambda _run: setattr(clock, "now", clock.now + 0.5), point("step"))
    with progress:
        for _ in Machine.of(loop, run, callbacks):
            if text:
                break
    return " ".join(word for word in text.split() if word.strip("#-"))


@contextmanager
def terminal() -> Iterator[tuple[TextIO, Callable[[], str]]]:
    """Give a stream that is a terminal, and what was written to it."""
    parent, child = pty.openpty()
    stream = os.fdopen(child, "w")

    def read() -> str:
        stream.write(END)
        stream.flush()
        found = ""
        while not found.endswith(END):
            found += os.read(parent, 1 << 20).decode(errors="replace")
        return found.removesuffix(END)

    try:
        yield stream, read
    finally:
        stream.close()
        os.close(parent)


@pytest.fixture(autouse=True)
def a_terminal_that_is_not_dumb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")


def test_off_a_terminal_a_line_is_written_after_each_validation_and_epoch() -> None:
    run, loop = supervised(val_check_interval=2)
    assert plain(run, loop)[0] == [
        "epoch 1/2  batch 2/4  step 2  val_acc 0.970  val_loss 0.110  2.00 batches/s",
        "epoch 1/2  step 4  val_acc 0.970  val_loss 0.110  2.00 batches/s",
        "epoch 2/2  batch 2/4  step 6  val_acc 0.970  val_loss 0.110  2.00 batches/s",
        "epoch 2/2  step 8  val_acc 0.970  val_loss 0.110  2.00 batches/s",
    ]


def test_the_limit_of_batches_is_the_epochs_length() -> None:
    run, loop = supervised(batches=9, limit_train_batches=3, limit_val_batches=1)
    assert shown(run, loop, until="batch_end", visit=2) == (
        "epoch 1/2 batch 2/3 step 2 loss 0.250 2.00 batches/s 0:02 left batch_end"
    )
    run, loop = supervised(batches=9, limit_train_batches=3, limit_val_batches=1)
    assert "validation 1/1" in shown(run, loop, until="validation_step")


def test_a_validation_has_its_own_count() -> None:
    run, loop = supervised()
    assert shown(run, loop, until="validation_step", visit=2) == (
        "epoch 1/2 validation 2/2 step 4 loss 0.250 2.00 batches/s 0:02 left validation_step"
    )


def test_the_time_left_is_that_to_the_first_limit() -> None:
    run, loop = supervised(limits=Limits(max_epochs=100, max_steps=6, max_time=1e6))
    assert "0:02 left" in shown(run, loop, until="batch_end", visit=2)
    run, loop = supervised(limits=Limits(max_epochs=100))
    assert "3:19 left" in shown(run, loop, until="batch_end", visit=2)
    run, loop = supervised(limits=Limits(max_time=90_000))
    assert "1 d 1 h left" in shown(run, loop, until="batch_start")


def test_no_callback_is_attached_to_a_state_of_a_batch() -> None:
    run, loop = supervised()
    callbacks = plain(run, loop)[1]
    places = [c.point.place for c in callbacks if c.label == "Progress.line"]
    assert places == ["epoch_end", "validation_end"]
    with terminal() as (stream, _):
        assert Progress(run, loop, stream=stream).attach(Callbacks(loop)) == []


def test_a_resumed_run_is_where_it_was_and_its_rate_counts_new_work_only() -> None:
    run, loop = supervised(batches=100)
    plain(run, loop, until="batch_end", visit=60)
    clock = Clock(now=1000.0)
    progress = Progress(run, loop, stream=io.StringIO(), clock=clock)
    with progress:
        assert progress.text(200).plain.startswith("epoch 1/2  batch  60/100  #########-------  ")
        assert "batches/s" not in progress.text(200).plain
        clock.now += 2.0
        run.train_loader.position += 3  # type: ignore[attr-defined]
        assert "1.50 batches/s" in progress.text(200).plain
        assert "1:31 left" in progress.text(200).plain  # 137 batches


def test_without_the_baseline_the_rate_would_be_too_high() -> None:
    run, loop = supervised(batches=100)
    plain(run, loop, until="batch_end", visit=60)
    clock = Clock()
    progress = Progress(run, loop, stream=io.StringIO(), clock=clock)
    with progress:
        progress._pace._batches = 0
        clock.now += 2.0
        assert "30.0 batches/s" in progress.text(200).plain


@dataclass(kw_only=True)
class Steps(st.Run):
    loader: st.Loader | None = None


def custom(*, length: int = 6) -> st.Loop:
    def work(run: Steps) -> None:
        run.step += 1
        run.log("reward", run.step / 2)
        if run.loader is not None:
            run.batch = next(run.loader, None)

    def count(run: Steps) -> None:
        run.epoch += 1

    return st.Loop(
        initial="step",
        states=(
            st.State("step", work),
            st.State("epoch_end", count),
            st.State("done", final=True),
        ),
        transitions=(
            st.Transition("step", "epoch_end", when=lambda run: run.step % 3 == 0),
            st.Transition("step", "step"),
            st.Transition("epoch_end", "done", when=lambda run: run.step >= length),
            st.Transition("epoch_end", "step"),
        ),
    )


def test_a_loop_of_its_own_shows_epoch_step_metrics_and_state() -> None:
    assert plain(Steps(), custom())[0] == [
        "epoch 1  step 3  reward 1.50  2.00 steps/s",
        "epoch 2  step 6  reward 3.00  2.00 steps/s",
    ]
    assert shown(Steps(), custom(), until="step", visit=2) == (
        "epoch 0 step 2 reward 1.00 2.00 steps/s step"
    )


def test_any_loader_of_a_run_is_counted_and_an_epoch_that_is_over_keeps_its_number() -> None:
    run = Steps(loader=st.resumable([1, 2, 3]))
    run.limits = Limits(max_epochs=5)
    assert plain(run, custom())[0] == [
        "epoch 1/5  step 3  reward 1.50  2.00 batches/s",
        "epoch 2/5  batch 2/3  step 6  reward 3.00  1.67 batches/s",
    ]


def test_an_unknown_length_has_no_total() -> None:
    class Stream:
        def __iter__(self) -> Iterator[int]:
            return iter(range(50))

    run = Steps(loader=st.resumable(Stream()))
    assert shown(run, custom(), until="step", visit=2) == (
        "epoch 1 batch 2 step 2 reward 1.00 2.00 steps/s step"
    )


def test_an_evaluation_has_no_epochs() -> None:
    from statetrain.supervised.evaluation import evaluation

    loop = evaluation("validate")
    assert loop.begin is not None
    run = loop.begin(loop.options, Model(), [torch.ones(1, 2)] * 3, limit_batches=2)
    run.limits = Limits(max_epochs=7)
    run.ready()
    progress = Progress(run, loop, stream=io.StringIO(), clock=Clock())
    with progress:
        states = iter(Machine.of(loop, run))
        next(states), next(states)
        assert progress.text(100).plain.split()[:4] == ["batch", "1/2", "########--------", "step"]


def test_what_matters_least_is_left_out_of_a_narrow_line() -> None:
    run, loop = supervised(limits=Limits(max_epochs=2))
    plain(run, loop, until="validation_end")
    progress = Progress(run, loop, stream=io.StringIO(), clock=Clock())
    progress._pace.begin()
    lines = {width: progress.text(width).plain for width in (100, 84, 60, 40, 10)}
    assert {width: line.rstrip() for width, line in lines.items()} == {
        100: "epoch 1/2  validation 2/2  step 4  loss 0.250  val_acc 0.970  val_loss 0.110  "
        "validation_end",
        84: "epoch 1/2  validation 2/2  step 4  loss 0.250  val_acc 0.970  validation_end",
        60: "epoch 1/2  validation 2/2  step 4  loss 0.250",
        40: "epoch 1/2  validation 2/2  step 4",
        10: "epoch 1/2",
    }
    assert all(len(line) <= width for width, line in lines.items())


def test_nothing_is_read_from_a_device() -> None:
    run = Steps()
    run.metrics = {
        "far": torch.ones((), device="meta"),  # reading it raises, as a CUDA tensor's would wait
        "near": torch.tensor(0.5, requires_grad=True),
        "many": torch.ones(2),
        "words": "fine",
        "count": 7,
    }
    progress = Progress(run, custom(), stream=io.StringIO(), clock=Clock())
    assert progress.text(100).plain.split() == ["epoch", "0", "step", "0", "near", "0.500",
                                                "count", "7"]  # fmt: skip


def test_a_minute_without_news_gives_a_line_and_a_minute_without_change_none() -> None:
    run, stream, clock = Steps(), io.StringIO(), Clock()
    run.limits = Limits(max_steps=10)
    with Progress(run, custom(), stream=stream, clock=clock) as progress:
        run.step = 4
        progress.tick()
        assert stream.getvalue() == ""
        clock.now += SILENCE
        progress.tick()
        assert stream.getvalue() == "epoch 0  step 4  15.0 s/step\n"
        clock.now += SILENCE
        progress.tick()
        assert stream.getvalue().count("\n") == 1


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == THREAD]


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
def test_the_thread_is_a_daemon_and_ends_with_the_block(error: type[BaseException] | None) -> None:
    progress = Progress(Steps(), custom(), stream=io.StringIO())
    try:
        with progress:
            assert [each.daemon for each in threads()] == [True]
            if error is not None:
                raise error
    except (KeyboardInterrupt, ValueError) as raised:
        assert type(raised) is error  # noqa: PT017 - the block hands it on
    assert threads() == []


def test_a_display_that_fails_ends_alone_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Gone(io.StringIO):
        def write(self, _text: str) -> int:
            raise BrokenPipeError("gone")

    run, loop = supervised()
    walked(run, loop, Progress(run, loop, stream=Gone()), Clock())
    assert run.state == "done"
    assert caplog.messages == ["progress is not shown any more: BrokenPipeError('gone')"]


DRAWS = """
import os, pty, random, sys
import torch
import statetrain as st
from statetrain.progress import Progress
loop = st.Loop(initial="a", states=(st.State("a"), st.State("b", final=True)),
               transitions=st.path("a", "b"))
stream = os.fdopen(pty.openpty()[1], "w")
before = random.getstate(), torch.get_rng_state()
if sys.argv[1] == "bare":
    import rich.console
else:
    with Progress(st.Run(), loop, stream=stream) as progress:
        progress.refresh()
        assert progress.console is not None
same = random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
print("same" if same else "drawn", file=sys.__stdout__)
"""


@pytest.mark.parametrize(("how", "found"), [("progress", "same"), ("bare", "drawn")])
def test_no_random_number_is_drawn_although_rich_draws_one(how: str, found: str) -> None:
    command = [sys.executable, "-c", DRAWS, how]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    assert out.stdout == f"{found}\n"


def test_in_a_terminal_the_line_is_drawn_in_place_and_stays_at_the_end() -> None:
    run, loop = supervised(limits=Limits(max_epochs=2))
    with terminal() as (stream, written):
        progress = Progress(run, loop, stream=stream, clock=Clock())
        with progress:
            progress.refresh()
            first = written()
            run.step = 41
            progress.refresh()
            second = written()
        last = written()
    assert "epoch 1/2" in first
    assert "\n" not in first + second
    assert "\x1b[2K" in second
    assert "step 41" in second
    assert "in 0:00" in last
    assert "\n" in last


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
def test_the_terminal_is_left_clean(error: type[BaseException] | None) -> None:
    streams = (sys.stdout, sys.stderr)
    run, loop = supervised()
    with terminal() as (stream, written):
        try:
            with Progress(run, loop, stream=stream):
                shows_cursor = written().rpartition("\x1b[?25")[2][:1] == "h"
                if error is not None:
                    raise error
        except (KeyboardInterrupt, ValueError) as raised:
            assert type(raised) is error  # noqa: PT017
        text = written()
    assert shows_cursor  # also in the block: a SIGKILL leaves the terminal as it is
    assert text.rpartition("\x1b[?25")[2][:1] == "h"
    assert (sys.stdout, sys.stderr) == streams


@contextmanager
def standard_streams(stream: TextIO) -> Iterator[None]:
    before = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = stream
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def test_prints_and_logs_stand_above_the_line() -> None:
    run, loop = supervised()
    root = logging.getLogger()
    with terminal() as (stream, written), standard_streams(stream):
        handler = logging.StreamHandler(stream)
        root.addHandler(handler)
        try:
            with Progress(run, loop) as progress:
                progress.refresh()
                written()
                print("a line of the user's")  # noqa: T201 - what is tested
                printed = written()
                root.warning("a line of the log")
                logged = written()
            assert handler.stream is stream
        finally:
            root.removeHandler(handler)
    for text, words in ((printed, "a line of the user's"), (logged, "a line of the log")):
        head, found, tail = text.partition(words)
        assert found
        assert "\x1b[2K" in head  # the line is taken away
        assert tail.startswith("\r\n")
        assert "epoch 1/2" in tail  # and drawn again below


def test_what_is_printed_into_a_file_gets_there() -> None:
    run, loop = supervised()
    file = io.StringIO()
    before = sys.stdout
    with terminal() as (stream, written):
        try:
            sys.stdout = file
            with Progress(run, loop, stream=stream):
                print("for the file")  # noqa: T201
        finally:
            sys.stdout = before
        assert "for the file" not in written()
    assert file.getvalue() == "for the file\n"


def test_an_unfinished_line_of_the_users_is_not_lost() -> None:
    run, loop = supervised()
    with terminal() as (stream, written), standard_streams(stream):
        with Progress(run, loop):
            print("no newline", end="")  # noqa: T201
        assert "no newline" in written()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_the_bare_streams() -> None:
    run, loop = supervised()
    with terminal() as (stream, _), standard_streams(stream), Progress(run, loop):
        child = os.fork()
        if child == 0:
            os._exit(0 if sys.stdout is stream and sys.stderr is stream else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert sys.stdout is not stream  # the negative control


def test_two_progresses_do_not_draw_over_each_other() -> None:
    run, loop = supervised()
    with terminal() as (stream, _), standard_streams(stream), Progress(run, loop):
        assert Progress(run, loop).console is None


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    run, loop = supervised()
    with terminal() as (stream, _):
        assert Progress(run, loop, stream=stream).console is None


def test_plain_lines_need_no_rich() -> None:
    script = """
import io, sys
sys.modules["rich"] = None
import statetrain as st
from statetrain.progress import Progress
loop = st.Loop(initial="a", states=(st.State("a"), st.State("b", final=True)),
               transitions=st.path("a", "b"))
stream = io.StringIO()
with Progress(st.Run(), loop, stream=stream) as progress:
    progress.line()
print(stream.getvalue(), end="")
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout == "step 0\n"
