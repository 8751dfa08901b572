"""What the jobs share: drawn images, a model that has not seen them, and a judge.

24 images are learned by heart. Many answers are possible to a question, so that whoever answers
right has looked at the image. *Swapped*: each question is asked again with another image, and
the old answer is wrong then.
"""

import json
import os
import sys
from itertools import product
from math import inf
from pathlib import Path
from statistics import mean

import datasets
import pytest
import torch

from glm4v_patched.demo.images import COLORS, SHAPES, draw_data_set
from glm4v_patched.demo.tiny_model import IMAGE_SIDE, build_from_scratch
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from tests.frameworks.any_trainer_script import Collator
from tests.frameworks.results_table import Missed, Row
from tests.helpers.legacy_repository import write_legacy_repository
from tests.helpers.processes import ROOT, Ended, cpu_environment, run_with_limit

JUDGE = ROOT / "glm4v_patched" / "demo" / "fresh_process.py"
PREFERENCE_JUDGE = Path(__file__).with_name("preference_judge.py")
NUMBER = 24
# The chat format has no end of a turn; without this, nobody learns to stop.
END = "<|endoftext|>"
RUN = (sys.executable, "-m", "glm4v_patched.run")
Conversations = list[list[dict]]  # a question with its image, and its answer


def run(folder: Path, *command: object, environment: dict | None = None) -> Ended:
    """Run a command in ``folder``, where everything is cached, too."""
    whole = (environment or cpu_environment()) | {
        "HF_HOME": str(folder / "cache"),
        "HF_MODULES_CACHE": str(folder / "modules"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "WANDB_MODE": "disabled",
    }
    whole.pop("GLM4V_PATCHED", None)
    # Commands of the environment that runs this, also where it is not activated.
    whole["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), whole["PATH"]])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return run_with_limit([str(part) for part in command], 1800, whole)


def succeed(folder: Path, *command: object, environment: dict | None = None) -> None:
    ended = run(folder, *command, environment=environment)
    assert ended.status == 0, ended.output[-6000:]


class Models:
    """The models that jobs begin with, each built once in ``folder``, and the drawn images:

    - published: the stand-in for the published repository
    - random: ours, of random weights
    - blind: gives an answer to a question, whatever image it is asked about. It was taught each
      answer with the images of all other conversations in turn.
    - sighted: the blind one after five steps of supervised training: a quarter of the answers that
      it draws are right. Where online training begins.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.conversations = draw_data_set(folder / "images", NUMBER, seed=0, side=IMAGE_SIDE)

    def __call__(self, name: str) -> Path:
        folder, rows = self.folder / name, rows_of(self.conversations)
        if folder.exists():
            return folder
        if name == "published":
            write_legacy_repository(folder)
        elif name == "random":
            build_from_scratch(folder, self.conversations, seed=0)
        elif name == "blind":
            turned = [
                [
                    row | {"image": rows[(n + step) % len(rows)]["image"]}
                    for n, row in enumerate(rows)
                ]
                for step in range(120)
            ]
            teach(folder, self("random"), turned, rate=1e-3)
        else:
            teach(folder, self("blind"), [rows] * 5, rate=5e-4)
        return folder


def rows_of(conversations: Conversations) -> list[dict]:
    return [
        {"question": q["content"], "image": q["image"], "answer": a["content"]}
        for q, a in conversations
    ]


def teach(folder: Path, model: Path, batches: list[list[dict]], rate: float) -> None:
    """A step for each batch of rows; the model is saved to ``folder``."""
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
    """The first conversation of the same question and another answer."""
    return next(
        [q, a]
        for q, a in conversations
        if q["content"] == question["content"] and a["content"] != answer["content"]
    )


def pairs_of(conversations: Conversations) -> list[tuple[str, str, str, str]]:
    """Question, image, its answer, and the answer for the image that is swapped for it.

    Each pair comes twice: with one of its two images and answers, and with the other.
    """
    pairs = []
    for question, answer in conversations:
        other, wrong = other_of(question, answer, conversations)
        asked, texts = question["content"], (answer["content"], wrong["content"])
        pairs += [(asked, question["image"], *texts), (asked, other["image"], *texts[::-1])]
    return list(dict.fromkeys(pairs))


def with_other_images(pairs: list[tuple]) -> list[tuple]:
    """Each pair with the image that its other answer is the answer for, if it has any."""
    image_of = {(asked, right): image for asked, image, right, _ in pairs}
    return [(q, image_of.get((q, wrong)), right, wrong) for q, _, right, wrong in pairs]


def put_data(folder: Path, conversations: Conversations) -> None:
    """``rows.json``, ``messages.jsonl`` for axolotl, and in ``data`` a folder for each trainer of
    TRL, NAME.json for LLaMA-Factory and NAME.jsonl for ms-swift."""
    rows, pairs, data = rows_of(conversations), pairs_of(conversations), folder / "data"
    data.mkdir()
    (folder / "rows.json").write_text(json.dumps(rows))
    messages = []
    for row in rows:
        parts = {"type": "image", "path": row["image"]}, {"type": "text", "text": row["question"]}
        asked, answer = said("user", parts), said("assistant", row["answer"])
        messages.append({"messages": [asked, answer]})
    write_lines(folder / "messages.jsonl", messages)
    (folder / "images").symlink_to(Path("data", "sft"))  # of docs/frameworks.md
    put_sets_of_trl(data, rows, pairs)
    put_sets_with_places(data, rows, pairs)


def said(role: str, content: object) -> dict:
    return {"role": role, "content": content}


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def put_sets_of_trl(data: Path, rows: list[dict], pairs: list[tuple]) -> None:
    def ended(answer: str) -> list[dict]:
        return [said("assistant", answer + END)]

    def asked(question: str, image: str, **answer: object) -> dict:
        return {"prompt": [said("user", question)], "images": [image], **answer}

    triples = [(row["question"], row["image"], row["answer"]) for row in rows]
    # Texts, as TRL's RewardTrainer knows no images and asks tokenizers for conversations one by
    # one, of which this one makes batches. A good answer names color and shape.
    question = "<|user|>\nWhat do you see?<|assistant|>\n"
    sets = {
        "sft": [asked(q, p, completion=ended(a)) for q, p, a in triples],
        "grpo": [asked(q, p, answer=a) for q, p, a in triples],
        "rloo": [asked(q, p, answer=a) for q, p, a in triples],
        # Its trainer knows one image a row, and that by another name.
        "online_dpo": [
            {"prompt": [said("user", q)], "image": p, "answer": a} for q, p, a in triples
        ],
        "dpo": [asked(q, p, chosen=ended(a), rejected=ended(b)) for q, p, a, b in pairs],
        "kto": [
            asked(q, p, completion=ended(answer), label=answer == right)
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
    for name, of_set in sets.items():
        made = datasets.Dataset.from_list(of_set)
        for column in kinds.keys() & of_set[0].keys():
            made = made.cast_column(column, kinds[column])
        (data / name).mkdir()
        made.to_parquet(data / name / "train.parquet")


def put_sets_with_places(data: Path, rows: list[dict], pairs: list[tuple]) -> None:
    """``<image>`` in a message is the place of an image."""

    def asked(question: str, image: str, *answer: str, **more: object) -> dict:
        messages = [said("user", f"<image>{question}"), *(said("assistant", a) for a in answer)]
        return {"messages": messages, "images": [image], **more}

    images = [asked(row["question"], row["image"], row["answer"]) for row in rows]
    texts = [
        {"messages": [said("user", f"What is on page {page}?"), answer], "images": []}
        for page, (_, answer) in enumerate(row["messages"] for row in images)
    ]
    sets = {
        "images": images,
        "several": [
            {name: one[name] + other[name] for name in one}
            for one, other in zip(images, images[7:] + images[:7], strict=True)
        ],
        "mixed": [row for two in zip(images, texts, strict=True) for row in two],
        "reward": [asked(row["question"], row["image"], solution=row["answer"]) for row in rows],
        "kto": [
            asked(q, p, answer, label=answer == right)
            for q, p, right, wrong in pairs
            for answer in (right, wrong)
        ],
        "pairs": [asked(q, p, right, rejected_response=wrong) for q, p, right, wrong in pairs],
    }
    for name, of_set in sets.items():
        write_lines(data / f"{name}.jsonl", of_set)
    sets["pairs"] = [
        asked(q, p, chosen=said("assistant", right), rejected=said("assistant", wrong))
        for q, p, right, wrong in pairs
    ]
    tags = {f"{role}_tag": role for role in ("role", "content", "user", "assistant")}
    described = {}
    for name, of_set in sets.items():
        columns = {c: c for c in ("messages", "images", "chosen", "rejected") if c in of_set[0]}
        columns |= {"kto_tag": "label"} if name == "kto" else {}
        described[name] = {"file_name": f"{name}.json", "formatting": "sharegpt", "tags": tags}
        described[name] |= {"columns": columns, "ranking": name == "pairs"}
        (data / f"{name}.json").write_text(json.dumps(of_set))
    (data / "dataset_info.json").write_text(json.dumps(described))


def judged(folder: Path, model: str, conversations: Conversations) -> tuple[float, float]:
    """The share of right answers of a saved folder, and that with the images swapped."""
    swapped = [
        [q | {"image": other_of(q, a, conversations)[0]["image"]}, a] for q, a in conversations
    ]
    asked = [[[q] for q, _ in each] for each in (conversations, swapped)]
    requests = [{"model": model, "prompts": prompts} for prompts in asked]
    (folder / "requests.json").write_text(json.dumps(requests))
    succeed(folder, sys.executable, JUDGE, "requests.json", "answers.json")
    right, swap = (
        mean(a["content"] == got for (_, a), got in zip(conversations, given, strict=True))
        for given in json.loads((folder / "answers.json").read_text())
    )
    return right, swap


def preferences(folder: Path, model: str, *sets: list[tuple]) -> list[float]:
    """For each set of pairs, the share of those of which a saved model prefers the first answer."""
    (folder / "asked.json").write_text(json.dumps(sets))
    succeed(folder, sys.executable, PREFERENCE_JUDGE, model, "asked.json", "preferred.json")
    return [mean(each) for each in json.loads((folder / "preferred.json").read_text())]


def history(folder: Path, name: str) -> list[float]:
    """What was logged, wherever a trainer writes that."""
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
    kind: str, folder: Path, saved: str, conversations: Conversations, done: Row, logged: str
) -> None:
    """Fill the row of a job that saved its model in the folder ``saved`` of ``folder``; raises
    :class:`Missed` if nothing was learned, or not from the images.

    Args:
        kind: "answers"; "preferences" (of pairs); "scores" (of pairs of texts); or "reward":
            answers, and the reward that training logged as ``logged``, which rises.
    """
    # Of drawn answers some stay wrong: the same for any image, or right for the swapped one.
    right, swapped = (0.8, 0.2) if kind == "reward" else (0.9, 0.1)
    if kind == "reward":
        values = history(folder, logged or "reward")
        done.reward = values[0], sum(values[-5:]) / 5
        require("first reward", done.reward[0], at_most=0.3)
        require("last rewards", done.reward[1], at_least=0.8)
    else:
        values = history(folder, "loss")
        done.loss = values[0], values[-1]
        require("last loss", values[-1], at_most=0.6 * values[0])
    if kind in ("answers", "reward"):
        done.right, done.swapped = judged(folder, saved, conversations)
    elif kind == "preferences":
        pairs = pairs_of(conversations)
        done.right, done.swapped = preferences(folder, saved, pairs, with_other_images(pairs))
    else:
        pairs = [("What do you see?", None, "a red circle", part) for part in ("red", "circle")]
        [done.right] = preferences(folder, saved, pairs)
    done.reloaded = True
    require("right", done.right, at_least=right)
    if done.swapped is not None:
        require("swapped", done.swapped, at_most=swapped)


def require(name: str, value: float, at_least: float = -inf, at_most: float = inf) -> None:
    if not at_least <= value <= at_most:
        told = f"at most {at_most:.2f}" if at_most < inf else f"at least {at_least:.2f}"
        raise Missed(f"trains, and misses a mark of its test: {name} {value:.2f}, not {told}")
