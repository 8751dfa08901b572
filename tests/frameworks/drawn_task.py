"""Shared parts of the jobs: drawn images, models that have not seen them, and an evaluation.

A job memorizes 24 images. A question has many possible answers, so a right answer requires the
image. *Swapped*: each question is asked again with another image, to which the answer is wrong.
"""

import json
import sys
from collections.abc import Iterable
from itertools import product
from math import inf
from pathlib import Path
from statistics import mean

import datasets
import torch

from glm4v_patched.demo.images import COLORS, SHAPES, draw_data_set
from glm4v_patched.demo.tiny_model import IMAGE_SIDE, build_from_scratch
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.frameworks.any_trainer_script import Collator
from tests.frameworks.results_table import Missed
from tests.helpers.legacy_repository import write_legacy_repository
from tests.helpers.processes import ROOT, Ended, cpu_environment, run_with_limit

JUDGE = ROOT / "glm4v_patched" / "demo" / "fresh_process.py"
PREFERENCE_JUDGE = Path(__file__).with_name("preference_judge.py")
NUM_IMAGES = 24
# The chat format does not end the last turn; from this token, a model learns to stop.
END = "<|endoftext|>"
RUN = (sys.executable, "-m", "glm4v_patched.run")
Conversations = list[list[dict]]  # a question with its image, and its answer


