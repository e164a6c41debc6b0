from __future__ import annotations

import copy
import fnmatch
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.errors import FormatError, UnsupportedValueError
from holdfast.events import Event, Warned
from holdfast.format import codecs
from holdfast.integrations.torch.tensors import DTYPES, INTEGERS, TorchBackend
from holdfast.state.adapters import HANDED_OVER
from holdfast.state.capture import capture_objects
from holdfast.state.capture_cache import CaptureCache
from holdfast.state.leaves import ArraySpec
from holdfast.state.match.compare import Comparison
from holdfast.state.match.matching import match_objects
from holdfast.state.match.targets import At
from places import DATA, PROGRAMS
from state_trip import bring_back, match, store
from torch_models import model, raw, same_state, train

# Tensors


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype not in INTEGERS], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)], ids=str)
def test_tensors_of_all_types_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape))
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (count * dtype.itemsize,), dtype=torch.uint8)
    tensor = data.view(dtype).reshape(shape)
    live = torch.zeros_like(data).view(dtype).reshape(shape)
    stored = store(live=tensor, new=tensor.clone())
    assert stored.specs["live"] == ArraySpec(DTYPES[dtype], shape)
    objects: dict[str, Any] = {"live": live, "new": None}
    bring_back(stored, objects)
    assert objects["live"] is live
    assert raw(live) == raw(tensor)
    assert same_state(objects["new"], tensor)


def test_forms_of_memory_are_seen_through() -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    conjugate = torch.randn(3, dtype=torch.complex64).conj()
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    tensors = [
        base.permute(2, 0, 1),
        base[:, ::2],
        base[0, 0].expand(3, 4),
        image,
        conjugate,
        conjugate.imag,
    ]
    stored = store(all=tensors)
    assert [stored.data[f"all/{n}"] for n in range(6)] == [raw(tensor) for tensor in tensors]
    live = [
        torch.zeros(4, 3, 2).permute(0, 2, 1),
        torch.zeros(2, 4, 4)[:, ::2],
        torch.zeros(4, 3).T,
        torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.zeros(3, dtype=torch.complex64).conj(),
        torch.zeros(3, dtype=torch.complex64).conj().imag,
    ]
    objects = {"all": list(live)}
    bring_back(stored, objects)
    for left, right, before in zip(objects["all"], tensors, live, strict=True):
        assert left is before
        assert torch.equal(left, right)
    assert live[3].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", [(5, 1), (1, 5), (1, 5, 1), (1, 1), (1,), ()], ids=str)
def test_the_bytes_of_contiguous_tensors_are_their_own(shape: tuple[int, ...]) -> None:
    """Dimensions of one have any stride, and the tensor is contiguous all the same."""
    strides = tuple(77 if length == 1 else 1 for length in shape)
    live = torch.zeros(100).as_strided(shape, strides)
    assert live.is_contiguous()
    values = torch.rand(shape)
    assert TorchBackend().address(live) == live.data_ptr()
    TorchBackend().copy_in(live, memoryview(raw(values)))
    assert torch.equal(live, values)


def _crowded() -> list[torch.Tensor]:
    """Tensors of 2 x 3 whose elements are partly the same memory."""
    return [torch.ones(1).expand(2, 3), torch.ones(3).expand(2, 3), torch.ones(4).as_strided((2, 3), (1, 1))]


def _distinct() -> list[torch.Tensor]:
    return [torch.arange(6.0).reshape(2, 3) + n for n in range(3)]


class Crowded(nn.Module):
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(tensors[0])
        self.register_buffer("expanded", tensors[1])
        self.register_buffer("rolling", tensors[2])


