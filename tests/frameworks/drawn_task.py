"""What the jobs share: drawn pictures, a model that has not seen them, and a judge.

The pictures are learned by heart: 24 of them, of which many answers are possible to a question, so
that whoever answers right has looked at the picture. *Swapped*: each question is asked again with
another picture, and the old answer is wrong then.

:func:`blind_model` has learned how people answer, and nothing of the pictures: where preferences
and rewards begin.
"""

import json
import os
import sys
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import torch

from glm4v_patched.demo.pictures import COLOURS, SHAPES, draw_data_set
from glm4v_patched.demo.tiny_model import IMAGE_SIDE, build_from_scratch
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from tests.frameworks.results_table import Missed, Row
from tests.helpers.legacy_repository import write_legacy_repository
from tests.helpers.processes import ROOT, Ended, cpu_environment, run_with_limit

JUDGE = ROOT / "glm4v_patched" / "demo" / "fresh_process.py"
NUMBER = 24
# The chat format has no end of a turn; without this, nobody learns to stop.
END = "<|endoftext|>"
RUN = (sys.executable, "-m", "glm4v_patched.run")
SECONDS = 300
# Of LLaMA-Factory.
TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user"}
TAGS["assistant_tag"] = "assistant"
COLUMNS = ("messages", "images", "chosen", "rejected")


