"""Compare loss curves of fast and plain settings: do they differ by more than seeds do?

``PYTHONPATH=. python docs/benchmarks/loss_curve.py --out FILE --image FILE`` trains all 300 million
weights of a randomly initialized model by recipes on drawn images, with two seeds for each kind of
settings (:data:`PATHS`). The seed decides the initial weights and the order of the data. All
curves, settings, versions and the verdict are written to ``--out``. The exit status is 1 if the
verdict is not as expected, 2 if a training failed.

The verdict (:func:`judge`): the distance of two curves is the root mean square of their difference,
both smoothed by a running mean of 10 steps, over all steps and again over the last quarter. The
noise is the distance of the two plain seeds. For each seed, both distances of the fast curve from
the plain one of that seed must be below the noise. ``--also blank`` adds a control that must
differ: the fast path with every image blank. ``--also fp8`` trains the fast path in fp8, with both
seeds, which must lie within the noise as the fast path does. With ``--reference fast`` the plain
path is not trained, and all others are compared with the fast one. ``--lora-after N`` compares
adapters of
the language model instead: all weights are trained for N steps on other wordings first, once, and
every path then trains adapters on those, of which a seed decides the initial weights.

The wording of an answer cannot be memorized, because it is sampled anew each time. At its end, each
training answers questions about unseen images; ``right`` is the share of exact answers. Only the
control's may be lower than the reference's lower seed by more than :data:`RIGHT_TOLERANCE`.
"""

import argparse
import json
import math
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch
from PIL import Image

from glm4v_patched import __version__
from glm4v_patched.data.rows import write_conversations
from glm4v_patched.demo.images import draw_data_set
from glm4v_patched.demo.tiny_model import IMAGE_SIDE, build_processor, save, tiny_config
from glm4v_patched.engine.environment import python_module_command
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM

SEEDS = (0, 1)
WARM_UP = 20
WINDOW = 10
VERSIONS = ("torch", "transformers", "deepspeed")
# Wordings of answers with their weights. They do not follow from the image, so the loss ends above
# zero and curves can be compared to their end. The held-out samples have the most frequent one.
WORDINGS = {"{answer}": 6, "It is {answer}.": 3, "One sees {answer}.": 1}
RIGHT_TOLERANCE = 0.01
# Name and wordings of the training of all weights that precedes the adapters'.
FIRST = "first"
FIRST_WORDINGS = {"Answer: {answer}": 4, "Surely {answer}!": 1}
# ``engine`` of the recipes.
NONE = {"tower": "none", "language": "none"}
SELECTIVE = {"tower": "selective", "language": "selective"}
PATHS: dict[str, dict] = {
    "plain": {"zero_stage": 1, "compile": False, **NONE},
    "fast": {"zero_stage": 3, "compile": True, **SELECTIVE},
}
PATHS |= {"blank": PATHS["fast"], "fp8": PATHS["fast"] | {"fp8": True}}


@dataclass(frozen=True)
class Size:
    """A model and its training.

    Args:
        language, tower: Overrides of :func:`tiny_model.tiny_config`.
        samples: Number of training images.
        held_out: Number of further images for the evaluation.
    """

    language: dict
    tower: dict
    image_side: int
    samples: int
    held_out: int
    micro_batch: int
    learning_rate: float


SIZES = {
    "tiny": Size({}, {}, IMAGE_SIDE, 256, 64, 16, 2e-3),
    "mid": Size(
        language={
            "num_layers": 10,
            "hidden_size": 1024,
            "ffn_hidden_size": 3584,
            "kv_channels": 128,
            "num_attention_heads": 8,
            "multi_query_group_num": 2,
            "initializer_range": 0.02,
        },
        tower={
            "num_hidden_layers": 12,
            "hidden_size": 896,
            "num_heads": 16,
            "intermediate_size": 5120,
        },
        image_side=336,
        samples=1024,
        held_out=512,
        micro_batch=16,
        learning_rate=3e-4,
    ),
}


