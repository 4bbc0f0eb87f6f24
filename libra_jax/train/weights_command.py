"""`libra import` and `libra export`: a run that starts from a Hugging Face folder, and such a folder from a checkpoint.

What is imported lies in the run folder as checkpoint 0, weights alone: a run started there makes the optimizer's state
itself. It binds the shape of the model, not data, mesh, optimizer or rotary positions, which the run's config states.
Both work on any number of devices: arrays are spread over all there are.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh
from orbax.checkpoint import v1 as ocp
from rich.console import Console

from libra_jax.data.durable import replace
from libra_jax.models.hugging_face import CONFIG_FILE, config_from_hugging_face, weight_values
from libra_jax.models.hugging_face_read import read_weights
from libra_jax.models.hugging_face_write import COMPANIONS, refuse_existing, write_weights
from libra_jax.train.checkpoint import whole_steps
from libra_jax.train.config import MeshConfig, TrainConfig, fixed_values, refuse_changes
from libra_jax.train.folder import RunFolder, hold_folder
from libra_jax.train.mesh import make_mesh
from libra_jax.train.step import plan_state


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """What `libra export` writes, beside the run and its config."""

    out: Path
    """Folder to write; must not be there yet."""
    step: int | None = None
    """Which checkpoint; None: the newest."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the numbers written; ours are float32."""
    shard_bytes: int = 5_000_000_000
    """No file holds more, unless a single tensor does."""


def companions_of(folder: RunFolder) -> Path:
    """Where a run keeps the tokenizer and the config.json that its weights came with."""
    return folder.path / "hugging_face"


def import_weights(source: Path, config: TrainConfig, console: Console) -> None:
    """Writes checkpoint 0 of `config.run_dir` from the weights in `source`, a folder as Hugging Face has it.

    Raises ValueError or OSError for what does not fit together: the model and the folder, or a run folder that has
    checkpoints already.
    """
    differing = model_differences(source, config)
    mesh = mesh_of_all_devices()
    with hold_folder(Path(config.run_dir)) as folder:
        if steps := whole_steps(folder.checkpoints):
            raise ValueError(
                f"{folder.path} has a checkpoint of step {steps[-1]} already; give another --run-dir, or remove it"
            )
        begin = time.perf_counter()
        params = read_weights(source, plan_state(without_axes(config), mesh).shapes["params"])
        if jax.process_index() == 0:
            keep_companions(source, companions_of(folder))
        save_imported(folder, params, config)
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
        seconds = time.perf_counter() - begin
        _say(console, f"{count:,} parameters from {source} in {seconds:.1f} s: step 0 in {folder.checkpoints}")
    for line in differing:
        _say(console, line)


def model_differences(folder: Path, config: TrainConfig) -> list[str]:
    """Raises ValueError if the config's model is not the one in `folder`, naming all that differs; returns lines on
    rotary positions that differ, which may be meant."""
    published = config_from_hugging_face(folder)
    there, here = weight_values(published), weight_values(config.model)
    names = [*there, *(name for name in here if name not in there)]
    lines = [
        f"  {name}: {there.get(name, 'nothing')} there, {here.get(name, 'nothing')} in the config"
        for name in names
        if there.get(name) != here.get(name)
    ]
    if lines:
        raise ValueError("\n".join([f"{folder} holds another model than the config:", *lines]))
    return [
        f"{name} is {getattr(published, name)} in {folder / CONFIG_FILE}; the run takes the config's, "
        f"{getattr(config.model, name)}"
        for name in ("rope_theta", "rope_scaling")
        if getattr(published, name) != getattr(config.model, name)
    ]


def keep_companions(source: Path, beside: Path) -> None:
    """Copies tokenizer and config.json into the folder `beside`: each file whole, or as it was there before.

    Raises OSError if they cannot be written.
    """
    found = {name: (source / name).read_bytes() for name in (CONFIG_FILE, *COMPANIONS) if (source / name).is_file()}
    try:
        beside.mkdir(exist_ok=True)
        for name, content in found.items():
            replace(beside / name, content)
    except OSError as error:
        for begun in beside.glob("*.writing"):
            begun.unlink()
        raise OSError(f"{beside} could not be written: {error.strerror or error}; step 0 is not saved") from error


