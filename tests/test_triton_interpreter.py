"""What the interpreter of the kernel tests promises: numbers rounded as a GPU rounds them, and nothing touched that
must not be. Small kernels that do one thing each, and the real ones with tables that are wrong."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from tile_problems import Case, make_tables
from tile_runs import run
from triton_interpreter import Interpreter, KernelError, Launch

PROBES = """
import triton
import triton.language as tl

@triton.jit
def arithmetic(x, y, total, product, largest, rounded, wide, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(total + i, a + b)
    tl.store(product + i, a * b)
    tl.store(largest + i, tl.maximum(a, b))
    tl.store(rounded + i, (a.to(tl.float32) * 1.0033).to(total.dtype.element_ty))
    tl.store(wide + i, a.to(tl.float32))

@triton.jit
def dot(a, b, c, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at), tl.load(c + at)))

@triton.jit
def shifted(x, y, N: tl.constexpr, BY: tl.constexpr, MASK: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    if MASK:
        tl.store(y + i, tl.load(x + i + BY, mask=i + BY < 2 * N, other=7.0))
    else:
        tl.store(y + i, tl.load(x + i + BY))

@triton.jit
def all_write(x, y, N: tl.constexpr):
    tl.store(y + tl.arange(0, N), tl.load(x + tl.arange(0, N)))

@triton.jit
def writes_input(x, y, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), tl.load(y + tl.arange(0, N)))

@triton.jit
def twice(x, y, N: tl.constexpr):
    tl.store(y + tl.arange(0, N) // 2, tl.load(x + tl.arange(0, N)))
"""


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreter]:
    path = tmp_path_factory.mktemp("probes") / "probes.py"
    path.write_text(PROBES)
    process = Interpreter(path)
    yield process
    process.close()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_16_bit_arithmetic_rounds_to_nearest_even(probes, dtype):
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(256).astype(dtype) for _ in range(2))
    large = float(ml_dtypes.finfo(dtype).max)
    x[:8] = np.array([0, 1, 1, -1, 2**-8, large, np.inf, 257]).astype(dtype)
    y[:8] = np.array([0, 2**-8, 3 * 2**-8, 2**-9, 1, large, 1, 0]).astype(dtype)
    outputs = {name: np.zeros(256, dtype) for name in ("total", "product", "largest", "rounded")}
    outputs["wide"] = np.zeros(256, np.float32)
    got = probes.run(Launch("arithmetic", 1, {"x": x, "y": y} | outputs, tuple(outputs), {"N": 256})).arrays
    wide_x, wide_y = x.astype(np.float32), y.astype(np.float32)
    with np.errstate(over="ignore"):
        want = {
            "total": (wide_x + wide_y).astype(dtype),
            "product": (wide_x * wide_y).astype(dtype),
            "largest": np.maximum(x, y),
            "rounded": (wide_x * np.float32(1.0033)).astype(dtype),
            "wide": wide_x,
        }
    for name, values in want.items():
        assert got[name].tobytes() == values.tobytes(), name


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_dot_multiplies_values_and_adds_in_float32(probes, dtype):
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((32, 32)).astype(dtype) for _ in range(2))
    c = rng.standard_normal((32, 32)).astype(np.float32)
    done = probes.run(Launch("dot", 1, {"a": a, "b": b, "c": c}, ("c",), {"N": 32}))
    np.testing.assert_allclose(done.arrays["c"], a.astype(float) @ b.astype(float) + c, atol=1e-5)
    assert done.multiply_adds == 32**3


def shift(by: int, mask: bool, holes: dict[str, int] | None = None) -> Launch:
    arrays = {"x": np.arange(32, dtype=np.float32), "y": np.zeros(32, np.float32)}
    return Launch("shifted", 2, arrays, ("y",), {"N": 16, "BY": by, "MASK": mask}, holes or {})


def test_masked_accesses_may_point_anywhere(probes):
    got = probes.run(shift(10, mask=True)).arrays["y"]
    assert np.array_equal(got, np.append(np.arange(10, 32), [7] * 10))


def test_what_a_kernel_may_not_do_is_named(probes):
    with pytest.raises(KernelError, match="shifted, program 1: reads x out of bounds: element 32 of 32"):
        probes.run(shift(1, mask=False))
    with pytest.raises(KernelError, match="program 0: reads x out of bounds: element -1 of 32"):
        probes.run(shift(-1, mask=False))
    with pytest.raises(KernelError, match="reads x out of bounds: element -5 of 32"):
        probes.run(shift(0, mask=False, holes={"x": 5}))
    arrays = {"x": np.zeros(16, np.float32), "y": np.zeros(16, np.float32)}
    for kernel, message in (
        ("all_write", "program 1: writes y element 0, which program 0 has already touched"),
        ("writes_input", "writes x, which is an input"),
        ("twice", "writes y twice in one store"),
    ):
        with pytest.raises(KernelError, match=message):
            probes.run(Launch(kernel, 2, arrays, ("y",), {"N": 16}))
    with pytest.raises(KernelError, match="reads x out of bounds: element 0 of 0"):
        probes.run(Launch("all_write", 1, {"y": arrays["y"]}, ("y",), {"N": 16}))
    assert probes.run(shift(0, mask=False)).arrays["y"][31] == 31  # and the process lives on


def test_the_reason_of_any_other_failure_arrives(probes):
    with pytest.raises(KernelError, match="arange"):
        probes.run(Launch("all_write", 1, {"y": np.zeros(16, np.float32)}, ("y",), {"N": 12}))


@pytest.mark.parametrize(
    ("table", "column", "value", "message"),
    [
        ("entries", 0, 6, "forward_kernel, program .*: reads first_visible out of bounds"),
        ("entries", 0, -1, "forward_kernel, program .*: reads first_visible out of bounds"),
        ("entries", 1, 50, "forward_kernel, program .*: reads (pages|k) out of bounds"),
        ("entries", 4, 40, "forward_kernel, program .*: reads pages out of bounds"),
        ("pages", None, 6, "forward_kernel, program .*: reads k out of bounds"),
        ("pages", None, -1, "forward_kernel, program .*: reads k out of bounds"),
        ("readers", 1, 40, "dkv_kernel, program .*: reads (entries|q) out of bounds"),
    ],
)
def test_wrong_tables_are_seen_where_they_lead(table, column, value, message):
    case = Case([[256]], 256)
    tables = make_tables(case, np.random.default_rng(0))
    ((_, stop, readers),) = tables.waves
    arrays = {"entries": tables.entries, "pages": tables.pages, "readers": readers}
    row = stop - 1 if table == "entries" else tables.entries[stop - 1, 4]
    arrays[table][row if column is None else (row, column)] = value
    if (table, column) == ("entries", 1):
        arrays["entries"][row, 3] = 50  # the block, and as many pages
    with pytest.raises(KernelError, match=message):
        run(case, tables)


def test_a_query_slot_in_two_entries_is_seen():
    case = Case([[256]], 256)
    tables = make_tables(case, np.random.default_rng(0))
    start = tables.waves[0][0]
    tables.entries[start, 0] = tables.entries[start + 1, 0]
    with pytest.raises(KernelError, match=r"forward_kernel, program .*: writes out .* already touched"):
        run(case, tables)
