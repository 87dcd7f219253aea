from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import gan, interrupt, rich
from torch import nn

import statetrain as st
from statetrain.cli import statedict
from statetrain.cli.main import main
from statetrain.persist.compare import unequal
from statetrain.persist.store import Store

LOUD = "SAFETENSORS IS NOT INSTALLED: exporting to it and importing from it are NOT tested"


@dataclass(kw_only=True)
class Net(st.Run):
    net: nn.Module


class Mixed(nn.Module):
    """Dtypes, values and layouts that a conversion would lose."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.line = nn.Linear(3, 2).to(torch.bfloat16)
        self.image = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.odd = nn.Parameter(torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("none", None)
        nn.init.constant_(self.line.bias, value)


class Tied(nn.Module):
    """Two parameters over the same memory, and one parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.out.weight = nn.Parameter(self.into.weight.data)
        self.again = nn.Linear(4, 5, bias=False)
        self.again.weight = self.into.weight
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def saved(module: nn.Module, url: Any = None, **settings: Any) -> Net:
    """Run a loop of one state with the module, and save it at its end."""
    loop = st.Loop(
        initial="go",
        states=[st.State("go", lambda run: None), st.State("end", final=True)],
        transitions=[st.Transition("go", "end")],
    )
    trainer = st.Trainer(loop, checkpoints=url, progress=False, **settings)
    done: Net = trainer.fit(Net(net=module))
    return done


def trained(program: Any, url: Any, states: int) -> Any:
    trainer, arguments = program(st.Checkpoints(url, every="1 steps", keep=9), [])
    interrupt(trainer, states)
    trainer.progress = False
    trainer.fit(*arguments)
    return trainer.run


