"""Loss curves of the fast path beside those of the plain one: do they differ by more than seeds do?

``PYTHONPATH=. python docs/benchmarks/loss_curve.py --out FILE --picture FILE``
trains both towers of a model of 300 million random
weights on drawn pictures, with two seeds on each path (:data:`PATHS`), each training in processes
of its own. A seed decides the initial weights and the order of the data; the two paths start from
the same file of weights and see the same samples in the same steps. All curves, settings, versions
and the verdict go to ``--out``; the exit status is 1 if the verdict is not what it should be, 2 if
a training failed.

The verdict (:func:`judge`): the distance of two curves is the root mean square of their difference,
both smoothed by a running mean of 10 steps, over all steps and again over the last quarter. The
noise is the distance of the two plain seeds. For each seed, both distances of the fast curve from
the plain one of that seed must be below the noise. ``--also blank`` adds a control that must not:
the fast path with every picture blank. ``--also fp8`` trains the fast path in fp8, with both seeds,
which must lie within the noise as the fast path does. With ``--reference fast`` the plain path is
not trained, and all others are compared with the fast one. ``--lora-after N`` compares adapters of
the language model instead: all weights are trained for N steps on other wordings first, once, and
every path then trains adapters on those, of which a seed decides the initial weights.

No answer's wording can be learned by heart: it is drawn anew each time that a sample is seen. At
its end each training answers questions about pictures that it has not seen: ``right`` is the share
of whose every token is the likeliest. Only the control's may be lower than the reference's lower
seed by more than :data:`ROUGHLY`.
"""

import argparse
import json
import math
import os
import shlex
import statistics
import sys
import tempfile
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from glm4v_patched import __version__
from glm4v_patched.data.collate import ConversationCollator
from glm4v_patched.demo.pictures import draw_data_set
from glm4v_patched.demo.tiny_model import IMAGE_SIDE, build_processor, tiny_config
from glm4v_patched.engine.fp8 import require_fp8
from glm4v_patched.engine.options import ADAMW, MAX_GRAD_NORM, EngineOptions
from glm4v_patched.engine.prepare import Engine, start
from glm4v_patched.remote.configuration_chatglm import ChatGLMConfig
from glm4v_patched.remote.loss import IGNORE_INDEX
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.distributed.strategies import start_deepspeed
from tests.helpers.processes import cpu_environment, gpu_environment, on_processes, run_with_limit

SEEDS = (0, 1)
WARM_UP = 20
WINDOW = 10
VERSIONS = ("torch", "transformers", "deepspeed")
# The answer's wording, here with its share, does not follow from the picture. So the loss ends
# above zero, and curves can be compared to their end.
WORDINGS = {"{answer}": 6, "It is {answer}.": 3, "One sees {answer}.": 1}
ROUGHLY = 0.01
# What adapters are trained after, and the name of that training.
FIRST = "first"
FIRST_WORDINGS = {"Answer: {answer}": 4, "Surely {answer}!": 1}


@dataclass(frozen=True)
class Training:
    """How a model is trained.

    ``checkpoints`` is a policy of :mod:`activation_checkpointing`, for both towers; ``compiled``
    layers are gathered whole where ZeRO shards weights; ``trained`` is the engine's.
    """

    zero_stage: int
    attention: str
    compiled: bool
    checkpoints: str
    skip_logits: bool
    blank: bool = False
    fp8: bool = False
    trained: str = "full"


FAST = {
    "zero_stage": 3,
    "attention": "sdpa",
    "compiled": True,
    "checkpoints": "selective",
    "skip_logits": True,
}
PATHS = {
    "plain": Training(1, "eager", compiled=False, checkpoints="none", skip_logits=False),
    "fast": Training(**FAST),
    "blank": Training(**FAST, blank=True),
    "fp8": Training(**FAST, fp8=True),
}


@dataclass(frozen=True)
class Size:
    """A model, as changes to :func:`tiny_model.tiny_config`, and how it is trained.

    ``micro_batch`` counts samples, ``samples`` is how many are drawn to train on and ``held_out``
    how many beside them, ``kept_gathered`` weights may stay gathered on the fast path
    (:func:`deepspeed_config`).
    """

    language: dict
    tower: dict
    image_side: int
    samples: int
    held_out: int
    micro_batch: int
    learning_rate: float
    kept_gathered: float


SIZES = {
    "tiny": Size({}, {}, IMAGE_SIDE, 256, 64, 16, 2e-3, 0),
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
        # The share of 300 million in the real model's default.
        kept_gathered=2e7,
    ),
}