def save_imported(folder: RunFolder, params: Any, config: TrainConfig) -> None:
    """Writes checkpoint 0: {"state": {"params"}, "values"}, the latter as `refuse_changes` takes them, of the model
    alone."""
    values = {"config": {f"model.{name}": value for name, value in weight_values(config.model).items()}, "data": {}}
    parts = {"state": {"params": params}, "values": values}
    try:
        with ocp.training.Checkpointer(str(folder.checkpoints.absolute()), cleanup_tmp_directories=True) as saver:
            saver.save_checkpointables(0, parts, force=True)
    except Exception as error:  # whoever notices a full disk
        raise OSError(f"step 0 could not be saved in {folder.checkpoints}: {error}") from error


def export_weights(run_dir: Path, options: ExportOptions, config: TrainConfig, console: Console) -> None:
    """Writes the weights of a checkpoint in `run_dir` to `options.out`, a folder that transformers loads.

    Raises ValueError or OSError where checkpoint and config do not fit, or the disk takes no more; then there is
    nothing under that name.
    """
    refuse_existing(options.out)
    if config.attention.window is not None:
        raise ValueError(
            f"attention.window is {config.attention.window}: a folder that is written says nothing of windows, so the "
            f"model in it would be another one"
        )
    folder = RunFolder(run_dir)
    step = choose_step(folder, options.step)
    begin = time.perf_counter()
    params = restore_params(folder, step, config, mesh_of_all_devices())
    beside = companions_of(folder)
    files = write_weights(
        options.out,
        params,
        config.model,
        options.dtype,
        options.shard_bytes,
        max_positions=config.seq_len,
        companions=beside if beside.is_dir() else None,
    )
    seconds = time.perf_counter() - begin
    _say(console, f"step {step} of {folder.path} as {options.dtype} in {seconds:.1f} s: {options.out}")
    for file in files:
        _say(console, f"  {file}")


def choose_step(folder: RunFolder, step: int | None) -> int:
    """`step`, or the newest. Raises ValueError with the steps there are, if it is not among them."""
    steps = whole_steps(folder.checkpoints)
    if not steps:
        raise ValueError(f"{folder.checkpoints} has no whole checkpoint")
    if step is not None and step not in steps:
        raise ValueError(
            f"{folder.checkpoints} has no checkpoint of step {step}; there are: {', '.join(map(str, steps))}"
        )
    return steps[-1] if step is None else step


def restore_params(folder: RunFolder, step: int, config: TrainConfig, mesh: Mesh) -> Any:
    """The weights of one checkpoint, without the optimizer's state, spread over `mesh`.

    Raises ValueError naming what differs if the config's model is not the one that the checkpoint was made with.
    """
    path = str((folder.checkpoints / str(step)).absolute())
    saved = ocp.load_checkpointables(path, {"values": None})["values"]["config"]
    saved = {name: value for name, value in saved.items() if name.startswith("model.")}
    now = fixed_values(config.model, "model.")
    if step == 0:  # imported: it binds less
        now = {f"model.{name}": value for name, value in weight_values(config.model).items()}
    refuse_changes({"config": saved, "data": {}}, {"config": now, "data": {}}, str(folder.path))
    shapes = plan_state(without_axes(config), mesh).shapes["params"]
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        return ocp.load_checkpointables(path, {"state": {"params": shapes}})["state"]["params"]


def mesh_of_all_devices() -> Mesh:
    """All devices there are along one axis, for arrays that are only to lie somewhere."""
    return make_mesh(MeshConfig(pools=len(jax.devices())))


def without_axes(config: TrainConfig) -> TrainConfig:
    """The same model on a mesh with none of the axes that say who has which heads and layers."""
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, tp=1, pp=1))


def _say(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, highlight=False, markup=False)
