"""The `libra` command: `libra train CONFIG`, `libra preflight CONFIG`, `libra prepare INPUT...`, `libra inspect PATH`.

Each command imports what it needs when it runs: help, `prepare` and `inspect` never wait for JAX. A mistake of the
user's is answered by one message on stderr and exit status 2, a run that could not go on by status 1, Ctrl-C by 130;
`libra train` has two more, see its help.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import io
import os
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from libra_jax.train.config import TrainConfig

CONFIGS = Path("configs")


class UsageError(Exception):
    """What the user asked for is not there; the message says what is."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    if sys.stderr is None:  # closed: what would be said there must not end in the output
        sys.stderr = io.StringIO()
    if not args or args[0] in ("-h", "--help"):
        print(_overview())
        return 0 if args else 2
    if args[0] == "--version":
        from libra_jax import __version__

        print(f"libra {__version__}")
        return 0
    try:
        if args[0] not in COMMANDS:
            raise UsageError(_unknown("command", args[0], list(COMMANDS)))
        return COMMANDS[args[0]][1](args[1:])
    except UsageError as error:
        return _complain(error, 2)
    except KeyboardInterrupt:
        return _complain("stopped by the user", 130)


def train(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(_train_help())
        return 0 if args else 2
    name, rest = args[0], args[1:]
    command = f"{program()} train"
    if name.startswith("-"):
        raise UsageError(f"the config comes first: {command} CONFIG {shlex.join(args)}")
    given, overrides = _launch_options(rest)
    if {"-h", "--help"} & set(overrides):
        print(_launch_help())
    config = override(load_config(name), overrides, prog=f"{command} {name}")

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # read when JAX is first imported
    from rich.console import Console

    from libra_jax.train.launch import find_launch, several_were_started
    from libra_jax.train.loop import Preempted, RunStopped
    from libra_jax.train.loop import train as run
    from libra_jax.train.together import PeerStopped, peer_is_gone

    try:
        if given:
            launch = find_launch(given.pop("multihost"), os.environ, **given)
        elif sign := several_were_started(os.environ):
            raise ValueError(f"{sign} processes were started together; --multihost makes them one run")
        else:
            launch = None
    except ValueError as error:
        return _complain(error, 2)

    def end(message: object, status: int) -> int:
        """Says which process complains. The others may be gone or stuck: this one does not wait for them."""
        if launch is None:
            return _complain(message, status)
        _complain(f"{launch.name}: {message}", status)
        sys.stdout.flush()
        os._exit(status)

    console = Console(highlight=False, quiet=launch is not None and launch.process_id > 0)
    try:
        result = run(config, console, launch)
    except (ValueError, OSError) as error:
        return end(error, 2)
    except (RunStopped, PeerStopped) as error:
        return end(error, 1)
    except Preempted as error:
        if launch is not None and launch.process_id > 0:
            return PREEMPTED_STATUS
        return _complain(f"{error} To go on: {command} {shlex.join(args)}", PREEMPTED_STATUS)
    except KeyboardInterrupt:
        return end(f"stopped by the user; to go on from the last checkpoint: {command} {shlex.join(args)}", 130)
    except Exception as error:
        if launch is None:
            raise
        if peer_is_gone(error):
            what = str(error).partition("\n")[0]
            return end(f"broke off; most likely another process is gone, whose own output says why ({what})", 1)
        traceback.print_exc()
        return end(f"{type(error).__name__}: {error}", 3)
    if result.records:
        from libra_jax.train.report import report  # draws, which takes long to import

        report(config, result, console, command=f"{command} {shlex.join([name, *_without_steps(rest)])}")
    return 0


def _launch_options(args: list[str]) -> tuple[dict[str, Any], list[str]]:
    """What `libra train` is told of the other processes, as `find_launch` takes it; and what else there is, with the
    options of --xla gathered behind one of them."""
    given: dict[str, Any] = {}
    overrides, xla = [], []
    words = list(args)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name == "--multihost":
            plain = not equals and words and not words[0].startswith("-")
            given["multihost"] = value if equals else words.pop(0) if plain else "auto"
        elif name in LAUNCH_FLAGS or name == "--xla":
            if not equals:
                if not words or words[0].startswith("-"):
                    raise UsageError(f"{name} needs a value, such as {LAUNCH_FLAGS.get(name, 'NAME=VALUE')}")
                value = words.pop(0)
            if name == "--xla":
                xla.append(value)
            else:
                given[name[2:].replace("-", "_")] = _launch_value(name, value)
        else:
            overrides.append(word)
    if given and "multihost" not in given:
        flag = next(iter(given)).replace("_", "-")
        raise UsageError(f"--{flag} says who is who among several processes and needs --multihost beside it")
    if "local_device_ids" in given:
        given["devices"] = given.pop("local_device_ids")
    return given, [*overrides, *(["--xla", *xla] if xla else [])]


def _launch_value(name: str, value: str) -> Any:
    if name == "--coordinator":
        return value
    numbers = value.split(",") if name == "--local-device-ids" else [value]
    if not all(number.isdecimal() for number in numbers):
        raise UsageError(f"{name} {value!r}: must be like {LAUNCH_FLAGS[name]}")
    return [int(number) for number in numbers] if name == "--local-device-ids" else int(value)


def _without_steps(overrides: list[str]) -> list[str]:
    """Overrides but for --steps, for a command that goes on for more of them."""
    kept, skip = [], False
    for word in overrides:
        if not skip and word != "--steps" and not word.startswith("--steps="):
            kept.append(word)
        skip = word == "--steps"
    return kept


def preflight(args: list[str]) -> int:
    command = f"{program()} preflight"
    if not args or args[0] in ("-h", "--help"):
        print(_preflight_help())
        return 0 if args else 2
    name, rest = args[0], args[1:]
    if name.startswith("-"):
        raise UsageError(f"the config comes first: {command} CONFIG {shlex.join(args)}")
    given, overrides = _preflight_options(rest, f"{command} {name}")
    config = override(load_config(name), overrides, prog=f"{command} {name}")

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read when JAX is first imported
    from libra_jax.preflight import command as preflight_command

    try:
        options = preflight_command.PreflightOptions(**given)
        return preflight_command.run(options, config, Path(name).stem, f"{command} {shlex.join(args)}")
    except (ValueError, RuntimeError, OSError) as error:
        return _complain(error, 2)
    except Exception as error:  # 1 would say that the step does not fit
        traceback.print_exc()
        return _complain(f"preflight broke off, which is a bug: {type(error).__name__}: {error}", 3)


def _preflight_options(args: list[str], prog: str) -> tuple[dict[str, Any], list[str]]:
    """The options of `libra preflight` itself, and what else there is: overrides of the config."""
    given: dict[str, Any] = {}
    overrides = []
    words = iter(args)
    for word in words:
        name, equals, value = word.partition("=")
        if word == "--json":
            given["json"] = True
        elif name in ("--target", "--topology", "--report"):
            value = value if equals else next(words, None)
            if not value or (not equals and value.startswith("--")):
                raise UsageError(f"{name} needs a value; {prog} --help shows one")
            given[name[2:]] = Path(value) if name == "--report" else value
        elif word in ("-h", "--help") and not overrides:
            print(_preflight_help())
            raise SystemExit(0)
        else:
            overrides.append(word)
    for name, example in (("target", "h100"), ("topology", "1x8x8")):
        if name not in given:
            raise UsageError(f"--{name} is missing: {prog} --{name} {example} ...")
    return given, overrides


def inspect(args: list[str]) -> int:
    import tyro

    from libra_jax import inspect_corpus

    positional = (tyro.conf.PositionalRequiredArgs,)
    options = tyro.cli(inspect_corpus.InspectOptions, args=args, prog=f"{program()} inspect", config=positional)
    return _answered(lambda: inspect_corpus.run(options))


def simulate(args: list[str]) -> int:
    import tyro

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read when JAX is first imported
    from libra_jax.simulate import command

    options = tyro.cli(command.SimulateOptions, args=args, prog=f"{program()} simulate")
    return _answered(lambda: command.run(options))


def prepare(args: list[str]) -> int:
    import dataclasses
    from inspect import cleandoc
    from typing import Annotated

    import tyro

    from libra_jax.data import prepare as command

    about_inputs = tyro.conf.arg(
        metavar="INPUT...",
        help="JSONL (.jsonl, .json), Parquet and text files, compressed (.gz, .zst) or not, and folders of them.",
        help_behavior_hint="(at least one)",
    )
    inputs = Annotated[tuple[Path, ...], tyro.conf.Positional, about_inputs]
    options = Annotated[command.PrepareOptions, tyro.conf.arg(name="")]
    both = dataclasses.make_dataclass("prepare", [("inputs", inputs), ("options", options)])
    description = cleandoc(command.PrepareOptions.__doc__ or "")
    asked = tyro.cli(both, args=args, prog=f"{program()} prepare", description=description)
    try:
        return command.run(asked.inputs, asked.options)
    except (ValueError, OSError) as error:
        return _complain(error, 2)
    except command.PrepareStopped as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        return _complain(f"stopped by the user; to go on: {program()} prepare {shlex.join(args)}", 130)


def import_weights(args: list[str]) -> int:
    from typing import Annotated

    import tyro

    about = "Model folder as Hugging Face has it: config.json, safetensors files, tokenizer."
    folder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER", help=about)]
    asked, config = _with_config("import", "Make a model's weights step 0 of a run.", args, [("folder", folder)])

    from libra_jax.train import weights_command

    return _weights(lambda console: weights_command.import_weights(asked.folder, config, console))


def export_weights(args: list[str]) -> int:
    from typing import Annotated

    import tyro

    from libra_jax.train import weights_command

    run_dir = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR", help="Folder of the run.")]
    options = Annotated[weights_command.ExportOptions, tyro.conf.arg(name="")]
    fields = [("run_dir", run_dir), ("options", options)]
    asked, config = _with_config("export", "Write a checkpoint as a Hugging Face folder.", args, fields)
    return _weights(lambda console: weights_command.export_weights(asked.run_dir, asked.options, config, console))


def _with_config(command: str, what: str, args: list[str], fields: list[Any]) -> tuple[Any, TrainConfig]:
    """The command's own arguments, and the config that --config names with what else there is as overrides."""
    import dataclasses
    from typing import Annotated

    import tyro

    about = "A name in ./configs, or a path. Its fields can be overridden: --run-dir PATH, say."
    both = dataclasses.make_dataclass(command, [*fields, ("config", Annotated[str, tyro.conf.arg(help=about)])])
    prog = f"{program()} {command}"
    asked, overrides = tyro.cli(both, args=args, prog=prog, description=what, return_unknown_args=True)
    return asked, override(load_config(asked.config), overrides, prog=f"{prog} ... --config {asked.config}")


def _weights(run: Callable[[Any], None]) -> int:
    from rich.console import Console

    return _answered(lambda: run(Console(highlight=False)) or 0)


def _answered(run: Callable[[], int]) -> int:
    """Status of a command that answers on standard output: 1, without a word, where the reader has gone (`| head`)."""
    if sys.stdout is None:
        return _complain("there is no standard output to answer on", 2)
    try:
        return run()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor at exit, when the rest would be written
        return 1
    except (ValueError, OSError) as error:
        return _complain(error, 2)


PREEMPTED_STATUS = 75
"""Of a run that was told to stop, saved itself and can go on."""
LAUNCH_FLAGS = {
    "--coordinator": "node001:6006",
    "--num-processes": "4",
    "--process-id": "0",
    "--local-device-ids": "0,1",
}
"""Flags of `libra train` that go with --multihost, with an example each."""

COMMANDS: dict[str, tuple[str, Callable[[list[str]], int]]] = {
    "train": ("train a model, or go on with a run that stopped", train),
    "preflight": ("say what a training step will need on a cluster, without one", preflight),
    "prepare": ("tokenise text once, for training at any sequence length", prepare),
    "import": ("start a run from the weights of a Hugging Face folder", import_weights),
    "export": ("write a run's weights as a Hugging Face folder", export_weights),
    "simulate": ("say what training takes on a cluster, under Libra and others, and whether it pays", simulate),
    "inspect": ("show how skewed a corpus is, and what that costs", inspect),
}


def program() -> str:
    """This program as the user called it, for messages that can be pasted; `libra` where that is not known."""
    called = sys.argv[0]
    if Path(called) == Path(__file__):  # python -m libra_jax.cli
        return f"{shlex.quote(sys.orig_argv[0])} -m libra_jax.cli"
    if Path(called).name != "libra" or (os.path.isabs(called) and called == shutil.which("libra")):
        return "libra"
    return shlex.quote(called)


def config_path(name: str, folder: Path = CONFIGS) -> Path:
    """The file of a config: a path as it is, a name in `folder`. Raises UsageError with the nearest name."""
    if name.endswith(".py") or "/" in name:
        if not Path(name).is_file():
            raise UsageError(f"there is no file {name}")
        return Path(name)
    path = folder / f"{name}.py"
    if not path.is_file():
        if Path(f"{name}.py").is_file():
            raise UsageError(f"there is no config {name!r} in the folder {folder}; did you mean {name}.py?")
        there = sorted(file.stem for file in folder.glob("[!_]*.py"))
        if not there:
            raise UsageError(
                f"there is no config {name!r}: the folder {folder.absolute()} has none; give a path instead"
            )
        raise UsageError(_unknown("config", name, there))
    return path


def load_config(name: str) -> TrainConfig:
    """Calls `config()` of the file that `name` stands for. Raises UsageError if it cannot give a TrainConfig."""
    path = config_path(name)
    spec = importlib.util.spec_from_file_location(f"libra_config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = module.config() if callable(getattr(module, "config", None)) else None
    except (Exception, SystemExit) as error:  # whatever the user's own code raises
        what = f"{type(error).__name__}: {error}"
        raise UsageError(f"{path} could not be loaded: {what}{_line_of(error, path)}") from error

    from libra_jax.train.config import TrainConfig

    if not isinstance(config, TrainConfig):
        there = callable(getattr(module, "config", None))
        got = f"its config() gives {type(config).__name__}" if there else "it has none"
        raise UsageError(f"{path} must have a function `config() -> TrainConfig`, and {got}")
    return config


def _line_of(error: BaseException, path: Path) -> str:
    """Where in the file at `path` an error came from; a syntax error in that file says so itself."""
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).resolve() == path.resolve():
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    return f" ({path}, line {lines[-1]})" if lines else ""


def override(config: TrainConfig, args: list[str], prog: str) -> TrainConfig:
    """`config` with the fields that `args` name. Unknown names are refused with the nearest ones, status 2."""
    import tyro

    from libra_jax.train.config import TrainConfig

    try:
        return tyro.cli(TrainConfig, default=config, args=args, prog=prog, config=(tyro.conf.AvoidSubcommands,))
    except ValueError as error:
        raise UsageError(error) from error


def _overview() -> str:
    width = max(len(name) for name in COMMANDS)
    lines = "\n".join(f"  {name:<{width}}  {what}" for name, (what, _) in COMMANDS.items())
    return f"usage: libra COMMAND ...\n\n{lines}\n\n{program()} COMMAND --help says more."


def _train_help() -> str:
    lines = [
        "usage: libra train CONFIG [--multihost [HOW]] [--xla NAME=VALUE ...] [--FIELD VALUE ...]",
        "",
        "CONFIG is a name in ./configs, or a path to a Python file with a function config() -> TrainConfig.",
        f"{program()} train CONFIG --help lists every field that can be overridden, its type and its value.",
        "Started again with the same run folder, a run goes on from its last checkpoint.",
        "",
        _launch_help(),
        "Exit status: 0 done, 1 could not go on, 2 could not start, 74 another process hangs, 75 saved and stopped by",
        "SIGTERM, 130 Ctrl-C.",
    ]
    return "\n".join([*lines, *_list_of_configs()])


def _launch_help() -> str:
    return """Several processes, one per host or one per GPU (examples in configs/launch):
  --multihost [auto|slurm|openmpi|kubernetes|explicit]
                               this is one of them; auto, or nothing, takes the launcher whose variables are set
  --coordinator HOST:PORT      where process 0 listens, if the launcher does not know
  --num-processes N            how many there are, if the launcher does not know
  --process-id I               which of them this is, from 0, if the launcher does not know
  --local-device-ids 0,1       the host's GPUs that this one takes; left out: all for a process that is alone on its
                               host, else the one with its number there
  --xla NAME=VALUE             an option of the compiler, over those that Libra sets; may be repeated
"""


def _preflight_help() -> str:
    lines = [
        "usage: libra preflight CONFIG --target GPU --topology SLICESxHOSTSxGPUS [--json] [--report PATH]",
        "                       [--FIELD VALUE ...]",
        "",
        "Compiles the whole training step for a cluster of GPUs on this machine, which needs none, and says whether it",
        "fits, which exchanges run under which work, and what the kernels need.",
        "",
        "  --target    h100, h200 or b200",
        "  --topology  slices x hosts in a slice x GPUs in a host, such as 1x8x8; as many GPUs as the config's mesh",
        "  --json      print JSON instead of tables",
        "  --report    also write PATH.md and PATH.json",
        "  --FIELD     override a field of the config; libra train CONFIG --help lists them",
        "",
        "Exit status: 0 it fits, 1 it does not fit, 2 the question could not be answered.",
    ]
    return "\n".join([*lines, *_list_of_configs()])


def _list_of_configs() -> list[str]:
    found = sorted(CONFIGS.glob("[!_]*.py"))
    if not found:
        return []
    width = max(len(path.stem) for path in found)
    return ["", "configs:"] + [f"  {path.stem:<{width}}  {_first_line(path)}" for path in found]


def _first_line(path: Path) -> str:
    """First line of a file's docstring, without running it."""
    try:
        return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
    except (OSError, SyntaxError, ValueError):
        return ""


def _unknown(what: str, name: str, there: list[str]) -> str:
    near = difflib.get_close_matches(name, there, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else "."
    return f"there is no {what} {name!r}{hint} There are: {', '.join(there)}"


def _complain(message: object, status: int) -> int:
    print(f"libra: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