def loaded(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        return pytest.importorskip("safetensors.torch", reason=LOUD).load_file(path)
    found: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return found


def bits(tensors: Any) -> dict[str, tuple[Any, ...]]:
    """Return dtype, shape and bytes: equal values are not enough, and NaN is equal to nothing."""
    return {
        name: (
            tensor.dtype,
            tuple(tensor.shape),
            tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist(),
        )
        for name, tensor in tensors.items()
    }


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    _, err = capsys.readouterr()
    assert err.count("\n") == 1
    return err.removeprefix("statetrain: ").strip()


def done(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[str, str]:
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr()


@pytest.fixture(params=["w.safetensors", "w.pt"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "w.safetensors":
        pytest.importorskip("safetensors", reason=LOUD)
    return tmp_path / request.param


def test_an_exported_module_is_its_state_dict_bit_for_bit(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = Mixed()
    saved(module, tmp_path / "run")
    out, err = done(capsys, "export", tmp_path / "run", file)
    found = loaded(file)
    assert bits(found) == bits(module.state_dict())
    assert all(torch.equal(found[n], t) for n, t in module.state_dict().items() if n != "odd")
    assert (len(found), err) == (6, "")
    assert out.startswith(f"wrote {file}: 6 tensors, ")
    fresh = Mixed(2.0)
    assert bits(fresh.state_dict()) != bits(found)  # the control
    fresh.load_state_dict(found)
    assert bits(fresh.state_dict()) == bits(found)


def test_a_supervised_module_is_exported_as_it_is_after_training(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = trained(rich, tmp_path / "run", 30).module
    done(capsys, "export", tmp_path / "run", file)
    assert bits(loaded(file)) == bits(module.state_dict())
    first = Store(tmp_path / "run").records()[-1]
    done(capsys, "export", f"{tmp_path}/run@{first.id}", tmp_path / "first.pt")
    assert bits(loaded(tmp_path / "first.pt")) != bits(loaded(file))  # the control: it moves


def test_several_modules_have_their_field_before_the_name_and_one_alone_has_not(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(gan, tmp_path / "run", 20)
    _, err = done(capsys, "export", tmp_path / "run", file)
    both = {f"g.{n}": t for n, t in run.g.state_dict().items()}
    both |= {f"d.{n}": t for n, t in run.d.state_dict().items()}
    assert bits(loaded(file)) == bits(both)
    assert err == "statetrain: temperature is no tensor of a module: it is not written\n"
    done(capsys, "export", tmp_path / "run", file, "--module", "g", "--force")
    assert bits(loaded(file)) == bits(run.g.state_dict())
    words = refused(capsys, "export", tmp_path / "run", tmp_path / "x.pt", "--module", "q")
    assert words == "--module 'q': no such module: there are g, d"


def test_torch_keeps_a_tie_and_safetensors_gets_a_copy_and_says_so(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = Tied()
    saved(module, tmp_path / "run")
    _, err = done(capsys, "export", tmp_path / "run", file)
    found = loaded(file)
    names = ["into.weight", "out.weight", "again.weight"]  # and not the buffer scratch
    assert bits(found) == bits(module.state_dict())
    Tied().load_state_dict(found, strict=True)
    places = {found[name].data_ptr() for name in names}
    if file.suffix == ".pt":
        assert (len(places), err) == (1, "")
    else:
        assert len(places) == 3
        assert err == "".join(
            f"statetrain: {name} shares memory with into.weight: it is written as a copy, "
            "which is not tied\n"
            for name in ("out.weight", "again.weight")
        )


def test_a_file_that_is_there_is_kept_without_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(Mixed(), tmp_path / "run")
    file = tmp_path / "w.pt"
    file.write_text("mine")
    words = refused(capsys, "export", tmp_path / "run", file)
    assert words == f"'{file}' is there already: --force replaces it"
    assert file.read_text() == "mine"
    done(capsys, "export", tmp_path / "run", file, "--force")
    assert len(loaded(file)) == 6
    assert sorted(os.listdir(tmp_path)) == ["run", "w.pt"]  # and no temporary one


def test_the_format_is_the_ending_or_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(Mixed(), tmp_path / "run")
    words = refused(capsys, "export", tmp_path / "run", tmp_path / "w.bits")
    assert words == (
        f"'{tmp_path}/w.bits' does not end in .safetensors, .pt, .pth, .bin: say which format it "
        "is with --to safetensors or --to torch"
    )
    done(capsys, "export", tmp_path / "run", tmp_path / "w.bits", "--to", "torch")
    assert len(torch.load(tmp_path / "w.bits", weights_only=True)) == 6


def test_a_dtype_that_the_format_lacks_is_an_error_that_names_the_tensor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("safetensors", reason=LOUD)
    module = nn.ParameterDict({"weight": torch.ones(2, dtype=torch.complex128)})
    saved(module, tmp_path / "run")
    words = refused(capsys, "export", tmp_path / "run", tmp_path / "w.safetensors")
    assert words == (
        "'weight' is torch.complex128, which a safetensors file cannot hold; --to torch may hold it"
    )
    assert os.listdir(tmp_path) == ["run"]
    done(capsys, "export", tmp_path / "run", tmp_path / "w.pt")
    assert torch.equal(loaded(tmp_path / "w.pt")["weight"], module.weight)


def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(Mixed(), tmp_path / "run")
    file = tmp_path / "w.pt"
    done(capsys, "export", tmp_path / "run", file)
    before = file.read_bytes()

    def full(_tensors: Any, path: str) -> None:
        Path(path).write_bytes(before[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(statedict, "_torch_written", full)
    words = refused(capsys, "export", tmp_path / "run", file, "--force")
    assert words.startswith(f"cannot write '{file}': [Errno 28] No space left on device")
    assert file.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["run", "w.pt"]


def test_safetensors_is_asked_for_where_it_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(Mixed(), tmp_path / "run")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    words = refused(capsys, "export", tmp_path / "run", tmp_path / "w.safetensors")
    assert words.startswith("safetensors is not installed: pip install safetensors")


def test_damaged_weights_are_not_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(Mixed(), tmp_path / "run")
    (record,) = Store(tmp_path / "run").records()
    path = tmp_path / "run" / record.shards[0].path
    data = bytearray(path.read_bytes())
    data[64] ^= 1
    path.write_bytes(data)
    words = refused(capsys, "export", tmp_path / "run", tmp_path / "w.pt")
    assert words.startswith(f"checkpoint {record.id}: the segment is damaged: bytes 64 to ")
    assert os.listdir(tmp_path) == ["run"]


def test_a_run_starts_with_the_bits_of_an_imported_file(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Mixed(3.0)
    saved(source, tmp_path / "run")
    done(capsys, "export", tmp_path / "run", file)
    out, _ = done(capsys, "import", file, tmp_path / "first")
    assert out.startswith("stored 6 tensors, ")
    fresh = Mixed(4.0)
    assert bits(fresh.state_dict()) != bits(source.state_dict())  # the control
    saved(fresh, init_from=tmp_path / "first")
    assert bits(fresh.state_dict()) == bits(source.state_dict())
    assert (
        fresh.image.stride() == source.image.stride()
    )  # the module's own, as safetensors has none
    done(capsys, "export", tmp_path / "first", file, "--force")
    assert bits(loaded(file)) == bits(source.state_dict())


def test_a_state_dict_with_tied_names_is_imported_and_stays_tied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, fresh = Tied(), Tied()
    torch.save(source.state_dict(), tmp_path / "w.pt")
    done(capsys, "import", tmp_path / "w.pt", tmp_path / "first")
    fresh.scratch.fill_(5.0)
    saved(fresh, init_from=tmp_path / "first")
    assert bits(fresh.state_dict()) == bits(source.state_dict())
    assert fresh.again.weight is fresh.into.weight
    assert fresh.scratch.tolist() == [5.0, 5.0]  # no state_dict has it
    untied = {**source.state_dict(), "again.weight": torch.zeros(5, 4)}
    torch.save(untied, tmp_path / "other.pt")
    done(capsys, "import", tmp_path / "other.pt", tmp_path / "second")
    with pytest.raises(st.CheckpointError, match=r"again\.weight: a parameter only in the check"):
        saved(Tied(), init_from=tmp_path / "second")


def test_several_modules_and_compiled_ones_start_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(gan, tmp_path / "run", 20)
    done(capsys, "export", tmp_path / "run", tmp_path / "w.pt")
    done(capsys, "import", tmp_path / "w.pt", tmp_path / "first")
    trainer, arguments = gan(st.Checkpoints(tmp_path / "next", every=None), [])
    trainer.init_from, trainer.progress = str(tmp_path / "first"), False
    interrupt(trainer, 1)
    trainer.fit(*arguments)
    assert not unequal(dict(trainer.run.g.state_dict()), dict(run.g.state_dict()))
    assert not unequal(dict(trainer.run.d.state_dict()), dict(run.d.state_dict()))
    torch.save({f"_orig_mod.{n}": t for n, t in Mixed(6.0).state_dict().items()}, tmp_path / "c.pt")
    done(capsys, "import", tmp_path / "c.pt", tmp_path / "compiled")
    fresh = Mixed()
    saved(fresh, init_from=tmp_path / "compiled")
    assert fresh.line.bias.tolist() == [6.0, 6.0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("odd"), "run.net.odd: a parameter only in this run"),
        (lambda d: d.pop("count"), "run.net.count: a buffer only in this run"),
        (
            lambda d: d.update(more=torch.ones(1)),
            "run.net.more: a parameter only in the ch",
        ),
        (lambda d: d.update(odd=torch.ones(4).double()), r"run.net.odd: \(4,\) torch.float64 in"),
        (lambda d: d.update(odd=torch.ones(5)), r"run.net.odd: \(5,\) torch.float32 in the"),
    ],
)
def test_a_file_that_does_not_fit_the_module_is_refused(
    change: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = Mixed().state_dict()
    change(state)
    torch.save(state, tmp_path / "w.pt")
    done(capsys, "import", tmp_path / "w.pt", tmp_path / "first")
    fresh = Mixed(8.0)
    with pytest.raises(st.CheckpointError, match=words):
        saved(fresh, init_from=tmp_path / "first")
    assert fresh.line.bias.tolist() == [8.0, 8.0]  # nothing was changed


def test_no_training_goes_on_from_imported_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(Mixed().state_dict(), tmp_path / "w.pt")
    place = tmp_path / "first"
    done(capsys, "import", tmp_path / "w.pt", place)
    for settings in ({"url": place}, {"url": tmp_path / "new", "resume": place}):
        with pytest.raises(st.CheckpointError, match="no run to go on from: give its"):
            saved(Mixed(), **settings)
    for command in ("ls", "show"):
        assert "imported" in done(capsys, command, place)[0]


def test_import_refuses_a_place_with_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(Mixed(), tmp_path / "run")
    torch.save(Mixed().state_dict(), tmp_path / "w.pt")
    before = Store(tmp_path / "run").ids()
    words = refused(capsys, "import", tmp_path / "w.pt", tmp_path / "run")
    assert words == f"{tmp_path}/run holds checkpoints already ({before[0]}): name a new place"
    assert Store(tmp_path / "run").ids() == before


class Bomb:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("exploded",))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"x": Bomb()}, "is no torch file of tensors: "),
        ({"epoch": 3, "x": torch.ones(1)}, "has a int as 'epoch', where a state dict has a tensor"),
        ({}, "holds no named tensors but a dict"),
        (torch.ones(3), "holds no named tensors but a Tensor"),
    ],
)
def test_import_takes_named_tensors_and_runs_nothing(
    content: Any,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(content, "w.pt")
    assert words in refused(capsys, "import", "w.pt", "first")
    assert os.listdir() == ["w.pt"]


def test_a_file_that_is_cut_off_or_missing_is_no_file_of_tensors(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, "import", file, tmp_path / "first").startswith(f"cannot read '{file}'")
    saved(Mixed(), tmp_path / "run")
    done(capsys, "export", tmp_path / "run", file)
    file.write_bytes(file.read_bytes()[:200])
    assert "file of tensors: " in refused(capsys, "import", file, tmp_path / "first")
    assert not (tmp_path / "first").exists()