def prepare(folder: Path, size: Size, lora: bool) -> dict:
    """Write the samples (``data.pt``; ``held_out.pt``; for ``lora`` also ``first.pt``, with
    :data:`FIRST_WORDINGS`) and, for every seed, the initial weights (``seed N``).

    A file holds a row for each sample in each wording, first all of the first wording, a picture
    for each sample, and the wordings' ``shares``.

    Returns:
        The numbers of parameters: ``all``, and of them ``tower``.
    """
    drawn = draw_data_set(folder / "pictures", size.samples, 0, size.image_side)
    unseen = draw_data_set(folder / "unseen", size.held_out, 1, size.image_side)
    sets = {"data.pt": (drawn, WORDINGS), "held_out.pt": (unseen, {"{answer}": 1})}
    if lora:
        sets["first.pt"] = drawn, FIRST_WORDINGS
    rows = [
        row for of, wordings in sets.values() for wording in wordings for row in said(of, wording)
    ]
    processor = build_processor([m["content"] for row in rows for m in row], size.image_side)
    collator = ConversationCollator(processor)
    for name, (of, wordings) in sets.items():
        data: dict = {"input_ids": [], "labels": [], "shares": [*wordings.values()]}
        for wording in wordings:
            encoded, images = collator.encode(said(of, wording))
            data["input_ids"] += [torch.tensor(row) for row in encoded]
            data["labels"] += [torch.tensor(collator.labels(row)) for row in encoded]
        data["pixel_values"] = images["pixel_values"].to(torch.bfloat16)
        torch.save(data, folder / name)
    config = tiny_config(processor.tokenizer, size.image_side, size.language, size.tower)
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = GLM4VForCausalLM(config).to(torch.bfloat16)
        model.save_pretrained(folder / f"seed {seed}")
    vision = model.transformer.vision
    return {
        "all": sum(parameter.numel() for parameter in model.parameters()),
        "tower": sum(parameter.numel() for parameter in vision.parameters()),
    }


def said(conversations: list, wording: str) -> list:
    found = deepcopy(conversations)
    for messages in found:
        messages[-1]["content"] = wording.format(answer=messages[-1]["content"])
    return found


def order_of_rows(samples: int, shares: list[int], needed: int, seed: int) -> list[int]:
    """``needed`` rows of a file of :func:`prepare`: shuffled epochs of all samples, one after the
    other, each time in a wording drawn by its share."""
    generator = torch.Generator().manual_seed(seed)
    epochs = math.ceil(needed / samples)
    shuffled = [torch.randperm(samples, generator=generator) for _ in range(epochs)]
    weights = torch.tensor(shares, dtype=torch.float32)
    wordings = torch.multinomial(weights, needed, replacement=True, generator=generator)
    return (wordings * samples + torch.cat(shuffled)[:needed]).tolist()


def make_batch(data: dict, chosen: list[int], path: Training, device: str) -> dict[str, Tensor]:
    """The chosen rows, padded on the right."""
    ids = [data["input_ids"][number] for number in chosen]
    labels = [data["labels"][number] for number in chosen]
    batch = {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORE_INDEX),
    }
    samples = len(data["pixel_values"])
    pixels = data["pixel_values"][[number % samples for number in chosen]]
    batch["pixel_values"] = torch.zeros_like(pixels) if path.blank else pixels
    return {name: values.to(device) for name, values in batch.items()}


def learning_rate_at(step: int, steps: int, highest: float) -> float:
    """Linear warm-up, then half a cosine to zero."""
    warm_up = min(WARM_UP, steps // 4)
    if step < warm_up:
        return highest * (step + 1) / warm_up
    return highest * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up))) / 2


def start_engine(path: Training, size: Size, weights: Path) -> Engine:
    """The model on this process, prepared as the recipe's, with fp32 master weights."""
    start_deepspeed()
    options = EngineOptions(
        trained=path.trained,
        zero_stage=path.zero_stage,
        fp8=path.fp8,
        attn_implementation=path.attention,
        tower=path.checkpoints,
        language=path.checkpoints,
        compile=path.compiled,
        offload=False,
        stage3_max_live_parameters=size.kept_gathered,
        skip_logits=path.skip_logits,
        loss_chunk_size=32,  # several chunks a batch
    )
    require_fp8(options, ChatGLMConfig.from_pretrained(weights))
    load = partial(GLM4VForCausalLM.from_pretrained, weights)
    return start(options, load, size.micro_batch, size.learning_rate)


