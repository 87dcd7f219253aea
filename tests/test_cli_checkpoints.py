from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import gan, interrupt, rich

import statetrain as st
from statetrain.cli.main import main
from statetrain.cli.stored import split
from statetrain.cli.text import age, printable, size, table
from statetrain.persist import container
from statetrain.persist.store import Store

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = {"rich": rich, "gan": gan}

# a program with a module, a run and a registered class that exist nowhere else
SCRIPT = """\
from dataclasses import dataclass

import torch

import statetrain as st


class Strange(torch.nn.Linear):
    pass


@dataclass
class Meter:
    total: float


st.register(Meter, "somebody.Meter")


@dataclass(kw_only=True)
class Work(st.Run):
    net: torch.nn.Module
    meter: Meter


def work(run):
    run.step += 1


loop = st.Loop(
    initial="work",
    states=[st.State("work", work), st.State("done", final=True)],
    transitions=[
        st.Transition("work", "done", when=lambda run: run.step >= 2),
        st.Transition("work", "work"),
    ],
)
trainer = st.Trainer(loop, seed=1, checkpoints=st.Checkpoints("ckpt", every=None), progress=False)
trainer.fit(Work(net=Strange(3, 2), meter=Meter(1.5)))
"""


def trained(name: str, url: str, states: int = 40) -> st.Trainer:
    trainer, arguments = PROGRAMS[name](st.Checkpoints(url, every="1 steps", keep=9), [])
    interrupt(trainer, states)
    trainer.progress = False
    trainer.fit(*arguments)
    return trainer


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Train each program a little, once: nothing here changes what it left, but for copies."""
    folder = tmp_path_factory.mktemp("made")
    for name in PROGRAMS:
        trained(name, str(folder / name), 70 if name == "rich" else 40)
    return {name: str(folder / name) for name in PROGRAMS}


@pytest.fixture
def damaged(tmp_path: Path) -> str:
    trained("gan", str(tmp_path / "gan"))
    return str(tmp_path / "gan")


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()


def parsed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return json.loads("\n".join(lines(capsys, *arguments, "--json")))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    assert main(arguments) == code
    _, err = capsys.readouterr()
    assert err.startswith("statetrain: ")
    assert err.count("\n") == 1
    return err.removeprefix("statetrain: ").strip()


def segment(url: str, key: str) -> Path:
    return Path(url, "data", key, "r00000.000.sts")


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", PROGRAMS)
def test_ls_lists_the_newest_first(
    made: dict[str, str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    records = Store(made[name]).records()
    header, *rows = (line.split() for line in lines(capsys, "ls", made[name]))
    assert header == ["id", "step", "epoch", "state", "size", "age", "run", "notes"]
    assert [(row[0], row[1], row[3], row[6]) for row in rows] == [
        (record.id, str(record.step), record.state, record.run_id[:8]) for record in records
    ]
    assert len(rows) > 2


def test_ls_in_json_holds_what_the_table_does(
    made: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = parsed(capsys, "ls", made["rich"])
    rows = [line.split() for line in lines(capsys, "ls", made["rich"])[1:]]
    assert found["url"] == made["rich"]
    assert rows == [
        [c["id"], str(c["step"]), str(c["epoch"]), c["state"], size(c["nbytes"]), row[5],
         c["run_id"][:8]]
        for c, row in zip(found["checkpoints"], rows, strict=True)
    ]  # fmt: skip
    assert {c["damage"] for c in found["checkpoints"]} == {None}
    assert len({c["epoch"] for c in found["checkpoints"]}) > 1  # it is read, and it changes


def test_ls_and_show_read_a_remote_store(capsys: pytest.CaptureFixture[str]) -> None:
    url = "memory://cli-checkpoints"
    trained("gan", url)
    (newest, *older) = parsed(capsys, "ls", url)["checkpoints"]
    assert older
    assert parsed(capsys, "show", url)["id"] == newest["id"]
    assert parsed(capsys, "show", f"{url}@{older[0]['id']}")["id"] == older[0]["id"]


def test_ls_tells_what_is_pinned(damaged: str, capsys: pytest.CaptureFixture[str]) -> None:
    key = Store(damaged).records()[1].id
    Path(damaged, "keep").mkdir()
    Path(damaged, "keep", key).touch()
    pinned = [c["id"] for c in parsed(capsys, "ls", damaged)["checkpoints"] if c["pinned"]]
    assert pinned == [key]
    assert [line.split()[-1] == "pinned" for line in lines(capsys, "ls", damaged)[1:4]] == [
        False, True, False
    ]  # fmt: skip


def test_ls_marks_a_damaged_record_index_or_size(
    damaged: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [record.id for record in Store(damaged).records()]
    flip(Path(damaged, "commits", f"{keys[0]}.stc"), 40)
    flip(segment(damaged, keys[1]), -200)
    segment(damaged, keys[2]).write_bytes(b"")
    segment(damaged, keys[3]).unlink()
    found = parsed(capsys, "ls", damaged)["checkpoints"]
    assert [c["id"] for c in found] == keys
    damage = [c["damage"] for c in found]
    assert damage[0] == "the commit record is damaged: its bytes are not what was written"
    assert damage[1] == "the segment is damaged: its index is damaged"
    assert damage[2] == "the segment is damaged: it is 0 bytes long, cut off"
    assert "is missing" in damage[3]
    assert {*damage[4:]} == {None}
    table = lines(capsys, "ls", damaged)[1:]
    assert ["damaged: " in line for line in table] == [each is not None for each in damage]


def test_show_passes_over_a_damaged_newest_and_says_so(
    damaged: str, capsys: pytest.CaptureFixture[str]
) -> None:
    newest, second = Store(damaged).records()[:2]
    flip(segment(damaged, newest.id), -200)
    assert main(["show", damaged, "--json"]) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out)["id"], json.loads(out)["newer"]) == (second.id, 1)
    assert err == (
        f"statetrain: passed over {newest.id}: the segment is damaged: its index is damaged\n"
    )


def test_show_refuses_a_damaged_one_that_is_asked_for_by_its_id(
    damaged: str, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = Store(damaged).records()[0]
    flip(segment(damaged, newest.id), -200)
    assert refused(capsys, "show", f"{damaged}@{newest.id}") == (
        f"checkpoint {newest.id} is damaged: the segment is damaged: its index is damaged: see "
        f"`statetrain ls {damaged}` for others"
    )


def test_no_tensor_data_is_read(damaged: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = [lines(capsys, "show", damaged, *how) for how in ([], ["--tensors"], ["--tree"])]
    path = segment(damaged, Store(damaged).records()[0].id)
    flip(path, 64)
    with pytest.raises(st.CheckpointError, match="not what was written"), path.open("rb") as file:
        container.read(file)  # the control: the byte counts
    after = [lines(capsys, "show", damaged, *how) for how in ([], ["--tensors"], ["--tree"])]
    assert [*map(without_age, before)] == [*map(without_age, after)]


def without_age(page: list[str]) -> list[str]:
    return [line for line in page if "saved" not in line]


def test_show_is_a_page_of_what_the_run_was(
    made: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    record = Store(made["rich"]).records()[0]
    page = lines(capsys, "show", made["rich"])
    assert page[0] == f"checkpoint   {record.id}"
    labels = [line[:12].strip() for line in page if line[:12].strip()]
    assert labels == [
        "checkpoint", "position", "model", "optimizer", "objects", "random", "metrics", "fields",
        "callbacks", "loop", "options", "limits",
    ]  # fmt: skip
    text = "\n".join(line[13:] for line in page)
    for words in (
        f"state {record.state!r}",
        f"step {record.step}, epoch 1, batch",
        "module: 74 parameters in 8 tensors, float32, 7 buffers",
        "optimizers[0]: AdamW, lr 0.005",
        "schedulers[1].scheduler: ReduceLROnPlateau",
        "train_loader: Loader, epoch 1, ",
        "python, numpy, torch",
        "note=",
        "Best: best=",
        "at state 'batch_start': rich.<locals>.skip #0: ",
        "13 states from 'epoch_start', 32 transitions; replays forward",
        "accumulate_grad_batches=2, gradient_clip_val=1.0",
        "max_epochs=4",
    ):
        assert words in text
    assert max(map(len, page)) <= 100


def test_show_in_json_holds_what_the_run_was(capsys: pytest.CaptureFixture[str]) -> None:
    url = "memory://cli-facts"
    trainer = trained("gan", url, 31)
    run, shown = trainer.run, parsed(capsys, "show", url)
    assert run is not None
    for name in ("state", "step", "epoch", "batch_nb", "seed"):
        assert shown[name] == getattr(run, name)
    assert shown["metrics"].keys() == run.metrics.keys()
    assert shown["metrics"]["note"] == run.metrics["note"]
    assert {t["name"]: t["kind"] for t in shown["things"]} == {
        "g": "module", "d": "module", "opt_g": "optimizer", "opt_d": "optimizer",
        "slower": "stateful", "loader": "stateful", "noise": "generator",
        "temperature": "parameter",
    }  # fmt: skip
    assert shown["fields"] == ["fake", "loss"]
    assert [name for name, *_ in shown["loop"]["states"]] == list(trainer.loop.names)
    assert shown["limits"]["max_epochs"] == 2
    assert shown["versions"] == {"torch": str(torch.__version__)}


def test_a_checkpoint_is_found_by_prefix_and_by_step(
    made: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    records = Store(made["gan"]).records()
    for record in records:
        prefix = record.id[: len("g000001-n000001-")]
        assert parsed(capsys, "show", f"{made['gan']}@{prefix}")["id"] == record.id
    for step in {record.step for record in records}:
        newest = next(record for record in records if record.step == step)
        assert parsed(capsys, "show", f"{made['gan']}@step={step}")["id"] == newest.id


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("g000009", "no checkpoint 'g000009' at {url}: "),
        ("{first}x", "no checkpoint '{first}x' at {url}: did you mean '{first}'?"),
        ("g0", " checkpoints begin with 'g0': write more of one of {first}, "),
        ("step=999", "no checkpoint of step 999 at {url}: the nearest is of step {step}"),
        ("step=now", "step='now' is no step: write a number, as in @step=120"),
    ],
)
def test_a_wrong_id_is_refused_with_what_there_is(
    made: dict[str, str], wanted: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = Store(made["gan"]).records()[0]
    names = {"url": made["gan"], "first": newest.id, "step": newest.step}
    found = refused(capsys, "show", f"{made['gan']}@{wanted.format(**names)}")
    assert message.format(**names) in found


def test_a_wrong_place_is_refused_with_what_is_near(
    made: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(made["gan"]).parent
    (tmp_path / "file").touch()
    for command in ("ls", "show"):
        assert refused(capsys, command, f"{folder}/ganz") == (
            f"no folder '{folder}/ganz': did you mean 'gan'?"
        )
        assert refused(capsys, command, f"{tmp_path}/a/b") == (
            f"no folder '{tmp_path}/a/b': give what the run has as checkpoints="
        )
        assert refused(capsys, command, f"{tmp_path}/file") == (
            f"'{tmp_path}/file' is a file: give the folder of the checkpoints"
        )
        assert "nowhere" in refused(capsys, command, "nowhere://there")


def test_a_place_without_checkpoints_is_exit_code_1_of_ls_and_an_error_of_show(
    made: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(made["gan"]).parent
    message = f"no checkpoints at '{tmp_path}': nothing was saved there yet"
    assert refused(capsys, "ls", str(tmp_path), code=1) == message
    assert refused(capsys, "show", str(tmp_path)) == message
    assert refused(capsys, "ls", str(folder), code=1) == (
        f"no checkpoints at '{folder}': there are some in {folder}/gan, {folder}/rich"
    )
    assert refused(capsys, "ls", "memory://cli-nothing", code=1).startswith("no checkpoints")
    assert main(["ls", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"url": str(tmp_path), "checkpoints": []}


@pytest.mark.parametrize("name", PROGRAMS)
def test_tensors_are_all_of_the_index_with_their_bytes(
    made: dict[str, str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(made[name])
    with store.open(store.records()[0]) as file:
        index = container.read_index(file)
    shown = parsed(capsys, "show", made[name], "--tensors")["tensors"]
    by_name = {each["name"]: each for each in shown}
    assert len(by_name) == len(shown)
    assert {key: (info.dtype, [*info.shape]) for key, info in index.tensors.items()} == {
        key: (by_name[key]["dtype"], by_name[key]["shape"]) for key in index.tensors
    }
    header, *rows, total = lines(capsys, "show", made[name], "--tensors")
    assert header.split() == ["name", "dtype", "shape", "bytes"]
    assert [row.split()[0] for row in rows] == list(by_name)
    nbytes = sum(each["nbytes"] for each in shown)
    assert sum(int(row.split()[-1]) for row in rows) == nbytes
    assert total.startswith(f"{len(rows)} tensors, {nbytes} bytes")


def test_the_tree_holds_every_field_as_text_and_as_json(
    made: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = lines(capsys, "show", made["gan"], "--tree")
    tree = parsed(capsys, "show", made["gan"], "--tree")["tree"]
    assert tree["class"] == "statetrain.Snapshot"
    assert [line.split(":")[0] for line in text if line[0] != " "] == list(tree["state"])
    inner = [line[2:].split(":")[0] for line in text if line[:2] == "  " and line[2] != " "]
    assert inner[: len(tree["state"]["run"])] == list(tree["state"]["run"])
    python = tree["state"]["random"]["python"]
    assert len(python[1]) == 625  # all of it in JSON, its beginning in the text
    assert any("… 619 more" in line for line in text)


def test_the_tree_tells_a_shared_object_and_does_not_repeat_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared: list[Any] = [torch.zeros(2), {"a": 1}]
    for _ in range(40):
        shared = [shared, shared]  # 2**40 lines if repeated
    store = Store(tmp_path)
    store.save(lambda file: container.write({"x": shared}, file), step=0, state="odd")
    text = lines(capsys, "show", str(tmp_path), "--tree")
    assert text[2].strip() == "0: list of 2"
    assert text[-1].strip() == "1: the same as x/0"
    assert len(text) < 100
    rows = lines(capsys, "show", str(tmp_path), "--tensors")
    assert len(rows) == 3


def test_what_is_no_snapshot_is_listed_and_its_tree_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(tmp_path)
    odd = {"\x1b[2Jkey": float("nan"), (1, 2): "\n", "weights": torch.zeros(3)}
    store.save(lambda file: container.write(odd, file), step=7, state="a\x1b[2Jb")
    (listed,) = parsed(capsys, "ls", str(tmp_path))["checkpoints"]
    assert (listed["step"], listed["epoch"], listed["damage"]) == (7, None, None)
    assert "--tree" in refused(capsys, "show", str(tmp_path))
    text = lines(capsys, "show", str(tmp_path), "--tree")
    assert text == [
        "\\x1b[2Jkey: nan",
        "tuple [1, 2]: '\\n'",
        "weights: float32 [3]",
    ]
    assert "\x1b" not in "".join(lines(capsys, "ls", str(tmp_path)))


def test_a_checkpoint_is_shown_without_the_program_that_made_it(tmp_path: Path) -> None:
    def process(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )

    script = tmp_path / "gone.py"
    script.write_text(SCRIPT)
    done = process("gone.py")
    assert done.returncode == 0, done.stderr
    script.unlink()
    shown = process("-m", "statetrain.cli.main", "show", "ckpt", "--tree")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "  meter: somebody.Meter" in shown.stdout.splitlines()
    assert "    total: 1.5" in shown.stdout.splitlines()
    with pytest.raises(st.CheckpointError, match=r"somebody\.Meter"):  # the control: not known here
        Store(tmp_path / "ckpt").newest(container.read)


def test_the_url_is_split_from_the_id_at_the_last_at(tmp_path: Path) -> None:
    (tmp_path / "a@b").mkdir()
    assert [
        split(text)
        for text in (
            "runs/x",
            "runs/x@g000001",
            "memory://x@step=3",
            "sftp://me@host/runs",
            f"{tmp_path}/a@b",
            f"{tmp_path}/a@b@g0",
        )
    ] == [
        ("runs/x", None),
        ("runs/x", "g000001"),
        ("memory://x", "step=3"),
        ("sftp://me@host/runs", None),
        (f"{tmp_path}/a@b", None),
        (f"{tmp_path}/a@b", "g0"),
    ]


def test_sizes_ages_and_tables_are_one_word_a_cell() -> None:
    assert [size(n) for n in (0, 1023, 1024, 38033, 5 << 20, 3 << 40)] == [
        "0B", "1023B", "1.0KiB", "37.1KiB", "5.0MiB", "3.0TiB",
    ]  # fmt: skip
    assert [age(s) for s in (-5, 0, 59.9, 60, 7199, 86400 * 9)] == [
        "0s", "0s", "59s", "1m", "1h", "9d",
    ]  # fmt: skip
    assert table([("a", "step"), ("bcd", "7")], right=[1]) == ["a    step", "bcd     7"]
    assert printable("a\x1b[1m\nü") == "a\\x1b[1m\\n\\xfc"
    assert printable("zustand ü") == "zustand ü"


@pytest.mark.parametrize("command", ["ls", "show"])
def test_help_has_examples_and_exit_codes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    assert f"statetrain {command} runs/digits" in out
    assert "exit codes: 0" in out


def test_a_reader_that_goes_away_is_no_error(made: dict[str, str]) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from statetrain.cli.main import main"
    reading, writing = os.pipe()
    os.close(reading)  # as `| head` does when it has enough
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; sys.exit(main())", "show", made["gan"], "--tree"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
