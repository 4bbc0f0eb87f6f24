"""Triton kernels in Triton's interpreter, on NumPy arrays: no GPU, no torch, and no jax in the process that runs them.

`Interpreter` starts this file as a program of its own, because `@triton.jit` reads TRITON_INTERPRET when the kernels'
module is imported, and sends it launches one by one. Beside running them the program checks every access that is not
masked off:
- it lies in the buffer that its pointer was made from, however the address was computed;
- inputs are only read;
- what is written has one owner: no two programs of a launch touch the same element of an output.
Addresses are made up, so nothing is reached by a wrong one, and `holes` can put a small array behind billions of
elements that do not exist.

Triton 3.6 to 3.9 calculate with the bit patterns of bfloat16 and truncate where a GPU rounds to nearest even.
`_repair` gives them NumPy arrays of a real bfloat16 type instead (`ml_dtypes`), which do both rightly.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import os
import pickle
import subprocess
import sys
import traceback
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel's name, how many programs, its arrays by parameter name (those in `written` are outputs) and its
    compile-time constants. holes: elements that are missing in front of an array, 0 where nothing is said. Parameters
    that get neither are pointers to nothing."""

    kernel: str
    programs: int
    arrays: Mapping[str, np.ndarray]
    written: tuple[str, ...]
    constants: Mapping[str, int | float | None]
    holes: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Finished:
    """The outputs after a launch, and how much was done: multiply-adds in `tl.dot`, and integer comparisons of tiles
    (two axes longer than one), which is what masks cost."""

    arrays: dict[str, np.ndarray]
    multiply_adds: int
    tile_comparisons: int


class KernelError(Exception):
    """A launch that broke a rule, in words; or the interpreter's traceback."""


class Interpreter:
    """A running interpreter process with the kernels of one module file."""

    def __init__(self, kernels: str | Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(kernels)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    def run(self, launch: Launch) -> Finished:
        """Raises KernelError for an access that is not allowed and for whatever else goes wrong in the kernel."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            pickle.dump(launch, self._process.stdin)
            self._process.stdin.flush()
            answer = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError) as error:
            raise RuntimeError(f"the interpreter process ended with {self._process.wait()}: see stderr") from error
        if isinstance(answer, str):
            raise KernelError(answer)
        return Finished(*answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


# What follows runs in the interpreter process.


class _Buffer:
    """An array at a made-up address, `hole` elements of which are missing in front."""

    def __init__(self, name: str, array: np.ndarray, address: int, hole: int, written: bool) -> None:
        self.name, self.address, self.hole = name, address, hole
        self.flat = array.reshape(-1)
        # Which program an element belongs to, for outputs.
        self.owner = np.full(self.flat.size, -1, np.int32) if written else None

    def index(self, pointers: np.ndarray, mask: np.ndarray | None, verb: str, state: _State) -> np.ndarray:
        """Element numbers for pointers; 0 where masked off."""
        where = f"{state.kernel}, program {state.program}: {verb} {self.name}"
        distance = (pointers - np.uint64(self.address)).view(np.int64)
        index, rest = np.divmod(distance, max(self.flat.itemsize, 1))
        index = index - self.hole
        if mask is not None:
            index, rest = np.where(mask, index, 0), np.where(mask, rest, 0)
            if not mask.any():
                return index
        if rest.any():
            raise KernelError(f"{where} between two elements")
        for end in (int(index.min()), int(index.max())):
            if not 0 <= end < self.flat.size:
                raise KernelError(f"{where} out of bounds: element {end} of {self.flat.size}")
        if self.owner is not None:
            touched = index if mask is None else index[mask]
            owner = self.owner[touched]
            taken = (owner >= 0) & (owner != state.program)
            if taken.any():
                element, other = touched[taken].flat[0], owner[taken].flat[0]
                raise KernelError(f"{where} element {element}, which program {other} has already touched")
            self.owner[touched] = state.program
        elif verb != "reads":
            raise KernelError(f"{where}, which is an input")
        return index


class _State:
    """What is running, and what it has done so far."""

    kernel = ""
    program = 0
    multiply_adds = 0
    tile_comparisons = 0


def _repair(interpreter: types.ModuleType, tl: types.ModuleType, state: _State) -> None:
    """Replaces the interpreter's memory accesses by checked ones, and its bfloat16 by a real one."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    plain_dtype, plain_binary, plain_convert = (
        interpreter._get_np_dtype,
        builder.binary_op,
        builder.create_fp_to_fp,
    )
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    ordinary = {tl.float16, tl.bfloat16, tl.float32, tl.float64}

    known: dict[str, np.dtype] = {"bf16": bfloat16}

    def numpy_dtype(dtype: Any) -> np.dtype:
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if element.name not in known:  # what is there makes a table at every call
            known[element.name] = plain_dtype(element)
        return known[element.name]

    def load(self: Any, pointers: Any, *_: Any) -> Any:
        return masked_load(self, pointers, None, None)

    def masked_load(self: Any, pointers: Any, mask: Any, other: Any, *_: Any) -> Any:
        buffer = pointers.dtype.buffer
        keep = None if mask is None else np.broadcast_to(mask.data, pointers.data.shape)
        index = buffer.index(pointers.data, keep, "reads", state)
        if keep is None:
            values = buffer.flat[index]
        else:
            # An undefined value on a GPU, so one that shows.
            rest = _poison(buffer.flat.dtype) if other is None else other.data
            values = np.full(index.shape, rest, buffer.flat.dtype)
            values[keep] = buffer.flat[index[keep]]
        return handle(values, pointers.get_element_ty())

    def store(self: Any, pointers: Any, value: Any, *_: Any) -> None:
        masked_store(self, pointers, value, None)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *_: Any) -> None:
        buffer = pointers.dtype.buffer
        keep = None if mask is None else np.broadcast_to(mask.data, pointers.data.shape)
        index = buffer.index(pointers.data, keep, "writes", state)
        values = np.broadcast_to(value.data, index.shape)
        if np.unique(index).size != index.size and keep is None:
            raise KernelError(f"{state.kernel}, program {state.program}: writes {buffer.name} twice in one store")
        if keep is None:
            buffer.flat[index] = values
        else:
            buffer.flat[index[keep]] = values[keep]

    def cast(self: Any, source: Any, dtype: Any) -> Any:
        return handle(source.data.astype(numpy_dtype(dtype)), dtype.scalar)

    def convert(self: Any, source: Any, dtype: Any, rounding: Any) -> Any:
        if source.dtype.scalar not in ordinary or dtype.scalar not in ordinary or "RTZ" in str(rounding):
            return plain_convert(self, source, dtype, rounding)
        return cast(self, source, dtype)

    def dot(self: Any, a: Any, b: Any, acc: Any, *_: Any) -> Any:
        state.multiply_adds += a.data.shape[0] * a.data.shape[1] * b.data.shape[1]
        product = np.matmul(a.data.astype(np.float32), b.data.astype(np.float32))
        return handle(product + acc.data, acc.dtype.scalar)

    def binary(self: Any, left: Any, right: Any, operation: Any) -> Any:
        result = plain_binary(self, left, right, operation)
        integers = left.data.dtype.kind in "iu" and result.data.dtype == bool
        state.tile_comparisons += integers and result.data.ndim == 2 and min(result.data.shape) > 1
        return result

    interpreter._get_np_dtype = numpy_dtype
    for name, function in {
        "create_load": load,
        "create_store": store,
        "create_masked_load": masked_load,
        "create_masked_store": masked_store,
        "cast_impl": cast,
        "create_fp_to_fp": convert,
        "create_dot": dot,
        "binary_op": binary,
        # 3.6 lets NaN through where the GPU's instruction drops it.
        "create_maxnumf": lambda self, left, right: self.binary_op(left, right, np.fmax),
        "create_minnumf": lambda self, left, right: self.binary_op(left, right, np.fmin),
    }.items():
        setattr(builder, name, function)