class CrowdedWithHook(Crowded):
    """Its state is changed while it is loaded."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__(tensors)
        self._register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
            lambda state, prefix, *_: state[f"{prefix}rolling"].add_(10)
        )


def test_tensors_whose_elements_share_memory_are_replaced() -> None:
    live, values = _crowded(), _distinct()
    objects: dict[str, Any] = {"tree": dict(zip("abc", live, strict=True)), "named": live[0]}
    bring_back(store(tree=dict(zip("abc", values, strict=True)), named=values[1]), objects)
    assert all(torch.equal(left, right) for left, right in zip(objects["tree"].values(), values, strict=True))
    assert torch.equal(objects["named"], values[1])
    assert all(bool((tensor == 1).all()) for tensor in live)


@pytest.mark.parametrize("cls", [Crowded, CrowdedWithHook])
def test_a_modules_tensors_whose_elements_share_memory_get_their_own(cls: type[Crowded]) -> None:
    net = nn.Sequential(cls(_crowded()), Crowded(_crowded()))
    before = net.state_dict(keep_vars=True)
    bring_back(store(net=nn.Sequential(*(Crowded(_distinct()) for _ in range(2)))), {"net": net})
    after = net.state_dict(keep_vars=True)
    assert all(after[name] is before[name] for name in before)
    expected = _distinct() + _distinct()
    if cls is CrowdedWithHook:
        expected[2] += 10
    assert all(torch.equal(left, right) for left, right in zip(after.values(), expected, strict=True))
    weight = next(net.parameters())
    weight.sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.ones(2, 3))


def test_a_parameter_keeps_what_it_is() -> None:
    live = nn.Parameter(torch.zeros(3))
    live.grad = torch.ones(3)
    address, version = live.data_ptr(), live._version
    bring_back(store(p=nn.Parameter(torch.ones(3))), {"p": live})
    assert live.tolist() == [1, 1, 1]
    assert (live.requires_grad, live.grad.tolist(), live.data_ptr()) == (True, [1, 1, 1], address)
    assert live._version > version


def shrunk(tensor: torch.Tensor, size_bytes: int) -> torch.Tensor:
    """As engines do that shard a model: the tensor stays, its memory goes."""
    tensor.untyped_storage().resize_(size_bytes)
    return tensor


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.zeros(2, dtype=torch.uint8).view(torch.bits8), "bits8"),
        (lambda: torch.zeros(2, dtype=torch.uint8).view(vars(torch)["int4"]), "int4"),
        (lambda: torch.eye(2).to_sparse(), "layout"),
        (lambda: torch.zeros(2, device="meta"), "meta"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "nested"),
        (
            lambda: torch.quantize_per_channel(torch.zeros(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint4x2),
            "quint4x2",
        ),
        (
            lambda: torch.quantize_per_channel(torch.zeros(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint8),
            "per_channel_affine_float_qparams",
        ),
        (lambda: torch.zeros(2).as_subclass(type("Own", (torch.Tensor,), {})), "Own"),
        (lambda: nn.LazyLinear(2), "lazy"),
        (lambda: shrunk(torch.zeros(3, 4), 0), "storage was freed"),
        (lambda: shrunk(torch.zeros(3, 4), 40), "too short"),
        (lambda: shrunk(torch.zeros(3, 4).t(), 40), "too short"),
        (lambda: shrunk(torch.zeros(3, 4)[1:], 40), "too short"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_that_cannot_be_stored_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UnsupportedValueError, match=message) as caught:
        store(x=[make()])
    assert caught.value.path.startswith("x/0")
    assert caught.value.hint


class Coded(torch.Tensor):
    """Numbers as codes of eight bits and a scale for each row: a tensor that is made of others."""

    codes: torch.Tensor
    scale: torch.Tensor
    settings: Any

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, settings: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, settings: Any) -> None:
        self.codes, self.scale, self.settings = codes, scale, settings

    @classmethod
    def of(cls, values: torch.Tensor, settings: Any = None) -> Any:
        scale = values.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        return cls((values / scale).round().to(torch.int8), scale, settings or {"rows": True})

    def plain(self) -> torch.Tensor:
        return self.codes * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], self.settings

    @classmethod
    def __tensor_unflatten__(cls, tensors: dict[str, Any], settings: Any, size: Any, stride: Any) -> Any:
        return cls(tensors["codes"], tensors["scale"], settings)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale, args[0].settings)
        if func is torch.ops.aten.copy_.default:
            own = args[1] if isinstance(args[1], Coded) else Coded.of(args[1])
            args[0].codes.copy_(own.codes)
            args[0].scale.copy_(own.scale)
            return args[0]
        raise NotImplementedError(func)


def parts(tensor: Any) -> Any:
    return [tensor.codes, tensor.scale, tensor.settings]


class CodedMomentum(torch.optim.Optimizer):
    """Keeps its momentum in eight bits, as low-bit optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if "momentum" not in state:
                state["momentum"] = Coded.of(torch.zeros_like(parameter).reshape(len(parameter), -1))
            moved = 0.9 * state["momentum"].plain() + parameter.grad.reshape(len(parameter), -1)
            state["momentum"].copy_(moved)
            parameter.sub_(0.1 * moved.reshape(parameter.shape))


@pytest.fixture
def only_registered_types() -> Iterator[None]:
    before = dict(codecs._types_by_name)
    yield
    codecs._types_by_name.clear()
    codecs._types_by_name.update(before)


