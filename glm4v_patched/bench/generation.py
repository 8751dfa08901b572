"""``glm4v-patched bench --generate``: how fast answers are generated, ours and the original's code.

Each code is measured in a process of its own, which builds the model with random weights.
"""

import argparse
import json
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ..engine.environment import python_module, run_within, training_environment
from ..engine.options import require_packages
from ..inference.command import CACHES, add_weights
from ..models.quantised_weights import WEIGHTS, check_weights, kept_cache
from ..option_fields import (
    add_option,
    check_object,
    faults_of_fields,
    given,
    option,
    refuse_changed,
)
from ..result_files import add_rows, markdown, read_rows
from .settings import Settings


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What is measured, and how. Fields that :class:`Settings` has, too, are the same options."""

    batch: tuple[int, ...] = option((1, 8, 32), "rows at once, each number measured", at_least=1)
    new_tokens: int = option(128, "of each answer", at_least=2)
    prompt_tokens: int = option(40, "ids of text beside a prompt's picture", at_least=1)
    cache: str = option("auto", "auto: static, if steps compile on a GPU", choices=CACHES)
    draw_ahead: bool = option(False, "do not wait for the device between two tokens")
    compile_options: str = option(
        "{}", "laid over ours for inductor", metavar="JSON", check=check_object
    )
    attn_implementation: str = "sdpa"
    repeats: int = option(3, "timed answers of each batch; their median counts", at_least=1)
    config: str | None = None
    against: str | None = None
    device: str = "cuda"
    weights: str | None = None

    def __post_init__(self) -> None:
        faults = list(faults_of_fields(self))
        if self.device == "cpu" and self.config is None:
            faults.append(
                "--device cpu with the real model, of 13.9 billion weights: expected --config of "
                "a small one"
            )
        try:
            check_weights(self.weights, self.device, self.cache)
        except ValueError as error:
            faults.append(str(error))
        faults += self._conflicts()
        if self.against is not None and not Path(self.against, "config.json").is_file():
            faults.append(
                f"--against {self.against} has no config.json: expected a folder with the "
                "published repository"
            )
        if faults:
            raise ValueError("\n".join(faults))

    def _conflicts(self) -> Iterator[str]:
        if self.draw_ahead and self.cache == "dynamic":
            yield "--draw-ahead with --cache dynamic: expected --cache static or graph"
        if self.weights is None:
            return
        option, is_fixed = f"--weights {self.weights}", WEIGHTS[self.weights].fixed_cache
        if self.draw_ahead and self.cache == "auto" and not is_fixed:
            yield f"--draw-ahead with {option}, whose cache is dynamic: leave out one of them"
        if self.against is not None:
            yield f"{option} is not of the original's code, of --against: leave out one"

    @property
    def kept(self) -> str:
        """The cache that is measured."""
        return kept_cache(self.cache, self.weights, "static")


OF_TRAINING = "is of training: leave it out with --generate"
# Options of bench that are no settings, by their defaults.
OTHERS = {"gpus": 2, "pictures": None, "into": None}
REQUIRED = "batch", "implementation"
COLUMNS: dict[str, Callable[[dict], str]] = {
    "code": lambda row: row["implementation"],
    "transformers": lambda row: row.get("versions", {}).get("transformers", "-"),
    "device": lambda row: row.get("device", "-"),
    "weights": lambda row: row.get("weights") or "-",
    "cache": lambda row: row.get("cache", "-"),
    "draws ahead": lambda row: "yes" if row.get("draw_ahead") else "-",
    "batch": lambda row: str(row["batch"]),
    "first token, s": lambda row: row.get("error") or f"{row['first_token_s']:.3f}",
    "tokens/s": lambda row: f"{row['tokens_per_s']:,.1f}" if "tokens_per_s" in row else "-",
    "bandwidth": lambda row: f"{row['bandwidth_share']:.0%}" if "bandwidth_share" in row else "-",
    "GiB": lambda row: f"{row['peak_allocated_gib']:.1f}" if row.get("peak_allocated_gib") else "-",
}


def add_speed_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("--generate")
    add = group.add_argument
    add("--generate", action="store_true", help="measure generation, not training")
    for each in fields(Speed):
        if each.metadata:
            add_option(group, each)
    add("--python", metavar="FILE", help="Python that has the original's transformers")
    add_weights(parser)


def refuse_generation(options: argparse.Namespace) -> None:
    """Raise ``ValueError`` for an option that training would not heed."""
    told = "is of generation: leave it out, or add --generate"
    refuse_changed(options, Speed, Settings, told)
    if options.python is not None:
        raise ValueError(f"--python {told}")
    if options.weights is not None:
        raise ValueError(f"--weights {options.weights} {told}")


def measure_speed(options: argparse.Namespace) -> None:
    """Measure ours and, with ``--against``, the original's code; print the rows and add them to
    ``--out``; or, with ``--rows``, print the table of old ones. Raises ``ValueError`` for what
    cannot be measured, and ``RuntimeError`` for what is not installed, before anything runs."""
    for name, default in OTHERS.items():
        if getattr(options, name) != default:
            raise ValueError(f"--{name} {OF_TRAINING}")
    if options.rows:
        print(table([row for path in options.rows for row in read_rows(REQUIRED, path)]), end="")
        return
    refuse_changed(options, Settings, Speed, OF_TRAINING)
    asked = {each.name: getattr(options, each.name) for each in fields(Speed)}
    asked["batch"] = tuple(asked["batch"])
    speeds = [Speed(**asked | {"against": None})]
    if options.against is not None:
        speeds.append(Speed(**asked))
    if options.weights is not None:
        package = WEIGHTS[options.weights].package or ""
        require_packages(package, f"--weights {options.weights}")
    from ..models.placement import place  # imports pydantic

    place(1, options.device)
    if options.out:
        read_rows(REQUIRED, options.out, may_be_new=True)
    start = time.monotonic()
    for speed in speeds:
        rows = _measure(speed, options.python, options.timeout * len(speed.batch))
        if options.out:
            add_rows(REQUIRED, options.out, rows)
    print(f"measured in {time.monotonic() - start:.0f} s")


def table(rows: list[dict]) -> str:
    """In Markdown, by device and batch; else in the order of the rows."""
    order = sorted(rows, key=lambda row: (row.get("device", "-"), row["batch"]))
    return markdown([*COLUMNS], ([cell(row) for cell in COLUMNS.values()] for row in order))


def _measure(speed: Speed, python: str | None, timeout: float) -> list[dict]:
    """A row of each batch; ``error`` where there is none. What the process says is printed."""
    command = python_module("glm4v_patched.bench.generation_worker")
    if speed.against is not None and python is not None:
        command = [python, *command[1:]]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        environment = training_environment(1, speed.device == "cpu")
        settings = json.dumps(asdict(speed) | {"cache": speed.kept})
        error = _run([*command, settings, str(out)], environment, timeout)
        rows = json.loads(out.read_text()) if out.exists() else []
    whole = command_of(speed)
    implementation = "ours" if speed.against is None else "original"
    common = {"workload": "generate", "implementation": implementation, "weights": speed.weights}
    measured = {row["batch"] for row in rows}
    if error is not None:
        missing = [batch for batch in speed.batch if batch not in measured]
        print(f"{implementation}, batch {missing}: {error}")
        rows += [{"batch": batch, "error": error} for batch in missing]
    return [common | row | {"command": whole} for row in rows]


def _run(command: list[str], environment: dict[str, str], timeout: float) -> str | None:
    """What went wrong, if anything did."""
    status = run_within(timeout, command, environment)
    if status is None:
        return f"not done after {timeout:.0f} s"
    return f"the process ended with status {status}" if status else None


def command_of(speed: Speed) -> str:
    """The shortest command line that measures these rows."""
    held = [] if speed.weights is None else ["--weights", speed.weights]
    return "glm4v-patched bench --generate " + shlex.join([*given(speed, but=["weights"]), *held])
