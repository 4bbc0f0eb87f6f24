"""Who may import whom. The imports of every file are read from its syntax tree, so a forbidden one is found even where
it is hidden in a function. The layers, each seeing only those before it:

    spec, links, intervals, workload, placement, assignments, planner,
    routing, tables, table_checks, modelled, memory, plan           host side: NumPy only, never jax
    hlo, schedule                                                   text of compiled programs: nothing but Python
    targets, processes, exchange, relays, waves, attention, rope, layers  device side
    data (host side only), policies (host side only), models, train, preflight, simulate, cli

`libra_kernels` stands alone on jax. Nothing that ships imports benchmarks, tests or configs.
"""

import ast
import graphlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import libra_jax

ROOT = Path(__file__).parent.parent
HOST = [
    "spec",
    "links",
    "intervals",
    "workload",
    "placement",
    "assignments",
    "planner",
    "routing",
    "tables",
    "table_checks",
    "modelled",
    "memory",
    "plan",
]
TEXT = ["hlo", "schedule"]
DEVICE = ["targets", "processes", "exchange", "relays", "waves", "attention", "rope", "layers"]

# layer: (layers of libra_jax that it may import beside itself, what it may import from outside beside the standard
# library). A module of a layer that is not listed here fails the first test: give it a place.
LAYERS: dict[str, tuple[list[str], set[str]]] = {
    **{name: (HOST[:i], {"numpy"}) for i, name in enumerate(HOST)},
    **{
        name: (HOST + TEXT + DEVICE[:i], {"numpy", "jax", "jaxtyping", "libra_kernels"})
        for i, name in enumerate(DEVICE)
    },
    **{name: (TEXT[:i], set()) for i, name in enumerate(TEXT)},
    "data": (HOST, {"numpy", "grain", "absl", "array_record", "pyarrow", "tokenizers", "rich"}),
    "plots": ([], {"numpy", "matplotlib"}),
    "inspect_corpus": ([*HOST, "data", "plots"], {"numpy", "rich"}),
    "models": (HOST + DEVICE, {"numpy", "jax", "jaxtyping", "flax", "libra_kernels", "safetensors"}),
    "train": (
        [*HOST, *TEXT, *DEVICE, "data", "plots", "models"],
        {"numpy", "jax", "jaxtyping", "flax", "optax", "orbax", "grain", "rich", "tensorboardX"},
    ),
    "preflight": ([*HOST, *TEXT, *DEVICE, "models", "train"], {"numpy", "jax", "rich"}),
    "policies": (HOST, {"numpy"}),
    "simulate": ([*HOST, "data", "policies", "models", "train"], {"numpy", "matplotlib", "rich", "tyro"}),
    "cli": (
        [*HOST, *TEXT, *DEVICE, "data", "plots", "inspect_corpus", "models", "train", "preflight", "simulate"],
        {"rich", "tyro"},
    ),
}
LAYERS["layers"][1].add("flax")
KERNELS_MAY_IMPORT = {"jax", "numpy", "jaxtyping", "jax_triton", "triton"}

# Imports that are allowed inside a function and nowhere else: (module, imported), with the reason.
LATE = {
    ("libra_jax.tables", "jax"),  # registers the tables as a pytree, only once somebody else has imported jax
}