class TestTensorsMadeOfTensors:
    def quantized(self, seed: int, settings: Any = None) -> Any:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        for layer in net:
            assert isinstance(layer, nn.Linear)
            layer.weight = nn.Parameter(Coded.of(layer.weight.detach(), settings), requires_grad=False)
        return net

    def test_those_of_a_module_are_filled_where_they_are(self) -> None:
        source, live = self.quantized(1), self.quantized(2)
        live[1].weight = live[1].weight
        weights = [live[0].weight, live[1].weight]
        codes = weights[0].codes
        stored = store(model=source, alone=Coded.of(torch.ones(2, 2)))
        assert stored.specs["model/0.weight/codes"] == ArraySpec("I8", (3, 4))
        alone = Coded.of(torch.zeros(2, 2))
        objects: dict[str, Any] = {"model": live, "alone": alone}
        bring_back(stored, objects)
        assert objects["alone"] is alone
        assert alone.plain().tolist() == [[1, 1], [1, 1]]
        assert [live[0].weight, live[1].weight] == weights
        assert live[0].weight.codes is codes
        for one, other in zip(live, source, strict=True):
            assert same_state(parts(one.weight), parts(other.weight))
            assert torch.equal(one.bias, other.bias)

    def test_those_of_a_module_that_cannot_be_filled_get_new_parts(self) -> None:
        source, live = self.quantized(1), self.quantized(2)
        weight = live[0].weight
        weight.scale = torch.ones(1, 1).expand(3, 1)
        bring_back(store(model=source), {"model": live})
        assert live[0].weight is weight
        assert same_state(parts(weight), parts(source[0].weight))

    def test_differences_are_named(self) -> None:
        source = self.quantized(1)
        live = self.quantized(2, {"rows": False})
        before = parts(live[0].weight)
        differences = match(
            store(model=source, plain=torch.ones(2, 2)), {"model": live, "plain": source[0].weight}
        ).differences
        assert [line.split(":")[0] for line in differences.wrong_kind] == [
            "model/0.weight",
            "model/1.weight",
            "plain",
        ]
        assert "other settings" in differences.wrong_kind[0]
        assert parts(live[0].weight) == before
        differences = match(store(model=source), {"model": nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))}).differences
        assert differences.wrong_kind[0] == "model/0.weight: stored a tensor of type Coded, live a Parameter"

    @pytest.mark.usefixtures("only_registered_types")
    @pytest.mark.parametrize("stepped", [False, True])
    def test_those_of_an_optimizer_come_back(self, tmp_path: Path, stepped: bool) -> None:
        def fresh() -> tuple[Any, CodedMomentum]:
            net = model(1)
            return net, CodedMomentum(net.parameters())

        net, optimizer = fresh()
        train(net, optimizer)
        checkpoint = hf.Checkpoint(model=net, optimizer=optimizer)
        with hf.CheckpointManager(tmp_path, checkpoint, overlap_copy=True) as manager:
            manager.save(3)
            # What the copy reads waits for nothing but the copy.
            train(net, optimizer, seed=10)
        live, other = fresh()
        checkpoint = hf.Checkpoint(model=live, optimizer=other)
        if stepped:
            train(live, other, seed=11)
        else:
            with hf.CheckpointManager(tmp_path, checkpoint) as manager:
                with pytest.raises(UnsupportedValueError, match="register_type"):
                    manager.restore()
            hf.register_type(Coded)
        before = [state["momentum"] for state in other.state.values()]
        with hf.CheckpointManager(tmp_path, checkpoint) as manager:
            manager.restore()
        momenta = [state["momentum"] for state in other.state.values()]
        assert all(type(one) is Coded for one in momenta)
        if stepped:
            assert all(one is own for one, own in zip(momenta, before, strict=True))
        train(live, other, seed=10)
        assert same_state(live.state_dict(), net.state_dict())
        for one, own in zip(other.state.values(), optimizer.state.values(), strict=True):
            assert same_state(parts(one["momentum"]), parts(own["momentum"]))

    @pytest.mark.usefixtures("only_registered_types")
    def test_tensor_subclass_declared_safe_is_constructed_again(self) -> None:
        inner = Coded.of(torch.ones(2, 2))
        stored = store(x={"a": inner, "b": [inner], "deep": Coded(torch.zeros(2, 2), inner, {"rows": None})})
        objects: dict[str, Any] = {"x": None}
        with pytest.raises(UnsupportedValueError, match="Coded"):
            bring_back(stored, objects)
        with torch.serialization.safe_globals([Coded]):
            bring_back(stored, objects)
        assert same_state(parts(objects["x"]["a"]), parts(inner))
        assert objects["x"]["deep"].scale.codes is objects["x"]["a"].codes

    @pytest.mark.usefixtures("only_registered_types")
    def test_those_of_an_older_checkpoint_are_read(self, tmp_path: Path) -> None:
        """It was made once, of a `Coded` in a module `program` and a namespace with a tensor, and never again."""
        hf.register_type(Coded, name="program:Coded")
        checkpoint = hf.Checkpoint(tree=None, args=None)
        run = shutil.copytree(DATA / "v1-objects", tmp_path / "run")
        with hf.CheckpointManager(run, checkpoint) as manager:
            manager.restore()
        assert same_state(parts(checkpoint["tree"]["weight"]), parts(Coded.of(torch.arange(6.0).reshape(2, 3))))
        assert checkpoint["args"].lr == 0.5
        assert checkpoint["args"].order.tolist() == [2, 0, 1]

    def test_weights_of_bitsandbytes_are_refused_with_what_to_do(self) -> None:
        bitsandbytes = pytest.importorskip("bitsandbytes")
        net = nn.Sequential(bitsandbytes.nn.Linear4bit(64, 64)).to("cpu")
        with pytest.raises(UnsupportedValueError, match="Params4bit") as caught:
            store(model=net)
        assert "requires_grad" in caught.value.hint

    def test_a_malformed_one_is_refused(self) -> None:
        node: dict[str, Any] = {"tensors": {}, "context": None, "shape": [2], "strides": [1]}
        broken: list[Any] = [
            {**node, "shape": [-2]},
            {**node, "strides": []},
            {"tensors": {}},
            {**node, "tensors": 3},
            1,
        ]
        for payload in broken:
            with pytest.raises(FormatError, match="tensor subclass is malformed"):
                match_objects({"x": None}, {"x": {"$": "tensor_subclass", "k": "a:B", "v": payload}}, {})

    @pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
    def test_low_bit_optimizers_of_torchao_go_on(self, tmp_path: Path, name: str) -> None:
        make = getattr(pytest.importorskip("torchao.optim"), name)

        def fresh() -> tuple[Any, Any]:
            torch.manual_seed(0)
            net = nn.Linear(128, 64)
            return net, make(net.parameters())

        def step(net: Any, optimizer: Any, seed: int) -> None:
            net(torch.randn(8, 128, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        net, optimizer = fresh()
        step(net, optimizer, 1)
        with hf.CheckpointManager(tmp_path, hf.Checkpoint(model=net, optimizer=optimizer)) as manager:
            manager.save(1)
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "control.pt")
        step(net, optimizer, 2)
        live, other = fresh()
        with hf.CheckpointManager(tmp_path, hf.Checkpoint(model=live, optimizer=other)) as manager:
            manager.restore()
        step(live, other, 2)
        control, third = fresh()
        state = torch.load(tmp_path / "control.pt")
        control.load_state_dict(state["model"])
        third.load_state_dict(state["optimizer"])
        step(control, third, 2)
        assert raw(live.weight) == raw(control.weight) == raw(net.weight)
        assert live.bias.tolist() == net.bias.tolist()


def test_a_tensor_without_its_memory_is_found_among_many() -> None:
    """In a container whose look is remembered, and where all of its tensors are to be filled at once."""
    stored = store(x=[torch.zeros(8) for _ in range(40)])
    objects = {"x": [torch.zeros(16)[8:] for _ in range(40)]}
    captures = CaptureCache()
    capture_objects(objects, captures)
    for size_bytes in (0, 40):
        shrunk(objects["x"][7], size_bytes)
        with pytest.raises(UnsupportedValueError, match=r"^x/7: .* cannot be stored"):
            capture_objects(objects, captures)
        with pytest.raises(UnsupportedValueError, match=r"^x/7: .* cannot be stored"):
            bring_back(stored, objects)
    objects["x"][7].untyped_storage().resize_(64)
    bring_back(stored, objects)


def test_what_is_left_of_a_storage_can_be_stored() -> None:
    live = [shrunk(torch.arange(12.0), 16)[:4], shrunk(torch.arange(12.0), 16)[:0], torch.zeros(0, 3)]
    got: dict[str, Any] = {"x": [torch.zeros(4), torch.zeros(0), torch.zeros(0, 3)]}
    bring_back(store(x=live), got)
    assert got["x"][0].tolist() == [0, 1, 2, 3]


def test_values_that_only_torch_has_come_back() -> None:
    value = {
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "device": torch.device("cuda", 1),
        "format": torch.channels_last,
        torch.float32: torch.Size([]),
    }
    objects: dict[str, Any] = {"v": None}
    bring_back(store(v=value), objects)
    assert objects["v"] == value
    assert type(objects["v"]["size"]) is torch.Size


def test_arrays_go_from_one_library_to_the_other() -> None:
    live = np.zeros(3, np.float32)
    bring_back(store(x=torch.ones(3)), {"x": live})
    assert live.tolist() == [1, 1, 1]


def test_an_empty_array_of_a_library_without_the_type_gives_way() -> None:
    stored = torch.tensor([1.5, 2.5], dtype=torch.bfloat16)
    specs = store(x={"a": stored}).specs
    comparison = Comparison({}, specs, None)
    comparison.at = At(HANDED_OVER)
    for leaf in specs:
        assert comparison.array(leaf, "torch", np.empty(0, np.float32), leaf).dtype == torch.bfloat16


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_an_array_that_memory_cannot_hold_is_a_memory_error(library: str) -> None:
    node = {"$": "array", "k": library, "v": "x"}
    with pytest.raises(MemoryError):
        match_objects({"x": None}, {"x": node}, {"x": ArraySpec("U8", (1 << 50,))})


# Modules


def test_a_module_is_filled_where_it_is() -> None:
    source, live = model(1), model(2)
    train(source, torch.optim.SGD(source.parameters(), 0.1))
    before = {name: (tensor, tensor.data_ptr()) for name, tensor in live.state_dict(keep_vars=True).items()}
    stored = store(model=source)
    assert "model/0.weight" in stored.specs
    matching = match(stored, {"model": live})
    assert not matching.differences
    assert {target.leaf for target in matching.targets} == set(stored.specs)
    bring_back(stored, {"model": live})
    assert same_state(live.state_dict(), source.state_dict())
    for name, tensor in live.state_dict(keep_vars=True).items():
        assert tensor is before[name][0]
        assert tensor.data_ptr() == before[name][1]
    assert live[0].weight.requires_grad


def test_differences_of_modules_are_collected() -> None:
    source: Any = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, bias=False), nn.Linear(2, 2))
    live: Any = nn.Sequential(nn.Linear(4, 5), nn.Linear(3, 2), nn.Linear(2, 2).to(torch.bfloat16))
    before = copy.deepcopy(live.state_dict())
    stored = store(model=source, gone=nn.Linear(1, 1))
    differences = match(stored, {"model": live}).differences
    assert differences.missing == ["model/1.bias"]
    assert differences.extra == ["gone"]
    assert differences.wrong_shape == [
        "model/0.weight: stored [3, 4], live [5, 4]",
        "model/0.bias: stored [3], live [5]",
    ]
    assert differences.wrong_dtype == [
        "model/2.weight: stored F32, live BF16",
        "model/2.bias: stored F32, live BF16",
    ]
    assert same_state(live.state_dict(), before)
    bring_back(stored, {"model": live}, strict=False)
    assert torch.equal(live[1].weight, source[1].weight)
    assert same_state(live.state_dict()["0.weight"], before["0.weight"])