def _poison(dtype: np.dtype) -> Any:
    return np.iinfo(dtype).min if dtype.kind in "iu" else np.nan


def _load_module(path: str) -> types.ModuleType:
    """The kernels' module from its file: importing it through its package would import jax."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class _Runner:
    """The patched interpreter and a module of kernels."""

    def __init__(self, path: str) -> None:
        import triton.language as tl
        import triton.runtime.interpreter as interpreter

        self.tl, self.interpreter, self.state = tl, interpreter, _State()
        self.module = _load_module(path)
        _repair(interpreter, tl, self.state)
        kernel = next(x for x in vars(self.module).values() if isinstance(x, interpreter.InterpretedFunction))
        # Once, here and for Triton's own functions: the interpreter does it at every call of a device function, which
        # takes most of its time.
        for function in (kernel.fn, tl.zeros.fn):
            interpreter._patch_lang(function)
        interpreter._patch_lang = lambda fn: None
        # Each addition of integers once more in 64 bits: a third of all time, and nobody looks at the result.
        interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
        # 3.6: int() of an array with one axis, which NumPy no longer allows.
        tl.tensor.__index__ = lambda self: int(self.handle.data.reshape(-1)[0])

    def run(self, launch: Launch) -> tuple[dict[str, np.ndarray], int, int]:
        state = self.state
        state.kernel, state.program, state.multiply_adds, state.tile_comparisons = launch.kernel, 0, 0, 0
        kernel = getattr(self.module, launch.kernel)
        arguments: dict[str, Any] = {}
        for i, name in enumerate(inspect.signature(kernel.fn).parameters):
            arguments[name] = launch.constants[name] if name in launch.constants else self._pointer(i, name, launch)
        function, builder = kernel.rewrite(), self.interpreter.interpreter_builder
        builder.set_grid_dim(launch.programs, 1, 1)
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            for state.program in range(launch.programs):
                builder.set_grid_idx(state.program, 0, 0)
                function(**arguments)
        written = {name: launch.arrays[name] for name in launch.written}
        return written, state.multiply_adds, state.tile_comparisons

    def _pointer(self, i: int, name: str, launch: Launch) -> Any:
        array = launch.arrays.get(name, np.empty(0, np.int8))
        assert array.flags.c_contiguous and array.flags.writeable, name
        address = (i + 1) << 48
        names = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32", "int32": "int32", "int8": "int8"}
        dtype = self.tl.pointer_type(getattr(self.tl, names[array.dtype.name]))
        # Handles keep the very type object through all pointer arithmetic: an address knows where it came from.
        dtype.buffer = _Buffer(name, array, address, launch.holes.get(name, 0), name in launch.written)
        return self.tl.tensor(self.interpreter.TensorHandle(np.array([address], np.uint64), dtype), dtype)


def _serve(path: str) -> None:
    """Answers launches from standard input until it ends. What kernels print goes to standard error."""
    sys.modules["triton_interpreter"] = sys.modules["__main__"]  # where pickled launches come from
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    runner = _Runner(path)
    while True:
        try:
            launch = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: Any = runner.run(launch)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, KernelError):
                cause = cause.__cause__
            answer = str(cause) if cause is not None else traceback.format_exc()
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    _serve(sys.argv[1])