def offline_environment(folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """Of a job that caches everything in ``folder``."""
    caches = {"HF_HOME": str(folder / "cache"), "HF_MODULES_CACHE": str(folder / "modules")}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled"}
    return {k: v for k, v in environment.items() if k != "GLM4V_PATCHED"} | caches | offline


def run(folder: Path, *command: object, seconds: float = SECONDS, **more: str) -> Ended:
    """Run a command in ``folder``, where everything is cached, too."""
    environment = offline_environment(folder, cpu_environment()) | more
    # Commands of the environment that runs this, also where it is not activated.
    paths = [str(Path(sys.executable).parent), environment["PATH"]]
    environment["PATH"] = os.pathsep.join(paths)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return run_with_limit([str(part) for part in command], seconds, environment)


def succeed(folder: Path, *command: object, **options) -> str:
    """What it printed. ``AssertionError`` with the end of that, if it fails or hangs."""
    ended = run(folder, *command, **options)
    assert ended.status == 0, ended.output[-6000:]
    return ended.output


def draw(folder: Path) -> list[list[dict]]:
    return draw_data_set(folder, number=NUMBER, seed=0, side=IMAGE_SIDE)


def swapped(conversations: list[list[dict]]) -> list[list[dict]]:
    """With the picture of another conversation, of the same question and another answer."""
    result = []
    for question, answer in conversations:
        other = next(
            q["image"]
            for q, a in conversations
            if q["content"] == question["content"] and a["content"] != answer["content"]
        )
        result.append([question | {"image": other}, answer])
    return result


def judged(folder: Path, model: str, conversations: list[list[dict]]) -> tuple[float, float]:
    """The share of right answers of a saved folder, and that with the pictures swapped.

    The answers are given by a process that cannot import this package.
    """
    asked = [[[q] for q, _ in each] for each in (conversations, swapped(conversations))]
    (folder / "requests.json").write_text(
        json.dumps([{"model": model, "prompts": p} for p in asked])
    )
    succeed(folder, sys.executable, JUDGE, "requests.json", "answers.json")
    shares = []
    for given in json.loads((folder / "answers.json").read_text()):
        right = [a["content"] == got for (_, a), got in zip(conversations, given, strict=True)]
        shares.append(sum(right) / len(right))
    return shares[0], shares[1]


def chance(conversations: list[list[dict]]) -> float:
    """The share of right answers of who knows how often each question has each answer, and draws
    one so, whatever the picture."""
    counts = Counter((q["content"], a["content"]) for q, a in conversations)
    asked = Counter(q["content"] for q, _ in conversations)
    drawn = (number**2 / asked[question] for (question, _), number in counts.items())
    return sum(drawn) / len(conversations)


def history(folder: Path, name: str, out: str = "out") -> list[float]:
    """What was logged, wherever a trainer with the output folder ``out`` writes that."""
    if (folder / "losses.json").exists():
        return json.loads((folder / "losses.json").read_text())
    if (folder / "board").exists():  # OpenRLHF's
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        [board] = (folder / "board").iterdir()
        read = EventAccumulator(str(board))
        read.Reload()
        return [event.value for event in read.Scalars(f"train/{name}_mean")]
    [state, *_] = [
        *folder.glob("state.json"),
        *folder.glob(f"{out}/checkpoint-*/trainer_state.json"),
        *folder.glob(f"{out}/trainer_state.json"),
    ]
    logged = json.loads(state.read_text())["log_history"]
    return [float(entry[name]) for entry in logged if name in entry]


# What a job has to reach: at least, or for the ones below, at most.
MARKS = {"last rewards": 0.8, "right": 0.9, "first reward": 0.3, "swapped": 0.1}
AT_MOST = ("first reward", "swapped", "last loss")


def measure(
    kind: str,
    folder: Path,
    saved: str,
    conversations: list[list[dict]],
    done: Row,
    name: str = "",
    fall: float = 0.5,
    out: str = "out",
    marks: dict[str, float] | None = None,
) -> None:
    """Fill the row of a job that saved its model in the folder ``saved`` of ``folder``.

    Args:
        kind: "answers", "preferences" (of pairs), "scores" (of pairs of texts), "nothing" (but the
            loss), or "reward": answers, and the reward that training logged as ``name``, which
            rises.
        fall: What of the first loss the last one may be.
        out: Where the trainer logs.
        marks: Others than ``MARKS``.

    Raises:
        Missed: nothing was learned, or not from the pictures.
    """
    if kind == "reward":
        values = history(folder, name or "reward", out)
        done.reward = values[0], sum(values[-5:]) / 5
    else:
        values = history(folder, "loss", out)
        done.loss = values[0], values[-1]
    if kind == "preferences":
        done.right, done.swapped = preferences(folder, saved, pairs_of(conversations))
    elif kind == "scores":
        pairs = [("What do you see?", None, "a red circle", part) for part in ("red", "circle")]
        done.right, _ = preferences(folder, saved, pairs)
    elif kind != "nothing":
        done.right, done.swapped = judged(folder, saved, conversations)
    done.reloaded = True if kind != "nothing" else None
    if marks is None and kind == "reward":
        # Of drawn answers some stay wrong: the same for any picture, or right for the swapped one.
        marks = MARKS | {"right": 0.8, "swapped": chance(conversations)}
    if done.reward is not None:
        check_shares({"first reward": done.reward[0], "last rewards": done.reward[1]}, marks)
    else:
        check_shares({"last loss": values[-1]}, {"last loss": values[0] * fall})
    check_shares({"right": done.right, "swapped": done.swapped}, marks)


def check_shares(found: dict[str, float | None], marks: dict[str, float] | None = None) -> None:
    """Raise :class:`Missed` with name, value and mark of what misses one."""
    for name, value in found.items():
        if value is None:
            continue
        mark, at_most = (marks or MARKS)[name], name in AT_MOST
        if not (value <= mark if at_most else value >= mark):
            told = f"at {'most' if at_most else 'least'} {mark:.2f}"
            raise Missed(f"trains, and misses a mark of its test: {name} {value:.2f}, not {told}")


class Models:
    """The models that jobs begin with, each built once in ``folder``, and the drawn pictures."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.conversations = draw(folder / "pictures")

    def __call__(self, name: str) -> Path:
        """The folder of "published", "random", "blind" or "sighted"."""
        folder = self.folder / name
        if not folder.exists():
            if name == "published":
                write_legacy_repository(folder)
            elif name == "sighted":
                build_sighted(folder, self("blind"), self.conversations)
            else:
                {"random": build_random, "blind": build_blind}[name](folder, self.conversations)
        return folder


def build_random(folder: Path, conversations: list[list[dict]]) -> None:
    build_from_scratch(folder, conversations, seed=0)


def build_blind(folder: Path, conversations: list[list[dict]], steps: int = 120) -> None:
    """A model that gives an answer to a question, whatever picture it is asked about.

    It is taught each answer with the pictures of all other conversations in turn.
    """
    build_random(folder, conversations)
    turned = [
        [
            [question | {"image": conversations[(row + step) % len(conversations)][0]["image"]}, a]
            for row, (question, a) in enumerate(conversations)
        ]
        for step in range(steps)
    ]
    teach(folder, folder, turned, rate=1e-3)


def build_sighted(folder: Path, blind: Path, conversations: list[list[dict]]) -> None:
    """A blind model after five steps of supervised training: a quarter of the answers that it
    draws are right. Where online training begins."""
    teach(folder, blind, [conversations] * 5, rate=5e-4)


def teach(folder: Path, model: Path, batches: list[list[list[dict]]], rate: float) -> None:
    """A step for each batch of conversations; the model is saved to ``folder``."""
    processor = ChatGLMProcessor.from_pretrained(model)
    learner = GLM4VForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(learner.parameters(), lr=rate, weight_decay=0.0)
    for batch in batches:
        learner(**batch_of(processor, batch)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    learner.save_pretrained(folder)
    processor.save_pretrained(folder)


def batch_of(processor: ChatGLMProcessor, conversations: list[list[dict]]) -> dict:
    """Rows padded on the left, of which the answers and their ends are learned."""
    prompts = processor.apply_chat_template(
        [[question] for question, _ in conversations],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        padding=True,
        return_tensors="pt",
    )
    tokenizer = processor.tokenizer
    ended = [
        [*tokenizer.encode(f"\n{a['content']}", add_special_tokens=False), tokenizer.pad_token_id]
        for _, a in conversations
    ]
    longest = max(map(len, ended))
    # What is behind the end is padding on the right, which is no label either.
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in ended])
    is_answer = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ended])
    nothing = torch.full_like(prompts["input_ids"], -100)
    return {
        "input_ids": torch.cat((prompts["input_ids"], ids), dim=1),
        "attention_mask": torch.cat((prompts["attention_mask"], is_answer), dim=1),
        "labels": torch.cat((nothing, ids.masked_fill(is_answer == 0, -100)), dim=1),
        "pixel_values": prompts["pixel_values"],
    }


def pairs_of(conversations: list[list[dict]]) -> list[tuple[str, str, str, str]]:
    """Question, picture, its answer, and the answer for the picture that is swapped for it.

    Each pair comes twice: with one of its two pictures and answers, and with the other.
    """
    pairs = []
    for (question, answer), (other, _) in zip(conversations, swapped(conversations), strict=True):
        wrong = next(a["content"] for q, a in conversations if q["image"] == other["image"])
        asked, right = question["content"], answer["content"]
        pairs += [(asked, question["image"], right, wrong), (asked, other["image"], wrong, right)]
    return list(dict.fromkeys(pairs))


def with_other_pictures(pairs: list[tuple]) -> list[tuple]:
    """Each pair with the picture that its other answer is the answer for, if it has any."""
    picture_of = {(asked, right): picture for asked, picture, right, _ in pairs}
    return [(q, picture_of.get((q, wrong)), right, wrong) for q, _, right, wrong in pairs]


def preferences(folder: Path, model: str, pairs: list[tuple]) -> tuple[float, float]:
    """The shares of pairs of which a saved model prefers the first answer: with the picture that it
    is the answer for, and with that of the other answer. By a process without this package."""
    (folder / "asked.json").write_text(json.dumps(pairs))
    judge = Path(__file__).with_name("preference_judge.py")
    succeed(folder, sys.executable, judge, model, "asked.json", "preferred.json")
    preferred = json.loads((folder / "preferred.json").read_text())
    other = with_other_pictures(pairs)
    (folder / "asked.json").write_text(json.dumps(other))
    succeed(folder, sys.executable, judge, model, "asked.json", "preferred.json")
    again = json.loads((folder / "preferred.json").read_text())
    return sum(preferred) / len(pairs), sum(again) / len(pairs)


def put_data(folder: Path, conversations: list[list[dict]]) -> None:
    """``rows.json``, ``messages.jsonl``, and in ``data`` a set in TRL's format for each job, and
    those of LLaMA-Factory (NAME.json) and ms-swift (NAME.jsonl)."""
    import datasets

    def put(job: str, rows: list[dict]) -> None:
        (folder / "data" / job).mkdir(parents=True)
        data = datasets.Dataset.from_list(rows)
        kinds = {"images": datasets.List(datasets.Image()), "image": datasets.Image()}
        for column in kinds.keys() & rows[0].keys():
            data = data.cast_column(column, kinds[column])
        data.to_parquet(folder / "data" / job / "train.parquet")

    def said(answer: str) -> list[dict]:
        return [{"role": "assistant", "content": answer + END}]

    def asked(question: str, picture: str) -> dict:
        return {"prompt": [{"role": "user", "content": question}], "images": [picture]}

    rows = [(q["content"], q["image"], a["content"]) for q, a in conversations]
    named = [dict(zip(("question", "image", "answer"), row, strict=True)) for row in rows]
    (folder / "rows.json").write_text(json.dumps(named))
    parts = [
        [{"type": "image", "path": picture}, {"type": "text", "text": q}] for q, picture, _ in rows
    ]
    messages = [
        [{"role": "user", "content": asked_with}, {"role": "assistant", "content": a}]
        for asked_with, (_, _, a) in zip(parts, rows, strict=True)
    ]
    lines = [json.dumps({"messages": each}) for each in messages]
    (folder / "messages.jsonl").write_text("\n".join(lines))
    for job in ("sft", "sft_lora"):
        put(job, [asked(q, picture) | {"completion": said(a)} for q, picture, a in rows])
    for job in ("grpo", "rloo"):
        put(job, [asked(q, picture) | {"answer": a} for q, picture, a in rows])
    # Its trainer knows one picture a row, and that by another name.
    put(
        "online_dpo",
        [
            {"prompt": asked(q, picture)["prompt"], "image": picture, "answer": a}
            for q, picture, a in rows
        ],
    )
    pairs = pairs_of(conversations)
    put(
        "dpo",
        [
            asked(q, picture) | {"chosen": said(one), "rejected": said(other)}
            for q, picture, one, other in pairs
        ],
    )
    put(
        "kto",
        [
            asked(q, picture) | {"completion": said(answer), "label": answer == one}
            for q, picture, one, other in pairs
            for answer in (one, other)
        ],
    )
    # TRL's RewardTrainer knows no pictures, and asks tokenizers for conversations one by one, of
    # which this one makes batches, as the published one does: so these are texts. A good answer
    # names colour and shape.
    question = "<|user|>\nWhat do you see?<|assistant|>\n"
    answers = [(f"a {colour} {shape}", colour, shape) for colour, shape in product(COLOURS, SHAPES)]
    texts = [
        {"chosen": f"{question}{whole}{END}", "rejected": f"{question}{part}{END}"}
        for whole, *parts in answers
        for part in parts
    ]
    for job in ("reward", "reward_lora"):
        put(job, texts)
    _put_swift_and_factory(folder, conversations)


def _put_swift_and_factory(folder: Path, conversations: list[list[dict]]) -> None:
    sets: dict[str, list[dict]] = {name: [] for name in ("pictures", "several", "mixed", "reward")}
    shifted = conversations[7:] + conversations[:7]
    for number, (row, other) in enumerate(zip(conversations, shifted, strict=True)):
        (asked, answer), (asked_next, answer_next) = map(with_place, (row, other))
        pictures = [one[0]["image"] for one in (row, other)]
        sets["pictures"].append({"messages": [asked, answer], "images": pictures[:1]})
        turns = [asked, answer, asked_next, answer_next]
        sets["several"].append({"messages": turns, "images": pictures})
        sets["reward"].append(
            {"messages": [asked], "images": pictures[:1], "solution": answer["content"]}
        )
        page = {"role": "user", "content": f"What is on page {number}?"}
        sets["mixed"] += [sets["pictures"][-1], {"messages": [page, answer], "images": []}]
    _write_sets(folder, sets, pairs_of(conversations))


def with_place(row: list[dict]) -> tuple[dict, dict]:
    question, answer = row
    return {"role": "user", "content": f"<image>{question['content']}"}, answer


def _write_sets(folder: Path, sets: dict[str, list[dict]], pairs: list) -> None:
    def said(text: str) -> dict:
        return {"role": "assistant", "content": text}

    pictures = [([picture], with_place([{"content": q}, {}])[0]) for q, picture, _, _ in pairs]
    judged = [(one, other) for _, _, one, other in pairs]
    kto = [
        {"messages": [asked, said(text)], "label": text == one, "images": images}
        for (images, asked), (one, other) in zip(pictures, judged, strict=True)
        for text in (one, other)
    ]
    swift_pairs = [
        {"messages": [asked, said(one)], "rejected_response": other, "images": images}
        for (images, asked), (one, other) in zip(pictures, judged, strict=True)
    ]
    factory_pairs = [
        {"messages": [asked], "chosen": said(one), "rejected": said(other), "images": images}
        for (images, asked), (one, other) in zip(pictures, judged, strict=True)
    ]
    others = with_other_pictures(pairs)
    factory_swapped = [
        pair | {"images": [picture]}
        for pair, (_, picture, _, _) in zip(factory_pairs, others, strict=True)
    ]
    data = folder / "data"
    described = {}
    factory_sets = sets | {"pairs": factory_pairs, "swapped": factory_swapped, "kto": kto}
    for name, rows in factory_sets.items():
        columns = {column: column for column in COLUMNS if column in rows[0]}
        columns |= {"kto_tag": "label"} if name == "kto" else {}
        described[name] = {"file_name": f"{name}.json", "formatting": "sharegpt", "tags": TAGS}
        described[name] |= {"columns": columns, "ranking": "chosen" in rows[0]}
        (data / f"{name}.json").write_text(json.dumps(rows))
    (data / "dataset_info.json").write_text(json.dumps(described))
    for name, rows in (sets | {"pairs": swift_pairs, "kto": kto}).items():
        (data / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