def prepare(folder: Path, size: Size, rows: int, first_rows: int) -> None:
    """Write the inputs of all trainings.

    For every seed N: its model (``seed N``), its samples (``N.jsonl``), and the same with blank
    images (``blank N.jsonl``). Once: ``held_out.jsonl``, and ``first.jsonl`` with
    :data:`FIRST_WORDINGS`.
    """
    samples = draw_data_set(folder / "images", size.samples, 0, size.image_side)
    unseen = draw_data_set(folder / "unseen", size.held_out, 1, size.image_side)
    sets = {"held_out": unseen, FIRST: shuffled_epochs(samples, FIRST_WORDINGS, first_rows, 0)}
    blank = folder / "blank.png"
    Image.new("RGB", (size.image_side, size.image_side)).save(blank)
    for seed in SEEDS:
        sets[f"{seed}"] = shuffled_epochs(samples, WORDINGS, rows, seed)
        sets[f"blank {seed}"] = [
            [question | {"image": str(blank)}, answer] for question, answer in sets[f"{seed}"]
        ]
    for name, conversations in sets.items():
        write_conversations(folder / f"{name}.jsonl", conversations)
    every = [messages for conversations in sets.values() for messages in conversations]
    texts = [message["content"] for messages in every for message in messages]
    processor = build_processor(texts, size.image_side)
    config = tiny_config(processor.tokenizer, size.image_side, size.language, size.tower)
    for seed in SEEDS:
        torch.manual_seed(seed)
        save(GLM4VForCausalLM(config).to(torch.bfloat16), processor, folder / f"seed {seed}")


def shuffled_epochs(samples: list, wordings: dict[str, int], rows: int, seed: int) -> list:
    """Return ``rows`` samples in shuffled epochs, each in a wording sampled by its weight."""
    rng, num_epochs = random.Random(seed), math.ceil(rows / len(samples))
    epochs = [rng.sample(samples, len(samples)) for _ in range(num_epochs)]
    conversations = deepcopy([messages for epoch in epochs for messages in epoch][:rows])
    for messages in conversations:
        [wording] = rng.choices([*wordings], [*wordings.values()])
        messages[-1]["content"] = wording.format(answer=messages[-1]["content"])
    return conversations


def train(recipe: dict, options: argparse.Namespace) -> dict:
    """Run ``glm4v-patched train`` with a recipe, and return figures of its ``training.json``.

    Raises:
        RuntimeError: the training failed; the message has the end of its output.
    """
    file, out = Path(recipe["out"]).with_suffix(".json"), Path(recipe["out"])
    file.write_text(json.dumps(recipe))
    command = python_module_command("glm4v_patched", "train", str(file))
    device = "cpu" if runs_on_cpu(options.processes) else "cuda"
    command += ["--processes", str(options.processes), "--device", device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not done after {options.timeout:.0f} s") from None
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}\n{(done.stdout + done.stderr)[-6000:]}")
    report = json.loads((out / "training.json").read_text())
    return {
        "right": report["evaluations"][-1]["eval_exact_match"],
        "losses": [entry["loss"] for entry in report["history"]],
        **report["measured"],
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }


