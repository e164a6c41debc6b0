"""Files made to harm whoever imports them: nothing in them is executed, no memory is taken on their word."""

from __future__ import annotations

import builtins
import io
import os
import pickle
import struct
import subprocess
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
import old_versions
from command_line import call, complaint
from holdfast import errors
from holdfast.convert.pickle_read import read_pickle
from holdfast.convert.pickle_write import Global, write_pickle
from repetitions import repeated

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint.metadata import MetadataIndex  # noqa: E402
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp  # noqa: E402

LIMIT_BYTES = 32 << 20


class Calls:
    """Is pickled as a call of something."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < LIMIT_BYTES
    finally:
        tracemalloc.stop()


def refuse(source: Path, *texts: str) -> None:
    """An import of it fails with such an error, without much memory, and nothing is made."""
    run = source.parent / "run"
    with little_memory(), pytest.raises(errors.HoldfastError) as caught:
        hf.import_checkpoint(source, run)
    assert isinstance(caught.value, (errors.FormatError, errors.UsageError, errors.StorageError)), caught.value
    assert any(text in caught.value.message for text in texts), caught.value.message
    assert not run.exists()


def archive(path: Path, pickled: bytes, records: dict[str, bytes] | None = None) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        for name, data in (records or {}).items():
            file.writestr(f"archive/{name}", data)
    return path


def evil_calls(mark: Path) -> list[Calls]:
    return [
        Calls(os.system, f"touch {mark}"),
        Calls(builtins.eval, f"open({str(mark)!r}, 'w')"),
        Calls(builtins.exec, f"open({str(mark)!r}, 'w')"),
        Calls(builtins.getattr, os, "system"),
        Calls(subprocess.Popen, ["touch", str(mark)]),
        Calls(builtins.__import__, "antigravity"),
        Calls(Path.touch, mark),
    ]


@pytest.mark.parametrize("number", range(7))
@pytest.mark.parametrize("protocol", [2, 4])
def test_no_call_in_a_torch_file_is_made(tmp_path: Path, number: int, protocol: int) -> None:
    mark = tmp_path / "mark"
    evil = evil_calls(mark)[number]
    try:
        data = pickle.dumps({"model": {"w": evil, "n": 1}}, protocol=protocol)
    except TypeError:  # A module cannot be pickled; its name can.
        data = b"\x80\x02c__builtin__\ngetattr\ncos\nsystem\nX\x01\x00\x00\x00a\x86R."
    path = archive(tmp_path / "evil.pt", data)
    refuse(path, "which is not supported")
    code, text = complaint("import", path, tmp_path / "run")
    assert (code, "Nothing in the file was executed" in text) == (1, True)
    # Left out, it is not executed either.
    with pytest.raises(errors.HoldfastError) if number == 3 else _nothing():
        made = hf.import_checkpoint(path, tmp_path / "skipped", skip_unknown=True)
        assert [one.path for one in made.left_out] == ["model/w"]
    assert not mark.exists()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_dcp(
        {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "n": 1},
        checkpoint_id=tmp_path / "dcp",
        **old_versions.alone(save_dcp),
    )
    return tmp_path / "dcp"


def rewrite(directory: Path, change: Callable[[Any], object]) -> None:
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def doubled() -> list[Any]:
    """A list of few lists, which would take for ever to write down."""
    value: list[Any] = []
    for _ in range(60):
        value = [value, value]
    return value


def info_of(metadata: Any, name: str) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


@pytest.mark.parametrize("number", [0, 1, 2, 4, 5, 6])
def test_no_call_in_the_metadata_of_dcp_is_made(directory: Path, number: int) -> None:
    mark = directory / "mark"
    evil = evil_calls(mark)[number]
    for change in (
        lambda metadata: setattr(metadata, "planner_data", evil),
        lambda metadata: metadata.state_dict_metadata.update({"x": evil}),
        lambda metadata: metadata.storage_data.update({MetadataIndex("x"): evil}),
    ):
        rewrite_safely(directory, change)
        refuse(directory, "which is not supported")
        with pytest.raises(errors.FormatError):
            hf.import_checkpoint(directory, directory.parent / "run", skip_unknown=True)
    assert not mark.exists()


def rewrite_safely(directory: Path, change: Callable[[Any], object]) -> None:
    """As `rewrite`, from the metadata as torch wrote it: what a change has left there is not loaded again."""
    path, kept = directory / ".metadata", directory.parent / "kept"
    if not kept.exists():
        kept.write_bytes(path.read_bytes())
    path.write_bytes(kept.read_bytes())
    rewrite(directory, change)


def test_no_call_in_a_value_of_dcp_is_made(directory: Path) -> None:
    mark = directory / "mark"
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(evil_calls(mark)[0], protocol=2))
    (directory / "evil.distcp").write_bytes(data.getvalue())

    def change(metadata: Any) -> None:
        info = info_of(metadata, "n")
        info.relative_path, info.offset, info.length = "evil.distcp", 0, len(data.getvalue())

    rewrite(directory, change)
    refuse(directory, "which is not supported")
    assert not mark.exists()


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "a/b", "..", "", "x\0y", 7, None, "link"])
def test_the_metadata_of_dcp_leads_nowhere_else(directory: Path, path: Any) -> None:
    original = (directory / "__0_0.distcp").read_bytes()
    (directory.parent / "secret").write_bytes(original)
    (directory / "link").symlink_to(directory.parent / "secret")
    rewrite(directory, lambda metadata: setattr(info_of(metadata, "model.w"), "relative_path", path))
    refuse(directory, "not a file next to it", "cannot read")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: setattr(info_of(m, "model.w"), "length", 1 << 60), "too short"),
        (lambda m: setattr(info_of(m, "model.w"), "offset", -1), "invalid offset"),
        (lambda m: setattr(info_of(m, "model.w"), "offset", 1 << 62), "too short"),
        (
            lambda m: setattr(m.state_dict_metadata["model.w"], "size", torch.Size([1 << 40, 3])),
            "overlap or leave a gap",
        ),
        (lambda m: setattr(m.state_dict_metadata["model.w"], "size", torch.Size([1 << 62, 3])), "is invalid"),
        (
            lambda m: setattr(m.state_dict_metadata["model.w"].chunks[0], "sizes", torch.Size([1 << 40, 3])),
            "is invalid",
        ),
        (
            lambda m: m.state_dict_metadata["model.w"].chunks.append(m.state_dict_metadata["model.w"].chunks[0]),
            "overlap",
        ),
        (lambda m: m.state_dict_metadata["model.w"].chunks.clear(), "leave a gap"),
        (
            lambda m: setattr(m.state_dict_metadata["model.w"].properties, "dtype", torch.int64),
            "does not have the recorded",
        ),
        (lambda m: m.storage_data.clear(), "is missing"),
        (lambda m: m.planner_data.update({"n": ("model", "w", "x")}), "passes through another entry"),
        (lambda m: m.planner_data.update({"n": ("model", "w")}), "another entry"),
        (lambda m: setattr(m, "state_dict_metadata", None), "no entries"),
        (lambda m: setattr(m, "storage_data", {1: 2}), "expected a"),
        (lambda m: setattr(info_of(m, "model.w"), "relative_path", doubled()), "value of type list"),
        (lambda m: setattr(info_of(m, "model.w"), "relative_path", "a/" * (1 << 20)), "not a file next to it"),
        (lambda m: m.planner_data.update({"n": ("a",) * 1000}), "a key is made of more than"),
        (lambda m: m.planner_data.update({"n": ("a", 1 << 100_000)}), "is malformed"),
    ],
)
def test_metadata_of_dcp_that_cannot_be_is_refused(directory: Path, change: Any, text: str) -> None:
    rewrite(directory, change)
    refuse(directory, text)


def tensor_pickle(shape: tuple[int, ...], strides: tuple[int, ...], *, offset: int = 0, numel: int = 6) -> bytes:
    storage = Global("torch", "FloatStorage")
    from holdfast.convert.pickle_write import FunctionCall, Persistent

    return write_pickle(
        {
            "w": FunctionCall(
                Global("torch._utils", "_rebuild_tensor_v2"),
                (Persistent(("storage", storage, "0", "cpu", numel)), offset, shape, strides, False, None),
            )
        }
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"shape": (1 << 40,), "strides": (1,)}, "extends beyond its storage"),
        ({"shape": (7,), "strides": (1,)}, "extends beyond its storage"),
        ({"shape": (6,), "strides": (1,), "offset": 1}, "extends beyond its storage"),
        ({"shape": (2,), "strides": (1,), "offset": -4}, "begins before its storage"),
        ({"shape": (2,), "strides": (-1,)}, "not described"),
        ({"shape": (2, 3), "strides": (1,)}, "not described"),
        ({"shape": (1,) * 65, "strides": (1,) * 65}, "not described"),
        ({"shape": (1 << 62,), "strides": (0,)}, "is invalid"),
        ({"shape": (1 << 40,), "strides": (0,)}, "would take"),
        ({"shape": (6,), "strides": (1,), "numel": 1 << 40}, "missing or shorter"),
        ({"shape": (0,), "strides": (1,), "offset": 1 << 60}, "extends beyond its storage"),
    ],
)
def test_tensors_that_cannot_be_are_refused(tmp_path: Path, options: Any, text: str) -> None:
    refuse(archive(tmp_path / "a.pt", tensor_pickle(**options), {"data/0": bytes(24)}), text)


LAUGHTER = b"]q\x000" + b"](h\x00h\x00eq\x000" * 60 + b"h\x00"
DEVICE = b"\x80\x02ctorch\ndevice\n"

PICKLES = {
    "a length": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b".",
    "a text": b"\x80\x02X\xff\xff\xff\x7fabc.",
    "a number": b"\x80\x02\x8b\xff\xff\xff\x7f\x00.",
    "a place": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "no end": b"\x80\x02N",
    "nothing": b"",
    "marks": b"\x80\x02" + b"(" * 100_000 + b".",
    "nesting": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "laughter": b"\x80\x02]q\x00" + b"".join(b"](" + b"h\x00" * 10 + b"eq\x00" for _ in range(60)) + b".",
    "itself": b"\x80\x02]q\x00h\x00a.",
    "a bytearray by its length": b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
    "a set of text": b"\x80\x02cbuiltins\nset\nX\x01\x00\x00\x00a\x85R.",
    "an extension": b"\x80\x02\x82\x01.",
    "an old instance": b"\x80\x02(ios\nsystem\n.",
    "a protocol of text": b"cos\nsystem\n(S'true'\ntR.",
    "attributes of a list": b"\x80\x02]}b.",
    "a key that is a list": b"\x80\x02}]Ns.",
    "a call of a list": b"\x80\x02])R.",
    "buffers": b"\x80\x05\x97.",
    "a text as a device's number": DEVICE + b"X\x01\x00\x00\x00c" + LAUGHTER + b"\x86R.",
}

# From a depth of about 150,000 on, the hash of such a tuple crashes Python.
DEEP = b")" + b"\x85" * 160_000
DOUBLED = b")q\x00" + b"h\x00h\x00\x86q\x00" * 60
A = b"X\x01\x00\x00\x00a"
KEYS = {
    "a deep tuple": b"\x80\x02}" + DEEP + b"Ns.",
    "a deep tuple in a frozen set": b"\x80\x04(" + DEEP + b"\x91.",
    "a deep tuple in a set": b"\x80\x04\x8f(" + DEEP + b"\x90.",
    "a deep tuple in a list of a set": b"\x80\x02cbuiltins\nset\n](" + DEEP + b"e\x85R.",
    "a deep tuple in pairs": b"\x80\x02ccollections\nOrderedDict\n](" + DEEP + b"N\x86e\x85R.",
    "what lies beside it": b"\x80\x02}" + A + b"\x85Q" * 250_000 + b"Ns.",
    "a doubled tuple": b"\x80\x02" + DOUBLED + b"0}h\x00Ns.",
    "a doubled tuple in a frozen set": b"\x80\x04(" + DOUBLED + b"\x91.",
    "a wide tuple": b"\x80\x02}(" + b"N" * 1000 + b"tNs.",
    "a large number": b"\x80\x02}\x8b" + struct.pack("<L", 1 << 20) + b"\x7f" * (1 << 20) + b"Ns.",
    "a long text": b"\x80\x02}X" + struct.pack("<L", 1 << 20) + b"a" * (1 << 20) + b"Ns.",
}


@pytest.mark.parametrize("name", KEYS)
def test_keys_that_hash_for_ever_or_crash_python_are_refused(name: str) -> None:
    with pytest.raises(errors.FormatError, match=r"malformed.*key"):
        read_pickle(KEYS[name], (), "here")


def test_keys_made_to_have_one_hash_are_refused() -> None:
    # -1 and -2 have the same hash, and so have tuples of them; as have multiples of one prime.
    numbers = {tuple(-1 - (number >> bit & 1) for bit in range(12)): None for number in range(1 << 12)}
    multiples = {number * ((1 << 61) - 1): None for number in range(1 << 12)}
    for keys in (numbers, multiples, set(numbers), [{key: 1} for key in multiples]):
        with pytest.raises(errors.FormatError, match="the same hash"):
            read_pickle(pickle.dumps(keys, protocol=4), (), "here")


def test_keys_as_programs_have_them_are_read() -> None:
    table = {(x, y, "up"): x * y for x in range(-20, 20) for y in range(-20, 20)}
    keys = {1: 1, 2**70: 2, -1: 3, 0.5: 4, None: 5, b"b": 7, "s": 8, (1, ("a", None)): 9, frozenset({1}): 10}
    plain = [table, keys, set(keys), frozenset(table), [keys] * 1000]
    assert read_pickle(pickle.dumps(plain, protocol=4), (), "here") == plain
    assert read_pickle(pickle.dumps([table, set(table)], protocol=2), (), "here") == [table, set(table)]


def test_pickle_that_copies_more_than_it_contains_is_refused() -> None:
    text = b"X" + struct.pack("<L", 1 << 20) + b"a" * (1 << 20) + b"q\x000"
    for made in (b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R", b"cbuiltins\nbytearray\nh\x00\x85R"):
        with little_memory(), pytest.raises(errors.FormatError, match="copies more than it contains"):
            read_pickle(b"\x80\x02" + text + b"](" + made * 1000 + b"e.", (), "here")


def test_a_storage_of_a_strange_type_is_refused_in_a_few_words(tmp_path: Path) -> None:
    for strange in (
        b"]" * 100_000 + b"a" * 99_999,
        DEEP,
        b"]" + LAUGHTER,
        b"X" + struct.pack("<L", 1 << 20) + b"a" * (1 << 20),
    ):
        storage = b"(X\x07\x00\x00\x00storage" + strange + b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x06tQ"
        tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00(K\x06t(K\x01t\x89NtR"
        refuse(
            archive(tmp_path / "a.pt", b"\x80\x02}" + A + tensor + b"s."),
            "storages of type",
            "is not named",
            "malformed",
        )


def test_an_element_type_that_is_none_is_refused(tmp_path: Path) -> None:
    storage = b"(X\x07\x00\x00\x00storagectorch.storage\nUntypedStorage\n"
    storage += b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x06tQ"
    tensor = b"ctorch._utils\n_rebuild_tensor_v3\n(" + storage + b"K\x00(K\x06t(K\x01t\x89N" + DEEP + b"tR"
    refuse(archive(tmp_path / "a.pt", b"\x80\x02}" + A + tensor + b"s.", {"data/0": bytes(24)}), "not described")


def test_names_that_are_not_utf8_can_be_imported(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.pt"))
    made = hf.import_checkpoint(archive(path, pickle.dumps({"\ud800": 1, "b": "\udfff"}, protocol=2)), tmp_path / "run")
    assert made.objects == ("model",)
    assert call("import", path, tmp_path / "other").exit_code == 0
    with pytest.raises(errors.UsageError, match="cannot be the name of an object"):
        hf.import_checkpoint(path, tmp_path / "named", name="\ud800")


def test_import_refuses_pipes_without_waiting(tmp_path: Path, directory: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    refuse(tmp_path / "pipe.pt", "not a regular file")
    data = directory / "__0_0.distcp"
    data.unlink()
    os.mkfifo(data)
    refuse(directory, "not a regular file")
    (directory / ".metadata").unlink()
    os.mkfifo(directory / ".metadata")
    refuse(directory, "not a regular file")


@pytest.mark.parametrize("name", PICKLES)
def test_pickles_made_to_exhaust_are_refused(tmp_path: Path, name: str) -> None:
    path = archive(tmp_path / "a.pt", PICKLES[name])
    if name == "a place":  # It is kept under a large number, which costs nothing.
        assert read_pickle(PICKLES[name], (), "here") is None
        return
    refuse(
        path, "malformed", "nested", "contains itself", "may hold", "more than", "contains nothing", "is not supported"
    )


@settings(max_examples=repeated(300, in_gate=60))
@given(st.binary(max_size=200))
def test_bytes_at_random_are_refused_or_data(data: bytes) -> None:
    for prefix in (b"", b"\x80\x02}", b"\x80\x04]("):
        with suppress(errors.FormatError):
            read_pickle(prefix + data + b".", (), "here")


@settings(max_examples=repeated(200, in_gate=40))
@given(st.data())
def test_a_torch_file_with_changed_bytes_is_refused_or_data(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(5.0), "n": [1, "two"]}, buffer)
    changed = bytearray(buffer.getvalue())
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("changed") / "a.pt"
    path.write_bytes(changed)
    with suppress(errors.FormatError, errors.UsageError):
        hf.import_checkpoint(path, f"memory://changed-{path.parent.name}")


def test_archives_that_claim_too_much_are_refused(tmp_path: Path) -> None:
    whole = archive(tmp_path / "whole.pt", tensor_pickle((6,), (1,)), {"data/0": bytes(24)}).read_bytes()
    end = len(whole) - 22
    for change, text in (
        ((end + 10, struct.pack("<H", 9999)), "should have 9999 records"),
        ((end + 12, struct.pack("<L", 0x7FFFFFFF)), "not a file that torch.save wrote"),
        ((end + 12, struct.pack("<L", 0xFFFFFFFF)), "not a file that torch.save wrote"),
        ((end + 16, struct.pack("<L", 0x7FFFFFFF)), "is outside of the file"),
        ((whole.index(b"PK\x01\x02") + 10, b"\x08\x00"), "compressed"),
        ((whole.index(b"PK\x01\x02") + 20, struct.pack("<LL", 0x7FFFFFFF, 0x7FFFFFFF)), "is outside of the file"),
        ((whole.index(b"PK\x01\x02") + 42, struct.pack("<L", 0x7FFFFFFF)), "is outside of the file"),
        ((whole.rindex(b"PK\x03\x04") + 26, struct.pack("<HH", 0xFFFF, 0xFFFF)), "is outside of the file"),
    ):
        at, data = change
        (tmp_path / "a.pt").write_bytes(whole[:at] + data + whole[at + len(data) :])
        refuse(tmp_path / "a.pt", text)


def test_a_file_that_was_cut_off_and_a_whole_module_are_named_so(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": torch.zeros(40)}, path)
    whole = path.read_bytes()
    for size, text in ((0, "is empty"), (200, "is cut off"), (len(whole) // 2, "is cut off"), (-10, "is cut off")):
        path.write_bytes(whole[:size])
        refuse(path, text)
    torch.save({"net": torch.nn.Linear(1, 1)}, path)
    with pytest.raises(errors.FormatError, match=r"net is a .*Linear") as refused:
        hf.import_checkpoint(path, "memory://module")
    assert refused.value.hint.startswith("Save its state_dict")


def test_a_directory_of_an_archive_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    size = 1 << 30
    with (tmp_path / "a.pt").open("xb") as file:
        file.write(b"PK\x03\x04")
        file.seek(size)
        file.write(struct.pack("<4sHHHHLLH", b"PK\x05\x06", 0, 0, 9, 9, size, 0, 0))
    refuse(tmp_path / "a.pt", "its directory has 1073741824 bytes")


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ('{"w":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}', "are outside of the file"),
        ('{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}', "does not fit bytes"),
        ('{"w":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', "negative length"),
        ('{"w":{"dtype":"Q9","shape":[2],"data_offsets":[0,8]}}', "unknown element type"),
        (
            '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}',
            "overlap",
        ),
        ('{"w":[1,2]}', "malformed"),
        ("{]", "malformed"),
    ],
)
def test_headers_of_safetensors_that_cannot_be_are_refused(tmp_path: Path, header: str, text: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(8))
    refuse(tmp_path / "a.safetensors", text)


def test_a_header_longer_than_the_file_takes_no_memory(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes((90_000_000).to_bytes(8, "little") + b"{" + bytes(20))
    refuse(tmp_path / "a.safetensors", "a header of 90000000 bytes")


def test_an_index_of_safetensors_leads_nowhere_else(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("../secret.safetensors", "/etc/passwd", "", "a/b"):
        (directory / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"w": "{name}"}}}}')
        refuse(directory, "not a file next to it")