def test_a_part_of_a_module_alone_is_restored() -> None:
    source, live = model(1), model(2)
    before = copy.deepcopy(live.state_dict())
    stored = store(model=source, other=1)
    bring_back(stored, {"model": live, "missing": 2}, lambda path: fnmatch.fnmatch(path, "model/0.*"))
    for name, tensor in live.state_dict().items():
        expected = source.state_dict() if name.startswith("0.") else before
        assert torch.equal(tensor, expected[name])


def test_tied_parameters_are_stored_once_and_stay_tied() -> None:
    def tied() -> Any:
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        net[1].weight = net[0].weight
        return net

    source, live = tied(), tied()
    stored = store(model=source)
    assert set(stored.specs) == {"model/0.weight", "model/0.bias", "model/1.bias"}
    bring_back(stored, {"model": live})
    assert live[1].weight is live[0].weight
    assert same_state(live.state_dict(), source.state_dict())

    loose: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    bring_back(stored, {"model": loose})
    assert torch.equal(loose[0].weight, loose[1].weight)
    assert same_state(loose.state_dict(), source.state_dict())
    differences = match(store(model=loose), {"model": live}).differences
    assert differences.wrong_kind == [
        "model/1.weight: stored separately from model/0.weight, but the live arrays share memory"
    ]


