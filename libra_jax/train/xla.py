"""XLA's options for a run: those that Libra sets, and what the user puts in their place.

Three places say something, each over the one before: `schedule.OVERLAP_OPTIONS` on GPUs, the environment's XLA_FLAGS,
and the config's `xla` (`--xla NAME=VALUE`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from libra_jax.schedule import OVERLAP_OPTIONS

Option = bool | int | float | str


def compiler_options(platform: str, given: Sequence[str]) -> dict[str, Option]:
    """What the compiler is handed: {name: value}. platform: "gpu" or "cpu". given: NAME=VALUE each.

    Options that XLA_FLAGS names are left out, as they would hide what stands there. Raises ValueError for what is not
    NAME=VALUE.
    """
    flags = {flag.lstrip("-").partition("=")[0] for flag in os.environ.get("XLA_FLAGS", "").split()}
    defaults = OVERLAP_OPTIONS if platform == "gpu" else {}
    return {name: value for name, value in defaults.items() if name not in flags} | read_options(given)


def read_options(given: Sequence[str]) -> dict[str, Option]:
    """NAME=VALUE each -> {name: value}, values as booleans and numbers where they are."""
    options = {}
    for text in given:
        name, equals, value = text.partition("=")
        name = name.strip().lstrip("-")
        if not equals or not name or not value:
            raise ValueError(f"xla: {text!r} must be NAME=VALUE, such as xla_gpu_enable_latency_hiding_scheduler=true")
        options[name] = _value(value.strip())
    return options


def check_options(given: Sequence[str]) -> None:
    """Raises ValueError for an option that this XLA does not know, or a value it does not take."""
    for name, value in read_options(given).items():
        try:
            shape = jax.ShapeDtypeStruct((), jnp.int32)
            jax.jit(lambda x: x).lower(shape).compile(compiler_options={name: value})
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"xla: {name}={value} is nothing that this XLA takes: {reason}") from error


def describe_options(platform: str, given: Sequence[str]) -> str:
    """One line: the options of a run, and what XLA_FLAGS adds."""
    options = " ".join(f"{name}={_text(value)}" for name, value in compiler_options(platform, given).items())
    return f"XLA: {options or 'its own options'}; XLA_FLAGS: {os.environ.get('XLA_FLAGS') or 'not set'}"


def _value(text: str) -> Option:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _text(value: Option) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
