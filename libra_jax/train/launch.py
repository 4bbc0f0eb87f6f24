"""The processes of a run on several hosts: who they are, as their launcher says, and how they become one JAX runtime.

SLURM, Open MPI and Kubernetes hand each process its number through environment variables; everywhere else flags say
it. `find_launch` reads them and refuses, before anything is started, what is missing or does not agree; `join` hands
the result to `jax.distributed.initialize`, which also finds the address of process 0 where the launcher knows it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

import jax

from libra_jax.train.config import LaunchConfig, MeshConfig
from libra_jax.train.watch import Watchdog

METHODS = "auto", "slurm", "openmpi", "kubernetes", "explicit"

_JAX_NAMES = {"slurm": "slurm", "openmpi": "ompi", "kubernetes": "k8s"}
_SLURM = "SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"
_OPENMPI = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"


@dataclasses.dataclass(frozen=True)
class Launch:
    """This process among those of its run.

    coordinator: HOST:PORT where process 0 listens; None: JAX asks the launcher. num_processes: None where only the
    launcher's own service knows it (Kubernetes). devices: numbers of the host's GPUs that this process takes; (): all.
    """

    method: str
    process_id: int
    num_processes: int | None
    coordinator: str | None = None
    devices: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """For messages."""
        count = "" if self.num_processes is None else f" of {self.num_processes}"
        return f"process {self.process_id}{count}"


def find_launch(
    method: str,
    environment: Mapping[str, str],
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    devices: Sequence[int] | None = None,
) -> Launch:
    """Who this process is. What is given goes before what the launcher says.

    method: one of `METHODS`; "auto" looks which launcher's variables there are. devices: None takes all GPUs of the
    host for a process that is alone there, else the one with the process' number on its host.
    Raises ValueError naming the variable or flag that is missing or contradicts another, with the values.
    """
    if method not in METHODS:
        raise ValueError(f"--multihost {method}: must be one of {', '.join(METHODS)}")
    if method == "auto":
        method = _launcher(environment) or ("explicit" if coordinator is not None else "")
    if not method:
        raise ValueError(
            "--multihost finds no launcher: neither SLURM (srun), nor Open MPI (mpirun), nor Kubernetes has set its "
            "variables. Start the processes with one of them, or say who is who: "
            "--coordinator HOST:PORT --num-processes N --process-id I"
        )
    if coordinator is not None and not re.fullmatch(r"\S+:\d+", coordinator):
        raise ValueError(f"--coordinator {coordinator} must be HOST:PORT, such as node001:6006")
    read = {"slurm": _slurm, "openmpi": _openmpi, "kubernetes": _kubernetes, "explicit": _explicit}[method]
    launch = read(environment, Launch(method, -1 if process_id is None else process_id, num_processes, coordinator))
    if launch.num_processes is not None:
        if launch.num_processes < 1:
            raise ValueError(f"there must be at least one process: --num-processes {launch.num_processes}")
        if not 0 <= launch.process_id < launch.num_processes:
            raise ValueError(
                f"the number of a process ({launch.process_id}) must be at least 0 and below how many there are "
                f"({launch.num_processes})"
            )
    return launch if devices is None else dataclasses.replace(launch, devices=tuple(devices))


def several_were_started(environment: Mapping[str, str]) -> str | None:
    """The variable that says that a launcher has started this process as one of several; None: none does."""
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        value = environment.get(name, "")
        if value.isdigit() and int(value) > 1:
            return f"{name}={value}"
    return None


def share_of(mesh: MeshConfig, launch: Launch) -> MeshConfig:
    """The mesh as one process makes its devices: of mesh.cpu_devices, which are all processes' together, each makes as
    many as the others. ValueError if that is no whole number."""
    if mesh.cpu_devices is None or launch.num_processes is None:
        return dataclasses.replace(mesh, cpu_devices=None)
    if mesh.cpu_devices % launch.num_processes:
        raise ValueError(
            f"mesh.cpu_devices ({mesh.cpu_devices}) are those of all processes together and must be a multiple of how "
            f"many there are ({launch.num_processes})"
        )
    return dataclasses.replace(mesh, cpu_devices=mesh.cpu_devices // launch.num_processes)


def join(launch: Launch, config: LaunchConfig) -> None:
    """Makes this process one of the run's JAX processes. Call it before JAX looks for devices.

    Raises ValueError if the launcher does not know the address. Where not all processes come in time, the watchdog ends
    this one: JAX would do so with a trace of its own code.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    known = launch.coordinator is not None and launch.num_processes is not None
    where = launch.coordinator or f"the address that {launch.method} knows"
    try:
        with Watchdog(launch.name, config.join_timeout_seconds) as watchdog:
            watchdog.doing(f"all processes to come together at {where} (launch.join_timeout_seconds)")
            jax.distributed.initialize(
                launch.coordinator,
                launch.num_processes,
                launch.process_id,
                local_device_ids=launch.devices,
                cluster_detection_method="deactivate" if known else _JAX_NAMES[launch.method],
                initialization_timeout=config.join_timeout_seconds + 60,
                heartbeat_timeout_seconds=config.heartbeat_timeout_seconds,
                shutdown_timeout_seconds=config.heartbeat_timeout_seconds,
            )
    except (RuntimeError, ValueError, OSError) as error:
        raise ValueError(f"the processes did not come together at {where}: {error}") from error


def _launcher(environment: Mapping[str, str]) -> str | None:
    """mpirun inside a SLURM job is what started the process, and so is srun inside a pod."""
    if "OMPI_COMM_WORLD_RANK" in environment:
        return "openmpi"
    if "SLURM_JOB_ID" in environment:
        return "slurm"
    return "kubernetes" if "KUBERNETES_SERVICE_HOST" in environment else None