def train(asked: dict) -> dict:
    """What one process does: train, and average each step's loss over all processes."""
    path, size = Training(**asked["path"]), Size(**asked["size"])
    seed, steps = asked["seed"], asked["steps"]
    device = "cpu"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device = "cuda"
    data = torch.load(asked["data"], mmap=True)
    torch.manual_seed(seed)  # of adapters
    engine = start_engine(path, size, Path(asked["weights"]))
    rank, processes = torch.distributed.get_rank(), torch.distributed.get_world_size()
    in_step = processes * size.micro_batch
    samples, needed = len(data["pixel_values"]), steps * in_step
    order = order_of_rows(samples, data["shares"], needed, seed)
    losses, ended = [], [time.perf_counter()]
    for step in range(steps):
        engine.set_learning_rate(learning_rate_at(step, steps, size.learning_rate))
        chosen = order[step * in_step : (step + 1) * in_step][rank::processes]
        losses.append(engine.step(make_batch(data, chosen, path, device)).float())
        if device == "cuda":
            torch.cuda.synchronize()
        ended.append(time.perf_counter())
    mean = torch.stack(losses)
    torch.distributed.all_reduce(mean)
    seconds = [after - before for before, after in zip(ended, ended[1:], strict=False)]
    if asked["save"] is not None and rank == 0:
        engine.model.save_pretrained(asked["save"])
    held_out = torch.load(asked["held_out"], mmap=True)
    return {
        "right": share_right(engine, held_out, path, size.micro_batch, device),
        "losses": [round(loss, 6) for loss in (mean / processes).tolist()],
        "first_step_s": round(seconds[0], 2),
        "median_step_s": round(statistics.median(seconds), 4),
        "peak_allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)
        if device == "cuda"
        else None,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }


@torch.no_grad()
def share_right(engine: Engine, data: dict, path: Training, micro_batch: int, device: str) -> float:
    """The share of rows of whose labels each is the likeliest token. Layers are not compiled."""
    engine.model.eval()
    right, rows = 0, range(len(data["input_ids"]))
    with torch.compiler.set_stance("force_eager"):
        for first in rows[::micro_batch]:
            chosen = [*rows[first : first + micro_batch]]
            batch = make_batch(data, chosen, path, device)
            wanted = batch.pop("labels")[:, 1:]
            found = engine.model(**batch).logits[:, :-1].argmax(-1)
            right += int(((found == wanted) | (wanted == IGNORE_INDEX)).all(-1).sum())
    return right / len(rows)


def runs_on_cpu(processes: int) -> bool:
    """True unless there is a GPU for each process."""
    return torch.cuda.device_count() < processes


def train_in_processes(asked: dict, processes: int, timeout: float) -> dict:
    """One training in processes of its own. Raises ``RuntimeError`` with the end of its output."""
    out = Path(asked["out"])
    environment = gpu_environment()
    if runs_on_cpu(processes):
        environment = cpu_environment() | {"LOCAL_SIZE": str(processes)}
    command = on_processes(processes, __file__, json.dumps(asked))
    ended = run_with_limit(command, timeout, environment)
    # The result may be there although a process was slow to end.
    if out.exists():
        return json.loads(out.read_text())
    how = f"exit status {ended.status}" if ended.status is not None else f"{timeout:.0f} s were up"
    raise RuntimeError(f"{how}\n{ended.output[-6000:]}")


def judge(curves: dict[str, dict[int, list[float]]]) -> dict:
    """Compare all curves with the reference's of their seed, and that with its seeds' noise.

    Args:
        curves: By path and seed. The reference (:func:`reference_of`) with both seeds, and others.

    Returns:
        ``noise``, and for each other curve its ``distance``, both ``[all steps, last quarter]``;
        whether it lies ``within`` the noise, and whether that is ``as_it_should`` be.

    """
    reference = reference_of(curves)
    with_seeds = curves[reference]
    noise = distance(*with_seeds.values())
    verdict = {"reference": reference, "noise": noise, "curves": {}}
    for name, of_path in curves.items():
        for seed, curve in of_path.items() if name != reference else ():
            far = distance(curve, with_seeds[seed])
            # A distance that is no number is not below.
            within = all(d < n for d, n in zip(far, noise, strict=True))
            verdict["curves"][f"{name}, seed {seed}"] = {
                "distance": far,
                "within": within,
                "as_it_should": within != (name == "blank"),
            }
    verdict["as_it_should"] = all(row["as_it_should"] for row in verdict["curves"].values())
    return verdict