def module_name(path: Path) -> str:
    """The dotted name that `path`, under the root or under kernels/, is imported by."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "kernels" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    module_name(path): path
    for folder in ("libra_jax", "kernels/libra_kernels")
    for path in (ROOT / folder).rglob("*.py")
}


def imports(module: str, path: Path) -> Iterator[tuple[str, bool]]:
    """(dotted name of the module imported, whether the import stands inside a function), type checkers' aside."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]

    def walk(node: ast.AST, in_function: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, in_function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                yield (resolve(base, alias.name), in_function)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                yield from walk(child, in_function)
        else:
            inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from walk(child, inside)

    return walk(ast.parse(path.read_text()), False)


def resolve(base: str, name: str) -> str:
    """The module behind `from base import name`: a submodule, the home of a re-exported name, or `base` itself."""
    if f"{base}.{name}" in FILES:
        return f"{base}.{name}"
    if base == "libra_jax" and name in libra_jax._HOME:
        return f"libra_jax.{libra_jax._HOME[name]}"
    return base


def outside(module: str) -> str | None:
    """The top-level package of `module`, or None for the standard library and libra_jax itself."""
    top = module.partition(".")[0]
    return None if top in sys.stdlib_module_names or top in ("libra_jax", "__future__") else top


def layer_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_the_walk_sees_every_kind_of_import(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        "import os, jax.numpy as jnp\nfrom libra_jax import planner, PoolSpec, __version__\nfrom .step import a\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import never\nelse:\n    import other\n"
        "class C:\n    import in_class\n    def f(self):\n        from ..data import late\n"
    )
    assert list(imports("libra_jax.train.x", file)) == [
        ("os", False), ("jax.numpy", False), ("libra_jax.planner", False), ("libra_jax.spec", False),
        ("libra_jax", False), ("libra_jax.train.step", False), ("typing", False), ("other", False),
        ("in_class", False), ("libra_jax.data", True),
    ]  # fmt: skip


@pytest.mark.parametrize("module", sorted(name for name in FILES if name.startswith("libra_jax.")))
def test_each_module_imports_only_layers_before_it(module: str) -> None:
    layer = layer_of(module)
    assert layer in LAYERS, f"{module} has no layer: give '{layer}' a place in tests/test_layers.py"
    below, external = LAYERS[layer]
    for imported, in_function in imports(module, FILES[module]):
        top = outside(imported)
        if top is not None:
            late = in_function and (module, top) in LATE
            assert top in external or late, f"{module} imports {imported}; {layer} may import {sorted(external)}"
        elif imported.startswith("libra_jax."):
            allowed = [layer, *below]
            assert layer_of(imported) in allowed, f"{module} imports {imported}; {layer} may import {allowed}"


@pytest.mark.parametrize("module", sorted(name for name in FILES if name.startswith("libra_kernels")))
def test_kernels_stand_on_jax_alone(module: str) -> None:
    for imported, _ in imports(module, FILES[module]):
        assert not imported.startswith("libra_jax"), f"{module} imports {imported}"
        assert outside(imported) in {None, "libra_kernels", *KERNELS_MAY_IMPORT}, f"{module} imports {imported}"


def test_no_two_modules_import_each_other() -> None:
    graph = {
        module: {name for name, in_function in imports(module, path) if name in FILES and not in_function} - {module}
        for module, path in FILES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_what_ships_imports_nothing_undeclared_and_needs_all_that_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements: list[str]) -> set[str]:
        cut = str.maketrans("[<>=~!;", "       ")
        return {line.translate(cut).split()[0].replace("-", "_") for line in requirements}

    called = {"orbax_checkpoint": "orbax", "absl_py": "absl"}
    declared = {called.get(name, name) for name in names(project["dependencies"])}
    optional = names(project["optional-dependencies"]["cuda"])
    imported = {outside(name) for module, path in FILES.items() for name, _ in imports(module, path)}
    imported -= {None, "libra_kernels"}
    assert imported - optional <= declared
    assert declared <= imported, f"declared in pyproject.toml but never imported: {sorted(declared - imported)}"


def test_the_public_surface_is_the_same_for_people_and_type_checkers() -> None:
    tree = ast.parse((ROOT / "libra_jax/__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    for_checkers = {
        alias.name: (node.module or "").removeprefix("libra_jax.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert for_checkers == libra_jax._HOME
    for name in libra_jax.__all__:
        assert getattr(libra_jax, name).__module__.startswith("libra_jax.")


def test_host_side_and_command_line_leave_jax_alone_and_are_cheap() -> None:
    program = (
        "import sys, time; start = time.process_time(); import libra_jax, {modules}\n"
        "print(time.process_time() - start, *sorted(m for m in sys.modules if m in ('jax', 'jaxlib', 'flax', 'grain')))"
    ).format(modules=", ".join(f"libra_jax.{name}" for name in [*HOST, "cli"]))
    outputs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(3)
    ]
    assert all(len(output) == 1 for output in outputs), f"they import {outputs[0][1:]}"
    seconds = min(float(output[0]) for output in outputs)  # of this process, the least of three: others may be busy
    assert seconds < 0.5, f"importing them takes {seconds:.2f} s of CPU time; it was 0.13 s, most of it NumPy's"