class Scaled(nn.Module):
    """Keeps half of what it stores, has extra state, and values that are not its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.extra = {"n": 0, "t": torch.zeros(2)}
        self.hooks: list[str] = []
        self.register_load_state_dict_pre_hook(lambda *_: self.hooks.append("pre"))  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(lambda *_: self.hooks.append("post"))  # type: ignore[no-untyped-call]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "double"] = self.weight.detach() * 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        double = state_dict.pop(prefix + "double")
        super()._load_from_state_dict(state_dict, prefix, *rest)
        assert torch.equal(double, self.weight * 2)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_a_module_with_loading_of_its_own_is_loaded() -> None:
    def make() -> Any:
        return nn.Sequential(nn.Linear(2, 2), Scaled())

    source, live = make(), make()
    with torch.no_grad():
        source[1].weight.fill_(3)
    source[1].extra = {"n": 4, "t": torch.ones(2)}
    weight, other = live[1].weight, live[0].weight
    stored = store(model=source)
    assert {"model/1.double", "model/1._extra_state/t"} <= set(stored.specs)
    bring_back(stored, {"model": live})
    assert live[1].weight is weight
    assert live[0].weight is other
    assert weight.tolist() == [3, 3]
    assert torch.equal(other, source[0].weight)
    assert same_state(live[1].extra, source[1].extra)
    assert live[1].hooks == ["pre", "post"]


def test_modules_with_parametrizations_come_back() -> None:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
            nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
            nn.MultiheadAttention(4, 2),
            nn.LSTM(3, 3),
            nn.Embedding(3, 2),
        )

    source, live = make(1), make(2)
    bring_back(store(model=source), {"model": live})
    assert same_state(live.state_dict(), source.state_dict())


def test_wrapped_modules_have_the_state_of_bare_ones() -> None:
    source, live = model(1), model(2)
    source[1] = nn.DataParallel(source[1])
    compiled: Any = torch.compile(nn.DataParallel(source))
    stored = store(model=compiled)
    assert set(stored.specs) == {f"model/{name}" for name in live.state_dict()}
    bring_back(stored, {"model": live})
    assert torch.equal(live[1].running_mean, source[1].module.running_mean)
    assert torch.equal(live[2].weight, source[2].weight)
    bring_back(store(model=model(3)), {"model": compiled})
    assert torch.equal(source[2].weight, model(3)[2].weight)


def test_modules_within_trees_come_back() -> None:
    live: dict[str, Any] = {"a": model(1), "list": [model(2)]}
    bring_back(store(nets={"a": model(3), "list": [model(4)]}), {"nets": live})
    assert same_state(live["a"].state_dict(), model(3).state_dict())
    assert same_state(live["list"][0].state_dict(), model(4).state_dict())


def test_modules_within_modules_are_prepared() -> None:
    class Server(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Buffer(torch.zeros(1))

        def prepare_for_checkpoint(self) -> None:
            self.table.fill_(7)

    stored = store(model=nn.Sequential(Server()))
    assert stored.data["model/0.table"] == raw(torch.tensor([7.0]))


def test_twenty_thousand_tensors_are_named() -> None:
    net = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(20_000)])
    stored = store(model=net)
    assert len(stored.specs) == 20_000


def observing(seed: int) -> Any:
    """Fake quantization for each channel: its scales get their shape from what it observes, or while it loads."""
    quantization: Any = torch.ao.quantization
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).train()
    net.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(net)


def lazy(seed: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.LazyLinear(2))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("optimizer_first", [False, True])
@pytest.mark.parametrize("make", [observing, lazy])
def test_a_module_that_gets_its_shapes_while_it_loads(tmp_path: Path, make: Any, optimizer_first: bool) -> None:
    def checkpoint(net: Any, optimizer: Any) -> hf.Checkpoint:
        named = {"model": net, "optimizer": optimizer}
        return hf.Checkpoint(**dict(reversed(named.items()) if optimizer_first else named))

    net = make(1)
    net(torch.randn(8, 4, generator=torch.Generator().manual_seed(1)))
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer)
    with hf.CheckpointManager(tmp_path, checkpoint(net, optimizer)) as manager:
        manager.save(3)
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "control.pt")

    live = make(2)
    other = torch.optim.AdamW(live.parameters())
    with hf.CheckpointManager(tmp_path, checkpoint(live, other)) as manager:
        manager.restore()
    control, state = make(2), torch.load(tmp_path / "control.pt")
    control.load_state_dict(state["model"])
    third = torch.optim.AdamW(control.parameters())
    third.load_state_dict(state["optimizer"])
    assert same_state(live.state_dict(), control.state_dict())
    for one, its_optimizer in ((net, optimizer), (live, other), (control, third)):
        train(one, its_optimizer, seed=10)
    assert same_state(live.state_dict(), control.state_dict())
    assert same_state(live.state_dict(), net.state_dict())


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_module_that_does_not_take_other_shapes_is_a_difference() -> None:
    net = observing(1)
    net(torch.randn(8, 4))
    live = observing(2)
    live[2].bias = nn.Parameter(torch.zeros(5))
    before = copy.deepcopy(live.state_dict())
    assert match(store(model=net), {"model": live}).differences.wrong_shape == ["model/2.bias: stored [2], live [5]"]
    assert same_state(live.state_dict(), before)
    # One that is loaded in a way of its own is tried, and left as it was.
    with_state = {"model": nn.Sequential(Scaled())}
    wider = nn.Sequential(Scaled())
    wider[0].register_buffer("more", torch.zeros(3))
    with_state["model"][0].register_buffer("more", torch.zeros(2))
    assert match(store(**with_state), {"model": wider}).differences.wrong_shape == [
        "model/0.more: stored [2], live [3]"
    ]


class Memory(nn.Module):
    """Keeps all that it has seen in a buffer, which grows; it counts that, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.inner: Any = nn.Module()
        self.inner.register_buffer("seen", torch.zeros(0, 2))

    def add(self, count: int) -> None:
        self.inner.seen = torch.cat([self.inner.seen, torch.randn(count, 2)])
        self.inner.register_buffer("count", torch.tensor(len(self.inner.seen)))