def recipe_of(name: str, size: Size, seed: int, folder: Path, options: argparse.Namespace) -> dict:
    """Return the recipe of a training."""
    trained, model, rows = "full", f"seed {seed}", f"{seed}.jsonl"
    engine, steps, rate = PATHS.get(name, PATHS["fast"]), options.steps, size.learning_rate
    if name == "blank":
        rows = f"blank {seed}.jsonl"
    if name == FIRST:
        rows, steps = "first.jsonl", options.lora_after
    elif options.lora_after:
        trained, model, rate = "lora_lm", FIRST, options.lora_learning_rate or rate
    if not options.compile:
        engine = engine | {"compile": False}
    return {
        "model": str(folder / model),
        "out": str(folder / (FIRST if name == FIRST else f"{name} {seed}")),
        "trained": trained,
        "data": {
            "train": str(folder / rows),
            "eval": str(folder / "held_out.jsonl"),
            "eval_answers": size.held_out,
        },
        "engine": engine,
        "trainer": {
            "max_steps": steps,
            "per_device_train_batch_size": size.micro_batch,
            "learning_rate": rate,
            "warmup_steps": min(WARM_UP, steps // 4),
            "seed": seed,
            "logging_steps": 1,
            "eval_steps": steps,
        },
    }


def runs_on_cpu(processes: int) -> bool:
    """Return whether there are fewer GPUs than processes."""
    return torch.cuda.device_count() < processes


def judge(curves: dict[str, dict[int, list[float]]]) -> dict:
    """Compare each curve with the reference of its seed, and the distance with the seeds' noise.

    Args:
        curves: By path and seed. The reference (:func:`reference_of`) with both seeds, and others.

    Returns:
        ``noise``, and for each other curve its ``distance``, both ``[all steps, last quarter]``,
        whether it lies ``within`` the noise, and whether that is ``as_it_should`` be.
    """
    reference = reference_of(curves)
    with_seeds = curves[reference]
    noise = distance(*with_seeds.values())
    verdict = {"reference": reference, "noise": noise, "curves": {}}
    for name, by_seed in curves.items():
        for seed, curve in by_seed.items() if name != reference else ():
            distances = distance(curve, with_seeds[seed])
            # False if a distance is NaN.
            within = all(d < n for d, n in zip(distances, noise, strict=True))
            verdict["curves"][f"{name}, seed {seed}"] = {
                "distance": distances,
                "within": within,
                "as_it_should": within != (name == "blank"),
            }
    verdict["as_it_should"] = all(row["as_it_should"] for row in verdict["curves"].values())
    return verdict


def judge_answers(runs: list[dict], reference: str) -> dict:
    """Return the share of ``right`` answers by path and seed, and if it is ``as_it_should`` be."""
    shares: dict[str, list[float]] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        shares.setdefault(run["path"], []).append(run["right"])
    minimum = min(shares[reference]) - RIGHT_TOLERANCE
    lowest = min(min(right) for name, right in shares.items() if name != "blank")
    return {"right": shares, "as_it_should": lowest >= minimum}


def reference_of(curves: dict[str, dict[int, list[float]]]) -> str:
    """Return the path that all others are compared with: ``plain`` if it was trained."""
    return "plain" if "plain" in curves else "fast"


def distance(curve: list[float], other: list[float]) -> list[float]:
    """Return the RMS difference of the smoothed curves, over all steps and over the last quarter.

    Averages that include earlier steps are not part of the last quarter.
    """
    difference = smoothed_difference(curve, other)
    last = difference[-max(len(curve) // 4 - WINDOW + 1, 1) :]
    return [math.sqrt(statistics.fmean(d * d for d in part)) for part in (difference, last)]


def smoothed_difference(curve: list[float], other: list[float]) -> list[float]:
    return [a - b for a, b in zip(smooth(curve), smooth(other), strict=True)]


def smooth(curve: list[float]) -> list[float]:
    """Return the running mean over :data:`WINDOW` steps."""
    return [statistics.fmean(curve[end - WINDOW : end]) for end in range(WINDOW, len(curve) + 1)]


def draw(curves: dict[str, dict[int, list[float]]], path: Path) -> None:
    """Plot all curves, and below them their differences to the reference with the seeds' band."""
    from matplotlib.figure import Figure

    colors = {
        "plain": ("0.35", "0.65"),
        "fast": ("tab:blue", "tab:orange"),
        "blank": ("tab:red",),
        "fp8": ("tab:purple", "tab:brown"),
    }
    figure = Figure(figsize=(8, 6.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    reference = reference_of(curves)
    noise = [abs(d) for d in smoothed_difference(*curves[reference].values())]
    steps = range(WINDOW, WINDOW + len(noise))
    band = f"{reference} seed 0 - {reference} seed 1, ±"
    below.fill_between(steps, [-d for d in noise], noise, color="0.85", label=band)
    for name, by_seed in curves.items():
        for (seed, curve), color in zip(by_seed.items(), colors[name], strict=False):
            label = f"{name}, seed {seed}"
            wide = name == reference  # the others are drawn on top of it
            above.plot(
                range(1, len(curve) + 1),
                curve,
                color=color,
                linewidth=3 if wide else 1,
                label=label,
            )
            if not wide and name != "blank":  # the control is far outside
                difference = smoothed_difference(curve, curves[reference][seed])
                label = f"{label} - {reference}"
                below.plot(steps, difference, color=color, linewidth=1, label=label)
    above.set(yscale="log", ylabel="loss (nats per supervised token)")
    below.set(xlabel="step", ylabel=f"difference, mean of {WINDOW} steps")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", ncols=2)
    figure.savefig(path, dpi=130)


def describe(verdict: dict) -> str:
    """Return the verdict as text."""

    def two(numbers: list[float]) -> str:
        return f"{numbers[0]:.4g} over all steps, {numbers[1]:.4g} over the last quarter"

    lines = [f"noise ({verdict['reference']}, seed 0 to seed 1): {two(verdict['noise'])}"]
    for name, row in verdict["curves"].items():
        position = "within" if row["within"] else "OUTSIDE of"
        remark = "" if row["as_it_should"] else ", which is not expected"
        lines.append(f"{name}: {two(row['distance'])}: {position} the noise{remark}")
    answers = verdict["answers"]
    for name, shares in answers["right"].items():
        lines.append(f"{name}: right answers {', '.join(f'{share:.3f}' for share in shares)}")
    if not answers["as_it_should"]:
        lines.append(f"a path has fewer right answers than {verdict['reference']}, unexpectedly")
    return "\n".join(lines)


def write(report: dict, path: Path) -> None:
    """Write JSON with one line for each entry and each training."""
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in report.items()]
    runs = ",\n".join(json.dumps(run) for run in report["runs"])
    lines[list(report).index("runs")] = f'"runs": [\n{runs}\n]'
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def curves_of(report: dict) -> dict[str, dict[int, list[float]]]:
    curves: dict[str, dict[int, list[float]]] = {}
    for run in sorted(report["runs"], key=lambda run: ([*PATHS].index(run["path"]), run["seed"])):
        curves.setdefault(run["path"], {})[run["seed"]] = run["losses"]
    return curves


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file of all results")
    parser.add_argument("--image", type=Path, required=True, help="PNG file of the curves")
    parser.add_argument("--size", choices=SIZES, default="mid")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, help="replaces the size's own")
    parser.add_argument(
        "--lora-learning-rate", type=float, help="learning rate of adapters, if it differs"
    )
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--also", nargs="+", choices=["blank", "fp8"], default=[])
    parser.add_argument(
        "--reference",
        choices=["plain", "fast"],
        default="plain",
        help="the path whose two seeds give the noise",
    )
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one training")
    parser.add_argument(
        "--at-once",
        type=int,
        default=1,
        help="trainings that run concurrently; their steps then take longer",
    )
    parser.add_argument(
        "--lora-after",
        type=int,
        default=0,
        metavar="STEPS",
        help="compare adapters, on a model whose weights were all trained for STEPS steps before",
    )
    options = parser.parse_args()
    if options.lora_learning_rate is not None and not options.lora_after:
        parser.error("--lora-learning-rate without --lora-after: no adapters are trained")
    if options.steps < 2 * WINDOW:
        parser.error(f"--steps {options.steps}: at least {2 * WINDOW} are needed")
    if options.size == "mid" and runs_on_cpu(options.processes):
        parser.error(
            f"--size mid takes a GPU for each of {options.processes} processes, and there are "
            f"{torch.cuda.device_count()}: use --size tiny, or fewer --processes"
        )
    if "fp8" in options.also and runs_on_cpu(options.processes):
        parser.error(f"--also fp8 takes a GPU for each of {options.processes} processes")
    try:
        report = train_all(options)
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    verdict = report["verdict"] = judge(curves_of(report))
    verdict["answers"] = judge_answers(report["runs"], verdict["reference"])
    verdict["as_it_should"] &= verdict["answers"]["as_it_should"]
    write(report, options.out)
    print(describe(verdict), flush=True)
    draw(curves_of(report), options.image)
    return 0 if verdict["as_it_should"] else 1


def train_all(options: argparse.Namespace) -> dict:
    """Train every requested path and seed; the report is written after each training."""
    size = SIZES[options.size]
    if options.learning_rate is not None:
        size = replace(size, learning_rate=options.learning_rate)
    first = ["plain", "fast"] if options.reference == "plain" else ["fast"]
    requested = [(name, seed) for name in first for seed in SEEDS]
    for name in options.also:
        requested += [(name, seed) for seed in (SEEDS if name == "fp8" else SEEDS[:1])]
    report = {
        "command": "python " + shlex.join(sys.argv),
        "processes": options.processes,
        "steps": options.steps,
        "size": asdict(size),
        "paths": {name: PATHS[name] for name in dict(requested)},
        "seed": "initial weights and order of samples",
        "versions": {name: version(name) for name in VERSIONS}
        | {"python": sys.version.split()[0], "glm4v-patched": __version__},
        "runs": [],
    }
    with tempfile.TemporaryDirectory() as name:
        folder, batch = Path(name), options.processes * size.micro_batch
        prepare(folder, size, options.steps * batch, options.lora_after * batch)
        if options.lora_after:
            report["first"] = train_one(FIRST, size, SEEDS[0], folder, options)
            print(summary(report["first"]), flush=True)
        with ThreadPoolExecutor(options.at_once) as pool:
            trainings = [
                pool.submit(train_one, path, size, seed, folder, options)
                for path, seed in requested
            ]
            failed = None
            for training in as_completed(trainings):
                try:
                    report["runs"].append(training.result())
                except CancelledError:
                    continue
                except RuntimeError as error:
                    # Trainings that run already are finished and stored.
                    failed = failed or error
                    pool.shutdown(wait=False, cancel_futures=True)
                    continue
                write(report, options.out)
                print(summary(report["runs"][-1]), flush=True)
            if failed is not None:
                raise failed
    return report


def summary(run: dict) -> str:
    losses = run["losses"]
    return (
        f"{run['path']}, seed {run['seed']}: loss {losses[0]:.4f} to {losses[-1]:.4f}, "
        f"{run['right']:.3f} right, all {run['total_s']} s"
    )


def train_one(name: str, size: Size, seed: int, folder: Path, options: argparse.Namespace) -> dict:
    """Train, and return an entry of the report's ``runs``."""
    start = time.time()
    try:
        figures = train(recipe_of(name, size, seed, folder, options), options)
    except RuntimeError as error:
        raise RuntimeError(f"{name}, seed {seed}: {error}") from error
    return {"path": name, "seed": seed, "total_s": round(time.time() - start)} | figures


if __name__ == "__main__":
    sys.exit(main())