def judge_answers(runs: list[dict], reference: str) -> dict:
    """The share of ``right`` answers of each path and seed, and whether it is ``as_it_should``."""
    shares: dict[str, list[float]] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        shares.setdefault(run["path"], []).append(run["right"])
    least = min(shares[reference]) - ROUGHLY
    lowest = min(min(of) for name, of in shares.items() if name != "blank")
    return {"right": shares, "as_it_should": lowest >= least}


def reference_of(curves: dict[str, dict[int, list[float]]]) -> str:
    """The path that all others are compared with: ``plain``, or ``fast`` where that is missing."""
    return "plain" if "plain" in curves else "fast"


def distance(curve: list[float], other: list[float]) -> list[float]:
    """Root mean square of the smoothed curves' difference: over all steps, over the last quarter.

    The last quarter holds no average that reaches back before it.
    """
    difference = smoothed_difference(curve, other)
    last = difference[-max(len(curve) // 4 - WINDOW + 1, 1) :]
    return [math.sqrt(statistics.fmean(d * d for d in part)) for part in (difference, last)]


def smoothed_difference(curve: list[float], other: list[float]) -> list[float]:
    return [a - b for a, b in zip(smooth(curve), smooth(other), strict=True)]


def smooth(curve: list[float]) -> list[float]:
    """Means of :data:`WINDOW` steps, each at its last step."""
    return [statistics.fmean(curve[end - WINDOW : end]) for end in range(WINDOW, len(curve) + 1)]


def draw(curves: dict[str, dict[int, list[float]]], path: Path) -> None:
    """All curves; below, how far each is from the reference's of its seed, in the seeds' band."""
    from matplotlib.figure import Figure

    colours = {
        "plain": ("0.35", "0.65"),
        "fast": ("tab:blue", "tab:orange"),
        "blank": ("tab:red",),
        "fp8": ("tab:purple", "tab:brown"),
    }
    figure = Figure(figsize=(8, 6.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    reference = reference_of(curves)
    apart = [abs(d) for d in smoothed_difference(*curves[reference].values())]
    steps = range(WINDOW, WINDOW + len(apart))
    band = f"{reference} seed 0 - {reference} seed 1, ±"
    below.fill_between(steps, [-d for d in apart], apart, color="0.85", label=band)
    for name, of_path in curves.items():
        for (seed, curve), colour in zip(of_path.items(), colours[name], strict=False):
            label = f"{name}, seed {seed}"
            wide = name == reference  # the others lie on top of it
            above.plot(
                range(1, len(curve) + 1),
                curve,
                color=colour,
                linewidth=3 if wide else 1,
                label=label,
            )
            if not wide and name != "blank":  # the control is far outside
                difference = smoothed_difference(curve, curves[reference][seed])
                label = f"{label} - {reference}"
                below.plot(steps, difference, color=colour, linewidth=1, label=label)
    above.set(yscale="log", ylabel="loss (nats per supervised token)")
    below.set(xlabel="step", ylabel=f"difference, mean of {WINDOW} steps")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", ncols=2)
    figure.savefig(path, dpi=130)


def describe(verdict: dict) -> str:
    """The verdict in lines."""

    def two(numbers: list[float]) -> str:
        return f"{numbers[0]:.4g} over all steps, {numbers[1]:.4g} over the last quarter"

    lines = [f"noise ({verdict['reference']}, seed 0 to seed 1): {two(verdict['noise'])}"]
    for name, row in verdict["curves"].items():
        place = "within" if row["within"] else "OUTSIDE of"
        should = "" if row["as_it_should"] else ", and should not be"
        lines.append(f"{name}: {two(row['distance'])}: {place} the noise{should}")
    answers = verdict["answers"]
    for name, shares in answers["right"].items():
        lines.append(f"{name}: right answers {', '.join(f'{share:.3f}' for share in shares)}")
    if not answers["as_it_should"]:
        lines.append(f"fewer answers are right than of {verdict['reference']}, and should not be")
    return "\n".join(lines)


def write(report: dict, path: Path) -> None:
    """JSON with a line for each entry and for each training."""
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
    parser.add_argument("--out", type=Path, required=True, help="JSON file for all that was seen")
    parser.add_argument("--picture", type=Path, required=True, help="PNG file of the curves")
    parser.add_argument("--size", choices=SIZES, default="mid")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, help="another than the size's own")
    parser.add_argument("--lora-learning-rate", type=float, help="of adapters, if it is another")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--also", nargs="+", choices=["blank", "fp8"], default=[])
    parser.add_argument(
        "--reference", choices=["plain", "fast"], default="plain", help="what gives the noise"
    )
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one training")
    parser.add_argument(
        "--at-once",
        type=int,
        default=1,
        help="trainings that share the processors; their steps then take longer",
    )
    parser.add_argument(
        "--lora-after",
        type=int,
        default=0,
        metavar="STEPS",
        help="compare adapters, on a model of which all weights were trained for so many steps",
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
    draw(curves_of(report), options.picture)
    return 0 if verdict["as_it_should"] else 1


def train_all(options: argparse.Namespace) -> dict:
    """Train on every path with every seed that is asked for. The report is written after each."""
    size, paths = SIZES[options.size], PATHS
    if options.learning_rate is not None:
        size = replace(size, learning_rate=options.learning_rate)
    if not options.compile:
        paths = {name: replace(path, compiled=False) for name, path in PATHS.items()}
    if options.lora_after:
        paths = {name: replace(path, trained="lora_lm") for name, path in paths.items()}
    first_size = size
    if options.lora_learning_rate is not None:
        size = replace(size, learning_rate=options.lora_learning_rate)
    first = ["plain", "fast"] if options.reference == "plain" else ["fast"]
    wanted = [(name, seed) for name in first for seed in SEEDS]
    for name in options.also:
        wanted += [(name, seed) for seed in (SEEDS if name == "fp8" else SEEDS[:1])]
    report = {
        "command": "python " + shlex.join(sys.argv),
        "processes": options.processes,
        "steps": options.steps,
        "size": asdict(size),
        "paths": {name: asdict(paths[name]) for name in dict(wanted)},
        "seed": "initial weights and order of samples",
        "precision": "bf16 weights and gradients, fp32 master weights",
        "optimizer": {
            "AdamW": {"clipping": MAX_GRAD_NORM, "warm_up": WARM_UP, "schedule": "cosine"}
            | {name: ADAMW[name] for name in ("eps", "weight_decay")}
        },
        "versions": {name: version(name) for name in VERSIONS}
        | {"python": sys.version.split()[0], "glm4v-patched": __version__},
    }
    report["runs"] = []
    with tempfile.TemporaryDirectory() as folder:
        started = time.time()
        report["parameters"] = prepare(Path(folder), size, options.lora_after > 0)
        seconds = time.time() - started
        print(f"{report['parameters']} parameters, ready after {seconds:.0f} s", flush=True)
        if options.lora_after:
            # Not sharded: one process can save it.
            path = replace(paths["fast"], trained="full", zero_stage=1)
            run = train_one(FIRST, path, first_size, SEEDS[0], Path(folder), options)
            asked = {"steps": options.lora_after, "learning_rate": first_size.learning_rate}
            report["first"] = asked | run
            print(summary(run), flush=True)
        with ThreadPoolExecutor(options.at_once) as pool:
            trainings = [
                pool.submit(train_one, name, paths[name], size, seed, Path(folder), options)
                for name, seed in wanted
            ]
            failed = None
            for training in as_completed(trainings):
                try:
                    report["runs"].append(training.result())
                except CancelledError:
                    continue
                except RuntimeError as error:
                    # Those that run are waited for, and kept.
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
        f"{run['right']:.3f} right, a step {run['median_step_s']:.3f} s, all {run['total_s']} s"
    )


def train_one(
    name: str,
    path: Training,
    size: Size,
    seed: int,
    folder: Path,
    options: argparse.Namespace,
) -> dict:
    """One training in processes of its own, as a run of the report."""
    start = time.time()
    weights = f"seed {seed}" if path.trained == "full" else FIRST
    asked = {"path": asdict(path), "size": asdict(size), "seed": seed, "steps": options.steps}
    asked |= {"data": str(folder / "data.pt"), "weights": str(folder / weights), "save": None}
    asked["held_out"] = str(folder / "held_out.pt")
    asked["out"] = str(folder / f"{name} {seed}.json")
    if name == FIRST:
        asked |= {"data": str(folder / "first.pt"), "save": str(folder / FIRST)}
        asked["steps"] = options.lora_after
    try:
        seen = train_in_processes(asked, options.processes, options.timeout)
    except RuntimeError as error:
        raise RuntimeError(f"{name}, seed {seed}: {error}") from error
    return {"path": name, "seed": seed, "total_s": round(time.time() - start)} | seen


def worker(asked: dict) -> None:
    trained = train(asked)
    if torch.distributed.get_rank() == 0:
        Path(asked["out"]).write_text(json.dumps(trained))
    torch.distributed.barrier()
    # DeepSpeed's and inductor's threads take long to end, and nothing is left to save.
    os._exit(0)


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        worker(json.loads(sys.argv[1]))
    else:
        sys.exit(main())