class OwnLoading(Memory):
    def load_state_dict(self, state_dict: Any, *rest: Any, **more: Any) -> Any:
        self.inner.seen = torch.empty_like(state_dict["inner.seen"])
        if "inner.count" in state_dict:
            self.inner.register_buffer("count", state_dict["inner.count"])
        return super().load_state_dict(state_dict, *rest, **more)


class OwnHook(Memory):
    def __init__(self) -> None:
        super().__init__()
        module: Any = self
        module.register_load_state_dict_pre_hook(self._fit)

    @staticmethod
    def _fit(module: Any, state_dict: Any, prefix: str, *rest: Any) -> None:
        module.inner.seen = torch.empty_like(state_dict[f"{prefix}inner.seen"])
        if f"{prefix}inner.count" in state_dict:
            module.inner.register_buffer("count", state_dict[f"{prefix}inner.count"])


class Dropping(Memory):
    """Leaves out what does not fit, as programs do that fine-tune."""

    def load_state_dict(self, state_dict: Any, *rest: Any, **more: Any) -> Any:
        own = self.state_dict()
        fitting = {key: one for key, one in state_dict.items() if key in own and one.shape == own[key].shape}
        return super().load_state_dict(fitting, strict=False)


@pytest.mark.parametrize("make", [OwnLoading, OwnHook, lambda: nn.Sequential(nn.Linear(2, 2), OwnHook())])
@pytest.mark.parametrize("has_seen", [0, 2, 7])
def test_a_module_with_its_own_loading_judges_its_shapes(make: Callable[[], Any], has_seen: int) -> None:
    net, live, control = make(), make(), make()
    for one, count in ((net, 5), (live, has_seen), (control, has_seen)):
        if count:
            next(part for part in one.modules() if isinstance(part, Memory)).add(count)
    parameters = list(live.parameters())
    control.load_state_dict(copy.deepcopy(net.state_dict()))
    bring_back(store(model=net), {"model": live})
    assert same_state(live.state_dict(), control.state_dict())
    assert same_state(live.state_dict(), net.state_dict())
    assert all(one is other for one, other in zip(live.parameters(), parameters, strict=True))


