"""From document lengths to work: what attention has to do for a packed sequence, and what that costs in seconds.

Takes the document lengths of a packed sequence and a `PoolSpec`; gives causal pairs (what the mathematics needs),
pages visited (what the kernel's inner loop does, a block at a time) and, through a `CostModel`, seconds. Placement and
the planner build on it. Host side: NumPy only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import numbers
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from libra_jax.spec import PoolSpec

PADDING = 2**30
"""First visible position of a padding token: beyond every key, so padding sees nothing."""

Lengths = Sequence[int] | np.ndarray
Amount = Any  # a number, or an array of them


class BlockPages(NamedTuple):
    """Pages that each block of a sequence visits: `first_page[b]` to `b`, `num_pages[b]` of them. Both (nb,) int32."""

    first_page: np.ndarray
    num_pages: np.ndarray


# ------------------------------------------------------------------------------------------------ lengths to pages


def check_lengths(lengths: Lengths, seq_len: int, sequence: int | None = None) -> np.ndarray:
    """Return one sequence's document lengths as (documents,) int64, or raise ValueError.

    lengths: tokens of each document, in the order they lie in the sequence. Empty: the sequence is all padding.
    sequence: the sequence's index, named in the error.

    Every length must be a whole number of at least 1, and their sum at most `seq_len`.
    """
    where = "" if sequence is None else f" of sequence {sequence}"
    try:
        array = np.asarray(lengths)
    except ValueError:  # nested lists of different lengths
        array = None
    if array is None or array.ndim != 1:
        shape = "a nested list" if array is None else f"shape {array.shape}"
        raise ValueError(f"document lengths{where} must be one flat list of whole numbers, not {shape}")
    if not isinstance(lengths, np.ndarray):
        for entry, value in enumerate(lengths):  # np.asarray would turn [True, 3] into [1, 3]
            if isinstance(value, bool | np.bool_):
                raise ValueError(f"document length {value} (entry {entry}{where}) must be a whole number")
    elif array.dtype == bool:
        raise ValueError(f"document lengths{where} must be whole numbers, not booleans")
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":
        array = _whole_numbers(array, where)
    if array.min() < 1:
        entry = int(np.argmax(array < 1))
        value = int(array[entry])
        what = "an empty document is left out, not listed as 0" if value == 0 else "a document cannot be shorter"
        raise ValueError(f"document length {value} (entry {entry}{where}) must be at least 1: {what}")
    total = sum(array.tolist())  # Python integers: no overflow, whatever was given
    if total > seq_len:
        raise ValueError(f"document lengths{where} add up to {total} tokens, more than seq_len ({seq_len})")
    return array.astype(np.int64)


def _whole_numbers(array: np.ndarray, where: str) -> np.ndarray:
    """Turn floats or objects that are whole numbers into exact integers; refuse the first that is not."""
    values = []
    for entry, value in enumerate(array.tolist()):
        if isinstance(value, bool) or not isinstance(value, int | float) or (not float(value).is_integer()):
            raise ValueError(f"document length {value!r} (entry {entry}{where}) must be a whole number")
        values.append(int(value))
    return np.array(values, dtype=object)


def lengths_from_segment_ids(segment_ids: npt.ArrayLike, padding_id: int = 0) -> list[list[int]]:
    """Document lengths of packed sequences, for loaders that give segment ids: one list a sequence.

    segment_ids: (sequences, seq_len) whole numbers, 0 or more; they change where a document ends and are otherwise
        free to skip numbers or to come again. Or (micro_steps, sequences, seq_len): the first micro-step's lists come
        first. JAX arrays will do.
    padding_id: marks padding, which must come last in a sequence: 0 in MaxText's batches, -1 in Levanter's, where
        documents count from 0. It has to be said: ids alone cannot tell a padding of 0 from a document 0.

    Raises ValueError where ids are no whole numbers, where one is negative and is not `padding_id`, and where padding
    does not come last; the last two name the sequence and the micro-step.
    """
    if isinstance(padding_id, bool) or not isinstance(padding_id, numbers.Integral):
        raise ValueError(f"padding_id ({padding_id!r}) must be a whole number")
    if not getattr(segment_ids, "is_fully_addressable", True):
        raise ValueError("segment ids are read on the host: give this process's, these are spread over several")
    ids = np.asarray(segment_ids)
    if ids.ndim not in (2, 3) or ids.dtype.kind not in "iu":
        shapes = "(sequences, seq_len) or (micro_steps, sequences, seq_len)"
        raise ValueError(f"segment ids must be whole numbers {shapes}, got {ids.dtype} {ids.shape}")
    if padding_id < 0 and ids.dtype.kind == "u":
        raise ValueError(f"padding_id ({padding_id}) must be a number that segment ids can hold, got {ids.dtype}")
    rows = ids.reshape(math.prod(ids.shape[:-1]), ids.shape[-1])
    padding = rows == padding_id
    negative = (rows < 0) & ~padding
    if negative.any():
        row, token = (int(i) for i in np.argwhere(negative)[0])
        raise ValueError(
            f"segment id {rows[row, token]} ({sequence_name(row, ids.shape)}, token {token}) must be 0 or more: only "
            f"padding may be negative, and padding_id is {padding_id}. Was padding_id={rows[row, token]} meant?"
        )
    misplaced = (padding[:, :-1] & ~padding[:, 1:]).any(axis=1)
    if misplaced.any():
        row = int(np.argmax(misplaced))
        where = f"{sequence_name(row, ids.shape)} has tokens after it"
        where += f". Where {padding_id} is a document, padding_id is another" if padding[row, 0] else ""
        raise ValueError(f"padding (segment id {padding_id}) must come last: {where}")
    lengths = []
    for row, used in zip(rows, (~padding).sum(axis=1), strict=True):
        ends = np.append(np.flatnonzero(row[1:used] != row[: max(used - 1, 0)]) + 1, used)
        lengths.append(np.diff(ends, prepend=0).tolist() if used else [])
    return lengths


def sequence_name(row: int, shape: Sequence[int]) -> str:
    """What errors call a sequence: row `row` of a batch of `shape` ([micro_steps,] sequences, seq_len)."""
    if len(shape) < 3:
        return f"sequence {row}"
    return f"sequence {row % shape[-2]} of micro-step {row // shape[-2]}"


def document_starts(
    lengths: Lengths, seq_len: int, window: int | None = None, out: np.ndarray | None = None
) -> np.ndarray:
    """First key position that each token sees, (seq_len,) int32: max(start of its document, position - window + 1).

    `PADDING` where there is no document. The kernels mask with this array: query t sees keys first[t] to t.
    out: (seq_len,) int32 to write to; None: a new array.
    """
    sizes = check_lengths(lengths, seq_len)
    first = np.empty(seq_len, np.int32) if out is None else out
    used = int(sizes.sum())
    first[:used] = np.repeat((np.cumsum(sizes) - sizes).astype(np.int32), sizes)
    first[used:] = PADDING
    if window is not None:
        window = min(window, seq_len)
        first[:used] = np.maximum(first[:used], np.arange(1 - window, used + 1 - window, dtype=np.int32))
    return first


def block_pages(lengths: Lengths, spec: PoolSpec) -> BlockPages:
    """Pages that each block of one sequence visits, from its document lengths alone (no array per token).

    Block b visits pages first_page[b] to b: first_page is the page of the first key that any of its real tokens sees.
    A block that is all padding visits none: num_pages 0 and first_page b.
    """
    sizes = check_lengths(lengths, spec.seq_len)
    blocks = np.arange(spec.blocks_per_sequence, dtype=np.int32)
    starts = np.zeros(sizes.size + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    # What a token sees starts no earlier than what the token before it sees, so a block's first token decides.
    token = blocks.astype(np.int64) * spec.block
    first = starts[np.searchsorted(starts, token, side="right") - 1]
    if spec.window is not None:
        first = np.maximum(first, token - spec.window + 1)
    real = token < starts[-1]
    first_page = np.where(real, first // spec.block, blocks).astype(np.int32)
    num_pages = np.where(real, blocks - first_page + 1, 0).astype(np.int32)
    return BlockPages(first_page, num_pages)


def causal_pairs(lengths: Lengths, window: int | None = None) -> int:
    """(query, key) pairs of a packed sequence: l (l + 1) / 2 for a document of l tokens, less beyond a window.

    The least any kernel has to compute, per query head. Pages visited times block * block is what it does compute.
    """
    sizes = np.asarray(lengths, np.int64)
    full = sizes if window is None else np.minimum(sizes, window)  # these queries see all keys before them
    beyond = sizes - full  # and each of these sees `window` keys
    return int((full * (full + 1) // 2 + (0 if window is None else beyond * window)).sum())


# ------------------------------------------------------------------------------------------------ pages to seconds


# One page at the shape that the default coefficients hold for: block 128, one query head, keys and values 128 wide.
_FLOPS = 2 * 128 * 128 * (128 + 128)
_BACKWARD_FLOPS = 2 * 128 * 128 * (3 * 128 + 2 * 128)


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Seconds that attention takes on one GPU: per page visited, per query block, per kernel launch.

    A page is one block of queries (all query heads that share a key/value head) against one block of keys. The
    coefficients hold for the shape in the last four fields and are scaled to another one: a page by its matrix
    multiplications, 2 B B G (D + E) forward and 2 B B G (3 D + 2 E) backward FLOPs, a block by the rows it moves,
    B G (D + E). Measure your own with `CostModel.fit`.

    The defaults describe a Triton kernel on an H100 (causal, head dim 128, bfloat16), from the published TFLOP/s of
    the FlashAttention-3 comparison. With n blocks in a document, a kernel that visits whole pages takes
    n (n + 1) / 2 pages and n blocks for n n / 2 pages' worth of counted FLOPs. Least squares over 2k to 16k tokens:

      forward   Triton 323, 353, 369, 378 -> 388 TFLOP/s on pages, and a block costs 1.09 pages (all within 0.2%)
      backward  FlashAttention-3 542, 559, 561 (4k to 16k, taken as not causal) -> 570 TFLOP/s and 1.6 pages a block,
                times Triton's share of FlashAttention-3 in the forward pass, 388 of 635: 348 TFLOP/s
      launch    25 us: where attention time is flat below 256 tokens in the H100 profile published with DistCA

    Raises ValueError for a coefficient that is negative or not finite.
    """

    page_seconds: float = _FLOPS / 388e12
    block_seconds: float = 1.09 * _FLOPS / 388e12
    launch_seconds: float = 25e-6
    backward_page_seconds: float = _BACKWARD_FLOPS / 348e12
    backward_block_seconds: float = 1.6 * _BACKWARD_FLOPS / 348e12
    backward_launch_seconds: float = 25e-6
    block: int = 128
    group: int = 1
    head_dim: int = 128
    v_head_dim: int = 128

    def __post_init__(self) -> None:
        for name, given in dataclasses.asdict(self).items():
            value = math.nan
            if isinstance(given, numbers.Real) and not isinstance(given, bool):
                with contextlib.suppress(OverflowError):  # a whole number beyond all floats
                    value = float(given)
            if not math.isfinite(value):
                raise ValueError(f"cost model: {name} ({given!r}) must be a finite number")
            if name.endswith("_seconds") and value < 0:
                raise ValueError(f"cost model: {name} ({given!r}) must be 0 or more")
            if not name.endswith("_seconds") and (not 1 <= value < 2**31 or not value.is_integer()):
                raise ValueError(f"cost model: {name} ({given!r}) must be a whole number of at least 1 and below 2**31")
            object.__setattr__(self, name, value if name.endswith("_seconds") else int(value))

    def scaled(self, spec: PoolSpec) -> CostModel:
        """The same model with coefficients for the block size and head widths of `spec`."""
        page = spec.block**2 * spec.group / (self.block**2 * self.group)
        width, wide = spec.head_dim + spec.value_dim, self.head_dim + self.v_head_dim
        backward = 3 * spec.head_dim + 2 * spec.value_dim, 3 * self.head_dim + 2 * self.v_head_dim
        rows = spec.block * spec.group * width / (self.block * self.group * wide)
        return dataclasses.replace(
            self,
            page_seconds=self.page_seconds * page * width / wide,
            block_seconds=self.block_seconds * rows,
            backward_page_seconds=self.backward_page_seconds * page * backward[0] / backward[1],
            backward_block_seconds=self.backward_block_seconds * rows,
            block=spec.block,
            group=spec.group,
            head_dim=spec.head_dim,
            v_head_dim=spec.value_dim,
        )

    def forward(self, pages: Amount, blocks: Amount = 0, launches: Amount = 0) -> Amount:
        """Seconds of a forward pass; numbers or arrays. Coefficients as they are: see `scaled`."""
        return self.page_seconds * pages + self.block_seconds * blocks + self.launch_seconds * launches

    def backward(self, pages: Amount, blocks: Amount = 0, launches: Amount = 0) -> Amount:
        """Seconds of a backward pass; numbers or arrays. Coefficients as they are: see `scaled`."""
        launch = self.backward_launch_seconds * launches
        return self.backward_page_seconds * pages + self.backward_block_seconds * blocks + launch

    @classmethod
    def fit(cls, spec: PoolSpec, forward: Measurements, backward: Measurements | None = None) -> CostModel:
        """A model for the shape of `spec` from measured times.

        forward, backward: (pages, blocks, launches, seconds), each (measurements,); see `fit_coefficients`. Without
        a backward measurement its coefficients are the forward ones times the default model's ratio.
        """
        page, block, launch = fit_coefficients(*forward)
        base = cls().scaled(spec)
        if backward is not None:
            back_page, back_block, back_launch = fit_coefficients(*backward)
        else:
            back_page = page * base.backward_page_seconds / base.page_seconds
            back_block = block * base.backward_block_seconds / base.block_seconds
            back_launch = launch
        return dataclasses.replace(
            base,
            page_seconds=page,
            block_seconds=block,
            launch_seconds=launch,
            backward_page_seconds=back_page,
            backward_block_seconds=back_block,
            backward_launch_seconds=back_launch,
        )

    def save(self, path: str | os.PathLike) -> None:
        """Write the model as JSON, one key a field."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(self), file, indent=2)
            file.write("\n")

    @classmethod
    def load(cls, path: str | os.PathLike) -> CostModel:
        """Read what `save` wrote. Raises FileNotFoundError, or ValueError naming the file and what is wrong in it."""
        with open(path, encoding="utf-8") as file:
            try:
                content = json.load(file)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"cost model {os.fspath(path)}: not JSON ({error})") from error
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(content, dict):
            raise ValueError(f"cost model {os.fspath(path)}: expected an object with {sorted(names)}")
        if content.keys() != names:
            missing, unknown = sorted(names - content.keys()), sorted(content.keys() - names)
            raise ValueError(f"cost model {os.fspath(path)}: missing {missing}, unknown {unknown}")
        try:
            return cls(**content)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error


Measurements = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def fit_coefficients(
    pages: npt.ArrayLike, blocks: npt.ArrayLike, launches: npt.ArrayLike, seconds: npt.ArrayLike
) -> tuple[float, float, float]:
    """Seconds per page, per block and per launch, none negative, by least squares on relative errors.

    All four: (measurements,) numbers. Each measurement is weighed by 1 / seconds, so that short and long ones count
    alike. Raises ValueError where shapes differ, fewer than 3 are given, or a number is negative, not finite or, for
    seconds, 0.
    """
    names = ("pages", "blocks", "launches", "seconds")
    columns = [np.asarray(value, np.float64) for value in (pages, blocks, launches, seconds)]
    shapes = [column.shape for column in columns]
    if len(set(shapes)) != 1 or columns[0].ndim != 1:
        raise ValueError(f"measurements must be four flat lists of one length, got shapes {shapes}")
    if columns[0].size < 3:
        raise ValueError(f"3 coefficients need at least 3 measurements, got {columns[0].size}")
    for name, column in zip(names, columns, strict=True):
        bad = ~np.isfinite(column) | (column < 0) | ((column == 0) if name == "seconds" else False)
        if bad.any():
            entry = int(np.argmax(bad))
            rule = "above 0" if name == "seconds" else "0 or more"
            raise ValueError(f"measurement {entry}: {name} ({column[entry]:g}) must be finite and {rule}")
    table = np.stack(columns[:3], axis=1) / columns[3][:, None]
    scale = table.max(axis=0)
    scale[scale == 0] = 1.0
    # Non-negative least squares over three unknowns: the best of the seven sets of unknowns that may be above zero.
    best, best_error = np.zeros(3), math.inf
    for chosen in ([0, 1, 2], [0, 1], [0, 2], [1, 2], [0], [1], [2]):
        part = (table / scale)[:, chosen]
        solution = np.linalg.lstsq(part, np.ones(len(table)), rcond=None)[0]
        error = float(np.square(part @ solution - 1).sum())
        if (solution >= 0).all() and error < best_error * (1 - 1e-9):
            best, best_error = np.zeros(3), error
            best[chosen] = solution
    page, block, launch = (best / scale).tolist()
    return page, block, launch


def sequence_seconds(lengths: Lengths, spec: PoolSpec, cost: CostModel | None = None) -> float:
    """What one sequence costs: one attention layer, all heads, forward and backward, on one GPU. What `place` balances.

    Launches are left out: every rank pays for them alike, whatever sequences it holds. cost: None is `CostModel()`.
    """
    ends = _running_sum(check_lengths(lengths, spec.seq_len))
    return float(_seconds(ends, np.array([0, ends.size - 1]), spec, cost)[0])


def sequences_seconds(
    lengths: npt.ArrayLike, counts: npt.ArrayLike, spec: PoolSpec, cost: CostModel | None = None
) -> np.ndarray:
    """`sequence_seconds` of many sequences at once, to the same bits: (sequences,) float64.

    lengths: (documents,) whole numbers, those of the first sequence first; may be memory-mapped. counts: (sequences,)
    documents of each; 0: all padding, 0 seconds. Takes time by documents, however long they are.

    Raises ValueError where the counts do not add up to the documents, and as `check_lengths`, naming the sequence.
    """
    given, number = np.asarray(lengths), np.asarray(counts)
    for name, array in {"document lengths": given, "counts": number}.items():
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ValueError(f"{name} must be one flat array of whole numbers, got {array.dtype} {array.shape}")
    if number.size and (number.min() < 0 or number.max() > given.size):
        least, most = number.min(), number.max()
        raise ValueError(f"counts must be from 0 to the {given.size} documents there are, got {least} to {most}")
    bounds = _running_sum(number)
    if bounds[-1] != given.size:
        raise ValueError(f"counts add up to {bounds[-1]} documents, but {given.size} lengths were given")
    seconds, begin = np.empty(number.size), 0
    while begin < number.size:  # in parts that stay in a processor's cache
        end = max(int(np.searchsorted(bounds, bounds[begin] + _PART_DOCUMENTS, side="right")) - 1, begin + 1)
        part, inside = given[bounds[begin] : bounds[end]], bounds[begin : end + 1] - bounds[begin]
        ends = _running_sum(part)
        limit = spec.seq_len
        if part.size and (part.min() < 1 or part.max() > limit or np.diff(ends[inside]).max() > limit):
            for i in range(end - begin):  # one of them is refused
                check_lengths(part[inside[i] : inside[i + 1]], limit, sequence=begin + i)
        seconds[begin:end] = _seconds(ends, inside, spec, cost)
        begin = end
    return seconds


_PART_DOCUMENTS = 2**16


def _seconds(ends: np.ndarray, bounds: np.ndarray, spec: PoolSpec, cost: CostModel | None) -> np.ndarray:
    """(sequences,) float64. ends, bounds: document lengths and each sequence's number of documents, as running sums."""
    block, reach = spec.block, spec.seq_len if spec.window is None else spec.window
    before = np.repeat(ends[bounds[:-1]], np.diff(bounds))
    start, end = ends[:-1] - before, ends[1:] - before
    # The blocks of a document are those whose first token it holds (see `block_pages`). The first of them visits
    # `fewest` pages and each further one a page more, up to `most` where a window cuts.
    first_block = (start + block - 1) // block
    blocks = (end + block - 1) // block - first_block
    fewest, most = first_block - start // block + 1, (reach + block - 2) // block + 1
    rising = np.clip(most - fewest, 0, blocks)
    pages = rising * fewest + rising * (rising - 1) // 2 + (blocks - rising) * most
    counts = [np.diff(_running_sum(amounts)[bounds]) for amounts in (pages, blocks)]
    cost = (CostModel() if cost is None else cost).scaled(spec)
    return spec.num_kv_heads * (cost.forward(*counts) + cost.backward(*counts))


def _running_sum(amounts: np.ndarray) -> np.ndarray:
    """(n + 1,) int64: the sum of the first 0, 1, ... n amounts."""
    sums = np.zeros(amounts.size + 1, np.int64)
    np.cumsum(amounts, dtype=np.int64, out=sums[1:])
    return sums
