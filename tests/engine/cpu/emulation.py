"""Libraries for Arm, built by a cross compiler as an Arm machine builds its own, and run by an emulator.

An `EmulatedLibrary` replaces the `ctypes.CDLL`: memory that a call's arguments point to is copied to the emulated
process (emulated.cpp), and back. Results are those of a processor; the speed is not.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import struct
import subprocess
from ctypes import Array, Structure, c_bool, c_int32, c_void_p
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.engine import host_memory
from inflight.engine.cpu import library
from inflight.engine.cpu.library import Target
from inflight.engine.cpu.structs import _SIGNATURES, AdapterStruct, BatchStruct, LayerAdapterStruct

COMPILER, EMULATOR, ROOT = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
CPUS = {"neon": "cortex-a53", "neon-dot": "cortex-a76", "neon-bf16": "max"}
"""For each of Arm's targets, a processor with its instruction sets and as few others as possible."""

TARGETS = {target.name: target for target in library._OF_MACHINES["aarch64"]}
MISSING = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
needs_emulator = pytest.mark.skipif(
    bool(MISSING), reason=f"no {' and no '.join(MISSING)} (apt-get install g++-aarch64-linux-gnu qemu-user)"
)


def build_program(folder: Path) -> Path:
    """Compile the program that loads a library in the emulator."""
    program, source = folder / "emulated", Path(__file__).with_name("emulated.cpp")
    subprocess.run([COMPILER, "-O1", "-std=c++17", source, "-o", program], check=True, timeout=300)
    return program