def test_a_module_that_drops_other_shapes_while_it_loads_is_refused() -> None:
    net, live = Dropping(), Dropping()
    net.add(3)
    live.add(2)
    assert match(store(model=net), {"model": live}).differences.wrong_shape == [
        "model/inner.seen: stored [3, 2], live [2, 2]"
    ]
    assert len(live.inner.seen) == 2


class Normed(nn.Module):
    """Scales by what it has seen first, in a buffer that its own loading makes where there is none yet."""

    scale: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = x.detach().double().abs().amax(0)
        return x * self.weight / self.scale

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        if self.scale is None and f"{prefix}scale" in state_dict:
            self.scale = torch.empty_like(state_dict[f"{prefix}scale"], device=self.weight.device)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class NormedByHook(Normed):
    """The same, by a hook, and the tensor itself is taken."""

    _load_from_state_dict = nn.Module._load_from_state_dict

    def __init__(self) -> None:
        super().__init__()
        module: Any = self
        module.register_load_state_dict_pre_hook(self._take)

    @staticmethod
    def _take(module: Any, state_dict: Any, prefix: str, *rest: Any) -> None:
        module.scale = state_dict.get(f"{prefix}scale")


@pytest.mark.parametrize("wrap", [nn.Identity().forward, torch.compile])
@pytest.mark.parametrize("cls", [Normed, NormedByHook])
def test_a_module_that_makes_a_buffer_while_it_loads(cls: Any, wrap: Any) -> None:
    net: Any = nn.Sequential(cls(), nn.Linear(3, 2), cls())
    net[0](torch.randn(4, 3))
    live: Any = nn.Sequential(cls(), nn.Linear(3, 2), cls())
    bring_back(store(model=net), {"model": wrap(live)})
    assert live[0].scale.dtype == torch.float64
    assert torch.equal(live[0].scale, net[0].scale)
    assert live[2].scale is None
    # A tensor that no loading takes is a difference still, and the module stays as it was.
    other: Any = nn.Sequential(cls(), nn.Linear(3, 2), cls())
    net[0].register_buffer("more", torch.ones(3))
    net[1].register_buffer("more", torch.ones(3))
    differences = match(store(model=net), {"model": other}).differences
    assert differences.extra == ["model/0.more", "model/1.more"]
    assert "0.scale" not in other.state_dict()
    only_scale = bring_back(store(model=net), {"model": other}, lambda path: path == "model/0.scale")
    assert not only_scale
    assert torch.equal(other[0].scale, net[0].scale)
    assert not torch.equal(other[1].weight, net[1].weight)