def run(folder: Path, *command: object, environment: dict | None = None) -> Ended:
    """Run a command in ``folder``, which also has all caches."""
    full_environment = (environment or cpu_environment()) | {
        "HF_HOME": str(folder / "cache"),
        "HF_MODULES_CACHE": str(folder / "modules"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "WANDB_MODE": "disabled",
    }
    full_environment.pop("GLM4V_PATCHED", None)
    return run_with_limit([str(argument) for argument in command], 1800, full_environment, folder)


def succeed(folder: Path, *command: object, environment: dict | None = None) -> None:
    ended = run(folder, *command, environment=environment)
    assert ended.status == 0, ended.output[-6000:]


class Models:
    """The initial models of jobs, each built once in ``folder``, and the drawn images:

    - published: the stand-in for the published repository
    - random: our model with random weights
    - blind: answers a question whatever the image is. It was trained on each answer with the
      images of all other conversations in turn.
    - sighted: the blind one after five steps of supervised training: a quarter of the answers that
      it samples are right. Online training begins with it.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.conversations = draw_data_set(folder / "images", NUM_IMAGES, seed=0, side=IMAGE_SIDE)

    def __call__(self, name: str) -> Path:
        folder, rows = self.folder / name, rows_of(self.conversations)
        if folder.exists():
            return folder
        if name == "published":
            write_legacy_repository(folder)
        elif name == "random":
            build_from_scratch(folder, self.conversations, seed=0)
        elif name == "blind":
            rotations = [
                [
                    row | {"image": rows[(n + step) % len(rows)]["image"]}
                    for n, row in enumerate(rows)
                ]
                for step in range(120)
            ]
            teach(folder, self("random"), rotations, rate=1e-3)
        else:
            teach(folder, self("blind"), [rows] * 5, rate=5e-4)
        return folder


def rows_of(conversations: Conversations) -> list[dict]:
    return [
        {"question": q["content"], "image": q["image"], "answer": a["content"]}
        for q, a in conversations
    ]


def teach(folder: Path, model: Path, batches: list[list[dict]], rate: float) -> None:
    """Train a model for a step on each batch of rows, and save it to ``folder``."""
    collator = Collator(model)
    learner = GLM4VForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(learner.parameters(), lr=rate, weight_decay=0.0)
    for batch in batches:
        learner(**collator(batch)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    learner.save_pretrained(folder)
    collator.processor.save_pretrained(folder)


def other_of(question: dict, answer: dict, conversations: Conversations) -> list[dict]:
    """Return the first conversation with the same question and another answer."""
    return next(
        [q, a]
        for q, a in conversations
        if q["content"] == question["content"] and a["content"] != answer["content"]
    )


def pairs_of(conversations: Conversations) -> list[tuple[str, str, str, str]]:
    """Return tuples of question, image, its answer, and the answer for the swapped image.

    Each pair is in the list twice: once with each of its two images and answers.
    """
    pairs = []
    for question, answer in conversations:
        other, wrong = other_of(question, answer, conversations)
        text, answers = question["content"], (answer["content"], wrong["content"])
        pairs += [(text, question["image"], *answers), (text, other["image"], *answers[::-1])]
    return list(dict.fromkeys(pairs))


def with_other_images(pairs: list[tuple]) -> list[tuple]:
    """Return each pair with the image for which its other answer is right, if there is one."""
    image_of = {(question, right): image for question, image, right, _ in pairs}
    return [(q, image_of.get((q, wrong)), right, wrong) for q, _, right, wrong in pairs]


def put_data(folder: Path, conversations: Conversations) -> None:
    """Write the data sets of all frameworks.

    ``rows.json``; ``messages.jsonl`` for axolotl; in ``data`` a folder for each trainer of TRL,
    NAME.json for LLaMA-Factory and NAME.jsonl for ms-swift.
    """
    rows, pairs, data = rows_of(conversations), pairs_of(conversations), folder / "data"
    data.mkdir()
    (folder / "rows.json").write_text(json.dumps(rows))
    messages = []
    for row in rows:
        parts = {"type": "image", "path": row["image"]}, {"type": "text", "text": row["question"]}
        turns = [message("user", parts), message("assistant", row["answer"])]
        messages.append({"messages": turns})
    write_lines(folder / "messages.jsonl", messages)
    (folder / "images").symlink_to(Path("data", "sft"))  # the path in docs/frameworks.md
    put_sets_of_trl(data, rows, pairs)
    put_sets_with_image_tags(data, rows, pairs)


def message(role: str, content: object) -> dict:
    return {"role": role, "content": content}


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def put_sets_of_trl(data: Path, rows: list[dict], pairs: list[tuple]) -> None:
    def with_end(answer: str) -> list[dict]:
        return [message("assistant", answer + END)]

    def row(question: str, image: str, **answer: object) -> dict:
        return {"prompt": [message("user", question)], "images": [image], **answer}

    triples = [(sample["question"], sample["image"], sample["answer"]) for sample in rows]
    # Texts, because TRL's RewardTrainer supports no images and tokenizes conversations one by one,
    # of which this tokenizer makes batches. A good answer names color and shape.
    question = "<|user|>\nWhat do you see?<|assistant|>\n"
    sets = {
        "sft": [row(q, p, completion=with_end(a)) for q, p, a in triples],
        "grpo": [row(q, p, answer=a) for q, p, a in triples],
        "rloo": [row(q, p, answer=a) for q, p, a in triples],
        # Its trainer takes one image per row, in a column of another name.
        "online_dpo": [
            {"prompt": [message("user", q)], "image": p, "answer": a} for q, p, a in triples
        ],
        "dpo": [row(q, p, chosen=with_end(a), rejected=with_end(b)) for q, p, a, b in pairs],
        "kto": [
            row(q, p, completion=with_end(answer), label=answer == right)
            for q, p, right, wrong in pairs
            for answer in (right, wrong)
        ],
        "reward": [
            {"chosen": f"{question}a {color} {shape}{END}", "rejected": f"{question}{part}{END}"}
            for color, shape in product(COLORS, SHAPES)
            for part in (color, shape)
        ],
    }
    kinds = {"images": datasets.List(datasets.Image()), "image": datasets.Image()}
    for name, samples in sets.items():
        dataset = datasets.Dataset.from_list(samples)
        for column in kinds.keys() & samples[0].keys():
            dataset = dataset.cast_column(column, kinds[column])
        (data / name).mkdir()
        dataset.to_parquet(data / name / "train.parquet")


def put_sets_with_image_tags(data: Path, rows: list[dict], pairs: list[tuple]) -> None:
    """Write data sets whose messages have ``<image>`` tags."""

    def row(question: str, image: str, *answer: str, **more: object) -> dict:
        messages = [
            message("user", f"<image>{question}"),
            *(message("assistant", a) for a in answer),
        ]
        return {"messages": messages, "images": [image], **more}

    triples = [(sample["question"], sample["image"], sample["answer"]) for sample in rows]
    images = [row(question, image, answer) for question, image, answer in triples]
    texts = [
        {"messages": [message("user", f"What is on page {page}?"), answer], "images": []}
        for page, (_, answer) in enumerate(sample["messages"] for sample in images)
    ]
    sets = {
        "images": images,
        "several": [
            {name: one[name] + other[name] for name in one}
            for one, other in zip(images, images[7:] + images[:7], strict=True)
        ],
        "mixed": [sample for two in zip(images, texts, strict=True) for sample in two],
        "reward": [row(q, p, solution=answer) for q, p, answer in triples],
        "kto": [
            row(q, p, answer, label=answer == right)
            for q, p, right, wrong in pairs
            for answer in (right, wrong)
        ],
        "pairs": [row(q, p, right, rejected_response=wrong) for q, p, right, wrong in pairs],
    }
    for name, samples in sets.items():
        write_lines(data / f"{name}.jsonl", samples)
    sets["pairs"] = [
        row(q, p, chosen=message("assistant", right), rejected=message("assistant", wrong))
        for q, p, right, wrong in pairs
    ]
    tags = {f"{role}_tag": role for role in ("role", "content", "user", "assistant")}
    described = {}
    for name, samples in sets.items():
        columns = {c: c for c in ("messages", "images", "chosen", "rejected") if c in samples[0]}
        columns |= {"kto_tag": "label"} if name == "kto" else {}
        described[name] = {"file_name": f"{name}.json", "formatting": "sharegpt", "tags": tags}
        described[name] |= {"columns": columns, "ranking": name == "pairs"}
        (data / f"{name}.json").write_text(json.dumps(samples))
    (data / "dataset_info.json").write_text(json.dumps(described))


def judged(folder: Path, model: str, conversations: Conversations) -> tuple[float, float]:
    """Return the share of right answers of a saved model, with its images and with swapped ones."""
    swapped = [
        [q | {"image": other_of(q, a, conversations)[0]["image"]}, a] for q, a in conversations
    ]
    prompts = [[[question] for question, _ in chats] for chats in (conversations, swapped)]
    requests = [{"model": model, "prompts": questions} for questions in prompts]
    (folder / "requests.json").write_text(json.dumps(requests))
    succeed(folder, sys.executable, JUDGE, "requests.json", "answers.json")
    right, swap = (
        share(a["content"] == text for (_, a), text in zip(conversations, answers, strict=True))
        for answers in json.loads((folder / "answers.json").read_text())
    )
    return right, swap


def preferences(folder: Path, model: str, *sets: list[tuple]) -> list[float]:
    """Return for each set of pairs how often a saved model prefers the first answer."""
    (folder / "asked.json").write_text(json.dumps(sets))
    succeed(folder, sys.executable, PREFERENCE_JUDGE, model, "asked.json", "preferred.json")
    return [share(preferred) for preferred in json.loads((folder / "preferred.json").read_text())]


def history(folder: Path, name: str) -> list[float]:
    """Return the logged values of a name, from the file that the trainer writes."""
    if (folder / "losses.json").exists():
        return json.loads((folder / "losses.json").read_text())
    [state, *_] = [
        *folder.glob("state.json"),
        *folder.glob("*/checkpoint-*/trainer_state.json"),
        *folder.glob("*/trainer_state.json"),
    ]
    logged = json.loads(state.read_text())["log_history"]
    return [float(entry[name]) for entry in logged if name in entry]


def measure(
    kind: str, folder: Path, saved: str, conversations: Conversations, done: dict, logged: str
) -> None:
    """Evaluate the model that a job saved in the folder ``saved`` of ``folder``, and fill its row.

    Args:
        kind: "answers"; "preferences" (of pairs); "scores" (of pairs of texts); or "reward":
            answers, and the reward that training logged as ``logged``, which must rise.

    Raises:
        Missed: nothing was learned, or not from the images.
    """
    # With sampled answers, some stay wrong: the same for any image, or right for the swapped one.
    right, swapped = (0.8, 0.2) if kind == "reward" else (0.9, 0.1)
    if kind == "reward":
        values = history(folder, logged or "reward")
        done["reward"] = first, last = rounded(values[0]), rounded(mean(values[-5:]))
        require("first reward", first, at_most=0.3)
        require("last rewards", last, at_least=0.8)
    else:
        values = history(folder, "loss")
        done["loss"] = rounded(values[0]), rounded(values[-1])
        require("last loss", values[-1], at_most=0.6 * values[0])
    if kind in ("answers", "reward"):
        done["right"], done["swapped"] = judged(folder, saved, conversations)
    elif kind == "preferences":
        pairs = pairs_of(conversations)
        others = with_other_images(pairs)
        done["right"], done["swapped"] = preferences(folder, saved, pairs, others)
    else:
        pairs = [("What do you see?", None, "a red circle", part) for part in ("red", "circle")]
        [done["right"]] = preferences(folder, saved, pairs)
    done["reloaded"] = True
    require("right", done["right"], at_least=right)
    if done["swapped"] is not None:
        require("swapped", done["swapped"], at_most=swapped)


def rounded(value: float) -> float:
    return float(f"{value:.3g}")


def share(are_right: Iterable[bool]) -> float:
    return round(mean(are_right), 3)


def require(name: str, value: float, at_least: float = -inf, at_most: float = inf) -> None:
    if not at_least <= value <= at_most:
        limit = f"at most {at_most:.2f}" if at_most < inf else f"at least {at_least:.2f}"
        raise Missed(f"trains, and misses a mark of its test: {name} {value:.2f}, not {limit}")