def _slurm(environment: Mapping[str, str], given: Launch) -> Launch:
    values = _variables("slurm", _SLURM, environment, "start the processes with srun inside the job")
    count, number, local = (_whole(name, values[name]) for name in _SLURM[2:])
    _agree(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", count)
    nodes = environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES"))
    if nodes is not None and _whole("SLURM_STEP_NUM_NODES", nodes) > count:
        raise ValueError(f"slurm: SLURM_STEP_NUM_NODES ({nodes}) must be at most SLURM_NTASKS ({count})")
    here = _tasks_here(environment)
    if here is None:
        here = 1 if nodes is not None and int(nodes) == count else 2
    elif local >= here:
        raise ValueError(f"slurm: SLURM_LOCALID ({local}) must be below the tasks of its node ({here})")
    return _filled(given, number, count, _devices(environment, local, here))


def _tasks_here(environment: Mapping[str, str]) -> int | None:
    """Tasks of the step on this node, from lists such as "8(x3),4"; None where they are not given."""
    listed, node = environment.get("SLURM_STEP_TASKS_PER_NODE"), environment.get("SLURM_NODEID", "")
    if listed is None or not node.isdigit():
        return None
    counts: list[int] = []
    for part in listed.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"slurm: SLURM_STEP_TASKS_PER_NODE ({listed}) is no list such as 8(x3),4")
        counts += [int(match[1])] * int(match[2] or 1)
    if int(node) >= len(counts):
        raise ValueError(
            f"slurm: SLURM_NODEID ({node}) must be below the {len(counts)} nodes of SLURM_STEP_TASKS_PER_NODE "
            f"({listed})"
        )
    return counts[int(node)]


def _openmpi(environment: Mapping[str, str], given: Launch) -> Launch:
    values = _variables("openmpi", _OPENMPI, environment, "start the processes with mpirun")
    count, number, local = (_whole(name, values[name]) for name in _OPENMPI)
    here = _whole("OMPI_COMM_WORLD_LOCAL_SIZE", environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", str(count)))
    if local >= here:
        raise ValueError(
            f"openmpi: OMPI_COMM_WORLD_LOCAL_RANK ({local}) must be below OMPI_COMM_WORLD_LOCAL_SIZE ({here})"
        )
    if given.coordinator is None and "OMPI_MCA_orte_hnp_uri" not in environment and not _importable("mpi4py"):
        raise ValueError(
            "openmpi: since Open MPI 5 no variable says where process 0 is (OMPI_MCA_orte_hnp_uri is missing): give "
            "--coordinator HOST:PORT, HOST being that of rank 0, or install mpi4py"
        )
    return _filled(given, number, count, _devices(environment, local, here))


def _kubernetes(environment: Mapping[str, str], given: Launch) -> Launch:
    needed = "make the Job's completionMode Indexed"
    number = _variables("kubernetes", ["JOB_COMPLETION_INDEX"], environment, needed)["JOB_COMPLETION_INDEX"]
    if (given.coordinator is None or given.num_processes is None) and not _importable("kubernetes"):
        raise ValueError(
            "kubernetes: give --coordinator HOST:PORT (JOB-0.SERVICE:PORT) and --num-processes N; without them the "
            "cluster is asked, which takes the package kubernetes and a service account that may read pods and jobs"
        )
    return _filled(given, _whole("JOB_COMPLETION_INDEX", number), given.num_processes, ())


def _explicit(environment: Mapping[str, str], given: Launch) -> Launch:
    flags = {
        "--coordinator HOST:PORT": given.coordinator is not None,
        "--num-processes N": given.num_processes is not None,
        "--process-id I": given.process_id >= 0,
    }
    missing = [flag for flag, there in flags.items() if not there]
    if missing:
        raise ValueError(f"explicit: {', '.join(missing)} must be given as well")
    return given


def _filled(given: Launch, number: int, count: int | None, devices: tuple[int, ...]) -> Launch:
    if given.num_processes not in (None, count):
        raise ValueError(f"--num-processes {given.num_processes} contradicts {given.method}, which has {count}")
    if given.process_id not in (-1, number):
        raise ValueError(f"--process-id {given.process_id} contradicts {given.method}, which says {number}")
    return dataclasses.replace(given, process_id=number, num_processes=count, devices=devices)


def _devices(environment: Mapping[str, str], local: int, here: int) -> tuple[int, ...]:
    """All GPUs for a process that is alone on its host, or to which its launcher shows a single one; else its own."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    shown = None if visible is None else [part for part in visible.split(",") if part.strip()]
    if here == 1 or (shown is not None and len(shown) <= 1):
        return ()
    if shown is not None and local >= len(shown):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES ({visible}) has {len(shown)} GPUs, too few for process number {local} of this host; "
            "start one process per host, or as many as it has GPUs"
        )
    return (local,)


def _variables(method: str, names: Sequence[str], environment: Mapping[str, str], way_out: str) -> dict[str, str]:
    missing = [name for name in names if name not in environment]
    if missing:
        raise ValueError(f"{method}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; {way_out}")
    return {name: environment[name] for name in names}


def _whole(name: str, value: str) -> int:
    if not value.isdecimal():
        raise ValueError(f"{name} ({value!r}) must be a whole number")
    return int(value)


def _agree(environment: Mapping[str, str], name: str, other: str, value: int) -> None:
    there = environment.get(name)
    if there is not None and _whole(name, there) != value:
        raise ValueError(f"{name} ({there}) and {other} ({value}) contradict one another")


def _importable(package: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(package) is not None