class Hidden(nn.Module):
    """Its layers are no part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(2, 2)]


def test_state_that_seems_forgotten_is_reported_at_the_first_save(tmp_path: Path) -> None:
    drops = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    calm: list[dict[str, Any]] = [
        {"model": drops, "rng": hf.RNG()},
        {"model": drops, "states": {"torch_rng": torch.get_rng_state()}, "rng_states": 0},
        {"model": nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)), "loss": nn.MSELoss()},
        {"model": nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)).eval()},
    ]
    for number, objects in enumerate([*calm, {"model": drops, "other": [Hidden()]}]):
        events: list[Event] = []
        checkpoint = hf.Checkpoint(**objects)
        with hf.CheckpointManager(tmp_path / str(number), checkpoint, sinks=[events.append]) as manager:
            for step in range(2):
                manager.save(step)
        told = [event.text for event in events if isinstance(event, Warned)]
        if number < len(calm):
            assert told == []
    assert len(told) == 2
    assert told[0].startswith("other/0: its state_dict() is empty")
    assert told[1].startswith("model: dropout draws from random generators that are not saved")


class Versioned(nn.Linear):
    """Takes state without a version for that of an old program, which stored the weight transposed."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *more: Any) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"].t().contiguous()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *more)


class Averages:
    """Keeps modules in a state of its own."""

    def __init__(self) -> None:
        self.modules = [nn.Sequential(Versioned(2, 2), nn.BatchNorm1d(2)) for _ in range(2)]

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.modules[0].state_dict(), "deep": [{"second": self.modules[1].state_dict()}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.modules[0].load_state_dict(state["first"])
        self.modules[1].load_state_dict(state["deep"][0]["second"])


def test_the_versions_in_a_state_dict_come_back(tmp_path: Path) -> None:
    saved, live = Averages(), Averages()
    best: dict[str, Any] = {"weights": None}
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(own=saved, best={"weights": saved.state_dict()})) as manager:
        manager.save(1)
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(own=live, best=best)) as manager:
        manager.restore()
    again = Averages()
    again.load_state_dict(best["weights"])
    torch.save(saved.state_dict(), tmp_path / "control.pt")
    control = torch.load(tmp_path / "control.pt", weights_only=False)
    for found in (live, again):
        assert same_state([one.state_dict() for one in found.modules], [one.state_dict() for one in saved.modules])
    assert best["weights"]["first"]._metadata == control["first"]._metadata
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(best=(held := {"weights": Averages().state_dict()}))) as manager:
        held["weights"]["first"]._metadata = {}
        first = held["weights"]["first"]
        manager.restore(only="best")
    assert first is held["weights"]["first"]
    assert first._metadata == control["first"]._metadata


class Briefly(nn.Linear):
    """Has a `state_dict` without torch's options."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {"w": self.weight.detach(), "note": {"scale": self.scale}}

    def load_state_dict(self, state: Any) -> None:  # type: ignore[override]
        self.weight.data.copy_(state["w"])
        self.scale = state["note"]["scale"]

    scale = 1.0


def test_a_module_with_a_state_dict_of_its_own_signature_comes_back(tmp_path: Path) -> None:
    source, live = Briefly(2, 2), Briefly(2, 2)
    source.scale, weight = 2.0, live.weight
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(model=source)) as manager:
        manager.save(1)
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(model=live)) as manager:
        manager.restore()
    assert live.weight is weight
    assert same_state(live.state_dict(), source.state_dict())


def test_a_module_on_the_meta_device_is_refused_with_what_to_call() -> None:
    stored = store(model=nn.Linear(2, 2))
    with torch.device("meta"):
        live = nn.Linear(2, 2)
    with pytest.raises(UnsupportedValueError, match="no memory to restore into") as caught:
        match(stored, {"model": live})
    assert "to_empty" in str(caught.value)
    bring_back(stored, {"model": live.to_empty(device="cpu")})


@pytest.mark.slow
@pytest.mark.long
def test_the_first_square_roots_of_a_process_are_as_all_later_ones(tmp_path: Path) -> None:
    """Without the calls that holdfast makes first, about one process of fifteen fails on a machine with two cores."""
    program = [sys.executable, str(PROGRAMS / "first_steps.py"), str(tmp_path)]
    said = [subprocess.run(program, capture_output=True, check=True).stdout for _ in range(60)]
    assert set(said) == {b"same\n"}