def emulate(name: str, program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process load the libraries of one of Arm's targets, as an Arm machine would."""
    target = TARGETS[name]
    memory = Memory(monkeypatch)
    monkeypatch.setattr(host_memory, "_REGION", 0)  # otherwise every call copies a matrix's whole region
    monkeypatch.setattr(library, "TARGETS", (target,))
    monkeypatch.setattr(library, "_find_compiler", lambda: COMPILER)
    monkeypatch.setattr(library, "_processor_flags", lambda: target.needed)
    monkeypatch.setattr(library, "_load", functools.cache(library._load.__wrapped__))
    monkeypatch.setattr(library, "_load_file", lambda path: EmulatedLibrary(path, target, program, memory))


class Memory:
    """Addresses and sizes of tensors whose address was requested; it keeps these tensors alive."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._tensors: dict[int, torch.Tensor] = {}
        real = torch.Tensor.data_ptr

        def data_ptr(tensor: torch.Tensor) -> int:
            address = real(tensor)
            self._tensors[address] = tensor
            return address

        monkeypatch.setattr(torch.Tensor, "data_ptr", data_ptr)
        self._size_of_block = ctypes.CDLL(None).malloc_usable_size
        self._size_of_block.restype, self._size_of_block.argtypes = ctypes.c_size_t, (c_void_p,)

    def around(self, address: int) -> tuple[int, int]:
        """Return begin and size of the memory of a tensor, or of an array that begins at the address."""
        if address in self._tensors:
            storage = self._tensors[address].untyped_storage()
            return storage.data_ptr(), storage.nbytes()
        return address, self._size_of_block(address)


class EmulatedLibrary:
    """A library whose functions run in an emulator, which ends with this object.

    Attributes:
        _name: Its file, as in a `ctypes.CDLL`.
    """

    def __init__(self, path: Path, target: Target, program: Path, memory: Memory) -> None:
        self._name = str(path)
        self._memory = memory
        self._layers: dict[int, Array[Any]] = {}  # of each decoder
        command = [EMULATOR, "-L", ROOT, "-cpu", CPUS[target.name], program, path]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __del__(self) -> None:
        self._process.kill()
        self._process.communicate()

    def __getattr__(self, name: str) -> Any:
        if name not in _SIGNATURES:
            raise AttributeError(name)
        return functools.partial(self._call, name)

    def _call(self, name: str, *arguments: Any) -> Any:
        result_type, types = _SIGNATURES[name]
        request = Request(self._memory)
        for argument, kind in zip(arguments, types, strict=True):
            value = getattr(argument, "_as_parameter_", argument)
            if kind is c_void_p and value in self._layers:
                request.layers = self._layers[value]
                request.add_struct(request.layers)
                request.values.append((False, value))
            elif kind in (c_bool, c_int32, ctypes.c_int64):
                request.values.append((False, int(value)))
            elif kind is c_void_p:
                request.values.append((True, request.add_block(value)))
            else:
                request.values.append((True, request.add_struct(getattr(value, "_obj", value))))
        result = self._exchange(name, request)
        if name == "create" and result:
            self._layers[result] = arguments[1]
        if name == "destroy":
            del self._layers[arguments[0]]
        return None if result_type is None else result_type(result).value

    def _exchange(self, name: str, request: Request) -> int:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(request.encode(name))
        process.stdin.flush()
        answer = process.stdout.read(8 + sum(request.regions.values()))
        assert len(answer) >= 8, f"the emulated process ended with {process.wait()}"
        request.copy_back(answer[8:])
        return int.from_bytes(answer[:8], "little")


class Request:
    """A call and the memory that its arguments point to.

    Attributes:
        layers: The decoder's layers.
        values: The arguments, and whether each is an address.
        regions: The bytes at each address.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.layers: Array[Any] | None = None
        self.values: list[tuple[bool, int]] = []
        self.regions: dict[int, int] = {}
        self._addresses: list[int] = []  # of words that are addresses
        self._with_addresses: set[int] = set()  # regions

    def add_block(self, address: int | None) -> int:
        """Add the memory of a tensor or an array."""
        if not address:
            return 0
        begin, size = self._memory.around(address)
        self.regions[begin] = max(size, self.regions.get(begin, 0))
        return address

    def add_struct(self, value: Structure | Array[Any]) -> int:
        """Add a struct, or an array of structs, and the memory that it points to."""
        address = ctypes.addressof(value)
        self.regions[address] = ctypes.sizeof(value)
        for each in value if isinstance(value, Array) else (value,):
            self._follow(each, address)
        return address

    def _follow(self, value: Structure, region: int) -> None:
        for name, kind, *_ in value._fields_:
            field = getattr(value, name)
            if isinstance(field, Structure):
                self._follow(field, region)
            elif kind is c_void_p and field:
                self._note_address(ctypes.addressof(value) + getattr(type(value), name).offset, region)
                if isinstance(value, BatchStruct) and name == "adapters":
                    self._add_adapters(field, value.num_rows)
                elif isinstance(value, AdapterStruct):
                    self.add_struct((LayerAdapterStruct * len(self.layers or ())).from_address(field))
                else:
                    self.add_block(field)

    def _note_address(self, address: int, region: int) -> None:
        self._addresses.append(address)
        self._with_addresses.add(region)

    def _add_adapters(self, begin: int, count: int) -> None:
        self.regions[begin] = 8 * count
        for place, address in enumerate((ctypes.c_uint64 * count).from_address(begin)):
            if address:
                self._note_address(begin + 8 * place, begin)
                self.add_struct(AdapterStruct.from_address(address))

    def encode(self, name: str) -> bytes:
        """Return the bytes that emulated.cpp reads."""
        parts = [struct.pack("<Q", len(name)), name.encode(), struct.pack("<Q", len(self.regions))]
        for begin, size in self.regions.items():
            parts += [struct.pack("<QQ", begin, size), ctypes.string_at(begin, size)]
        addresses = dict.fromkeys(self._addresses)
        parts.append(struct.pack(f"<{1 + len(addresses)}Q", len(addresses), *addresses))
        parts.append(struct.pack("<Q", len(self.values)))
        parts += [struct.pack("<QQ", is_address, value % 2**64) for is_address, value in self.values]
        return b"".join(parts)

    def copy_back(self, content: bytes) -> None:
        """Copy back the memory that the function has written, which includes no addresses."""
        at = 0
        for begin, size in self.regions.items():
            if begin not in self._with_addresses:
                ctypes.memmove(begin, content[at : at + size], size)
            at += size
