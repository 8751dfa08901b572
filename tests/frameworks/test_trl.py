"""TRL's trainers: the loss of the first step, or the norm of its gradients, by hand.

By hand means: row by row, without padding, from logits, by the formula of the method's paper. Jobs
that learn are in jobs.py.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from torch import Tensor, nn

from glm4v_patched.remote.modeling_chatglm import ChatGLMForSequenceClassification, GLM4VForCausalLM
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from tests.frameworks import drawn_task
from tests.frameworks.drawn_task import END

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None,
    reason="TRL is not installed: nox -f tests/noxfile.py -s frameworks",
)
NUMBER = 4
BETA = 0.3
SMOOTH = 0.2
NEW = 6  # tokens of a generated answer
ONCE = {"max_steps": 1, "learning_rate": 0.0, "per_device_train_batch_size": NUMBER}
ONCE |= {"save_strategy": "no", "report_to": "none", "use_cpu": True, "bf16": False}
ONCE |= {"logging_steps": 1, "disable_tqdm": True, "max_grad_norm": 1e9}
IS_OLD = Version(transformers.__version__).major < 5
# fp32: sums in another order, and padded rows. transformers 4 rounds what it logs.
CLOSE = {"rel": 2e-5, "abs": 6e-5 if IS_OLD else 2e-6}


class Task:
    """Rows with an image each, their messages, and three models."""

    def __init__(self, folder):
        models = drawn_task.Models(folder)
        random = models("random")
        self.processor = ChatGLMProcessor.from_pretrained(random)
        self.pairs = drawn_task.pairs_of(models.conversations)[: 2 * NUMBER : 2]
        self.load = lambda: GLM4VForCausalLM.from_pretrained(random, dtype=torch.float32)
        self.scorer = ChatGLMForSequenceClassification.from_pretrained(
            random, dtype=torch.float32, num_labels=1
        )

    def model(self, seed: int) -> GLM4VForCausalLM:
        """Another one for each seed, which answers with other probabilities."""
        model = self.load()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.02 * torch.randn(weight.shape, generator=generator)
        return model.eval()

    def asked(self, question: str, image) -> dict:
        """A row of a question."""
        message = {"role": "user", "content": question} | (
            {} if image is None else {"image": image}
        )
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        return dict(
            self.processor.apply_chat_template([message], add_generation_prompt=True, **options)
        )

    def answered(self, question: str, image, answer: str) -> tuple[dict, int]:
        """A row of a question and its answer, and where that begins."""
        tokenizer = self.processor.tokenizer
        ids = tokenizer(f"\n{answer}", add_special_tokens=False)["input_ids"]
        return self.with_ids(question, image, ids)

    def with_ids(self, question: str, image, ids: list[int]) -> tuple[dict, int]:
        row = self.asked(question, image)
        first = row["input_ids"].shape[1]
        row["input_ids"] = torch.cat((row["input_ids"], torch.tensor([ids])), dim=1)
        return row | {"attention_mask": torch.ones_like(row["input_ids"])}, first

    def log_probs(self, model, question: str, image, answer: str) -> Tensor:
        """Of each token of an answer."""
        return self.of_new(model, *self.answered(question, image, answer))

    def of_new(self, model, row: dict, first: int) -> Tensor:
        logits = model(**row).logits[0, first - 1 : -1].log_softmax(-1)
        return logits.gather(1, row["input_ids"][0, first:, None])[:, 0]


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Task:
    return Task(tmp_path_factory.mktemp("trl"))


KINDS = ["images, processor", "texts, processor", "texts, tokenizer"]


class Case:
    """What a trainer is given: rows with images or without, the processor or its tokenizer."""

    def __init__(self, task: Task, kind: str):
        self.task, with_images = task, kind.startswith("images")
        # For rows of text alone TRL asks for ids of conversations, in which no text is special.
        end = END if with_images else ""
        self.pairs = [
            (question, image if with_images else None, right + end, wrong + end)
            for question, image, right, wrong in task.pairs
        ]
        processor = task.processor
        self.processing_class = processor.tokenizer if "tokenizer" in kind else processor

    def data(self, one_image: bool = False, **columns: Callable):
        """A data set of such columns of each pair, and the images."""
        import datasets

        name, kind = "images", datasets.List(datasets.Image())
        if one_image:
            name, kind = "image", datasets.Image()
        rows = [{name: make(*pair) for name, make in columns.items()} for pair in self.pairs]
        if self.pairs[0][1] is None:
            return datasets.Dataset.from_list(rows)
        for row, pair in zip(rows, self.pairs, strict=True):
            row[name] = pair[1] if one_image else [pair[1]]
        return datasets.Dataset.from_list(rows).cast_column(name, kind)

    def prompt(self, question: str, *_) -> list[dict]:
        return [{"role": "user", "content": question}]

    def right(self, question, image, right, wrong) -> list[dict]:
        return [{"role": "assistant", "content": right}]

    def wrong(self, question, image, right, wrong) -> list[dict]:
        return [{"role": "assistant", "content": wrong}]

    def number(self, *pair) -> int:
        return self.pairs.index(pair)

    def log_probs(self, model, column: int = 2) -> list[Tensor]:
        """Return the tokens' log probabilities of the right answers (2) or the wrong ones (3)."""
        return [self.task.log_probs(model, *pair[:2], pair[column]) for pair in self.pairs]

    def sums(self, model, column: int) -> Tensor:
        return torch.stack([log_probs.sum() for log_probs in self.log_probs(model, column)])


def first_step(name: str, model: nn.Module, case: Case, data, folder, *args, **more) -> dict:
    """Return what a trainer logs in its first step.

    Args:
        more: Fields of its config; ``trainer_kwargs`` are arguments of the trainer itself.
    """
    trainer_kwargs = more.pop("trainer_kwargs", {})
    module = importlib.import_module(more.pop("module", "trl"))
    make_config = getattr(module, f"{name}Config")
    if "trust_remote_code" in inspect.signature(make_config).parameters:
        more["trust_remote_code"] = True  # some load a second model
    config = make_config(str(folder), **ONCE | more)
    common = {"args": config, "processing_class": case.processing_class, "train_dataset": data}
    trainer = getattr(module, f"{name}Trainer")(model, *args, **common, **trainer_kwargs)
    trainer.train()
    return trainer.state.log_history[0]


def norm_of(loss: Tensor, model: nn.Module) -> float:
    gradients = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
    return torch.stack([g.norm() for g in gradients if g is not None]).norm().item()


WITH_PROCESSOR = pytest.mark.parametrize("kind", KINDS[:2])


@WITH_PROCESSOR
@pytest.mark.parametrize("loss_type", ["nll", "chunked_nll"])
def test_sft_trains_with_the_loss_of_its_formula(task, kind, loss_type, tmp_path):
    case, model = Case(task, kind), task.model(1)
    data = case.data(prompt=case.prompt, completion=case.right)
    logged = first_step("SFT", model, case, data, tmp_path, max_length=None, loss_type=loss_type)
    want = -torch.cat(case.log_probs(task.model(1))).mean().item()
    assert logged["loss"] == pytest.approx(want, **CLOSE)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_sft_of_plain_texts_learns_to_end(task, kind, tmp_path):
    """Written as the page has it; TRL adds what ends an answer."""
    case, model = Case(task, kind), task.model(1)
    data = case.data(
        prompt=lambda question, *_: f"<|user|>\n{question}<|assistant|>",
        completion=lambda *pair: f"\n{pair[2]}",
    )
    logged = first_step("SFT", model, case, data, tmp_path, max_length=None)
    case.pairs = [(*pair[:2], pair[2] + END, pair[3]) for pair in case.pairs]
    with torch.no_grad():
        want = -torch.cat(case.log_probs(task.model(1))).mean().item()
    assert logged["loss"] == pytest.approx(want, **CLOSE)


@pytest.mark.parametrize("name", ["SFT", "DPO"])
def test_conversations_for_the_tokenizer_end_with_what_to_give(task, name, tmp_path):
    """As published, it makes a batch of one conversation, too; see the page."""
    case = Case(task, KINDS[2])
    data = case.data(prompt=case.prompt, chosen=case.right, rejected=case.wrong)
    data = data.rename_column("chosen", "completion") if name == "SFT" else data
    message = r"has shape \(\d, 1, .* give a trainer the processor"
    if IS_OLD:  # TRL wants to show such ids, which decode takes since transformers 5
        message = "unhashable type: 'list'"
    with pytest.raises((ValueError, TypeError), match=message):
        first_step(name, task.model(1), case, data, tmp_path, max_length=None)


@WITH_PROCESSOR
def test_dpo_trains_with_the_loss_of_its_formula(task, kind, tmp_path):
    case, model, reference = Case(task, kind), task.model(1), task.model(2)
    data = case.data(prompt=case.prompt, chosen=case.right, rejected=case.wrong)
    options = {"max_length": None, "beta": BETA, "trainer_kwargs": {"ref_model": reference}}
    logged = first_step("DPO", model, case, data, tmp_path, **options)
    with torch.no_grad():
        ours, theirs = (
            case.sums(one, 2) - case.sums(one, 3) for one in (task.model(1), task.model(2))
        )
    want = -F.logsigmoid(BETA * (ours - theirs)).mean().item()
    assert logged["loss"] == pytest.approx(want, **CLOSE)


@WITH_PROCESSOR
def test_kto_trains_with_the_loss_of_its_formula(task, kind, tmp_path):
    import datasets

    case, model, reference = Case(task, kind), task.model(1), task.model(2)
    half = NUMBER // 2
    good = case.data(prompt=case.prompt, completion=case.right, label=lambda *_: True)
    bad = case.data(prompt=case.prompt, completion=case.wrong, label=lambda *_: False)
    data = datasets.concatenate_datasets([good.select(range(half)), bad.select(range(half))])
    options = {"max_length": None, "beta": BETA, "trainer_kwargs": {"ref_model": reference}}
    logged = first_step("KTO", model, case, data, tmp_path, **options)
    kto_pairs = case.pairs[:half] * 2
    answers = [pair[2] for pair in case.pairs[:half]] + [pair[3] for pair in case.pairs[:half]]
    # The divergence is that of each question's answer to another one: the one before it.
    others = answers[-1:] + answers[:-1]

    def ratios(answers: list[str]) -> Tensor:
        models = task.model(1), task.model(2)
        ours, theirs = (
            [task.log_probs(one, *q[:2], a).sum() for q, a in zip(kto_pairs, answers, strict=True)]
            for one in models
        )
        return torch.stack(ours) - torch.stack(theirs)

    with torch.no_grad():
        divergence = ratios(others).mean().clamp(min=0)
        good, bad = (BETA * (ratios(answers) - divergence)).split(half)
    want = torch.cat((1 - good.sigmoid(), bad.sigmoid())).mean().item()
    assert logged["loss"] == pytest.approx(want, **CLOSE)
    assert divergence > 0.1 or kind != KINDS[0]


@pytest.mark.parametrize("adapters", [False, True])
def test_a_reward_model_trains_with_the_loss_of_its_formula(task, adapters, tmp_path):
    """It takes only a tokenizer, and texts instead of conversations."""
    import datasets
    from peft import LoraConfig

    case = Case(task, KINDS[2])
    tokenizer = case.processing_class

    def chat(question, answer) -> str:
        messages = [*case.prompt(question), {"role": "assistant", "content": answer + END}]
        return tokenizer.apply_chat_template(messages, tokenize=False, add_special_tokens=False)

    rows = [{"chosen": chat(q, a), "rejected": chat(q, b)} for q, _, a, b in case.pairs]
    data = datasets.Dataset.from_list(rows)
    lora = LoraConfig(task_type="SEQ_CLS", r=4, target_modules="all-linear")
    kwargs = {"peft_config": lora} if adapters else {}
    logged = first_step(
        "Reward", task.scorer, case, data, tmp_path, max_length=None, trainer_kwargs=kwargs
    )
    with torch.no_grad():
        scores = {
            name: torch.stack(
                [
                    task.scorer(**task.answered(pair[0], None, pair[at] + END)[0]).logits[0, 0]
                    for pair in case.pairs
                ]
            )
            for name, at in {"chosen": 2, "rejected": 3}.items()
        }
    want = -F.logsigmoid(scores["chosen"] - scores["rejected"]).mean().item()
    assert logged["loss"] == pytest.approx(want, **CLOSE)


class Rewards:
    """Rewards that tell answers apart; keeps the answers, and the numbers of their questions."""

    __name__ = "rewards"
    of_answers = torch.tensor([0.2, 1.0, 0.5, 0.1, 0.9, 0.3, 0.0, 0.6])

    def __init__(self, model: GLM4VForCausalLM):
        self.eos_token_id = model.generation_config.eos_token_id

    def __call__(self, completion_ids: list[list[int]], number: list[int], **_) -> list[float]:
        # Some trainers pad answers, with an id that ends them.
        ends = self.eos_token_id
        first = [next((n for n, i in enumerate(ids) if i in ends), NEW) for ids in completion_ids]
        cut = [ids[: end + 1] for ids, end in zip(completion_ids, first, strict=True)]
        self.answers = [*zip(number, cut, strict=True)]
        return self.of_answers.tolist()

    def log_probs(self, model, case: Case) -> list[Tensor]:
        """Of each token of each answer."""
        return [
            case.task.of_new(model, *case.task.with_ids(*case.pairs[number][:2], ids))
            for number, ids in self.answers
        ]


def advantages(name: str, rewards: Tensor) -> Tensor:
    of_questions = rewards.view(-1, 2)
    if name == "RLOO":  # to the other one
        return (of_questions - of_questions.flip(1)).flatten()
    mean, std = of_questions.mean(1, keepdim=True), of_questions.std(1, keepdim=True)
    return ((of_questions - mean) / (std + 1e-4)).flatten()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["GRPO", "RLOO", "GMPO"])
def test_online_methods_have_the_gradients_of_their_formula(task, kind, name, tmp_path):
    """Gradients of log probabilities, weighted with advantages; the losses are about 0."""
    case, model = Case(task, kind), task.model(1)
    rewards = Rewards(model)
    options = {"num_generations": 2, "max_completion_length": NEW, "beta": 0.0}
    options |= {"per_device_train_batch_size": 2 * NUMBER}
    options |= {"GRPO": {"loss_type": "grpo"}, "GMPO": {"module": "trl.experimental.gmpo"}}.get(
        name, {}
    )
    data = case.data(prompt=case.prompt, number=case.number)
    logged = first_step(name, model, case, data, tmp_path, [rewards], **options)
    by_hand = task.model(1)
    weights = advantages(name, rewards.of_answers)
    log_probs = [
        one.sum() if name == "RLOO" else one.mean() for one in rewards.log_probs(by_hand, case)
    ]
    loss = -(weights * torch.stack(log_probs)).mean()
    assert logged["grad_norm"] == pytest.approx(norm_of(loss, by_hand), rel=1e-3)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2]])
def test_online_dpo_trains_with_the_loss_of_its_formula(task, kind, tmp_path):
    case, model = Case(task, kind), task.model(1)
    rewards = Rewards(model)
    data = case.data(one_image=True, prompt=case.prompt, number=case.number)
    options = {"module": "trl.experimental.online_dpo", "max_new_tokens": NEW, "beta": BETA}
    options["trainer_kwargs"] = {"reward_funcs": rewards, "ref_model": task.model(2)}
    logged = first_step("OnlineDPO", model, case, data, tmp_path, **options)
    with torch.no_grad():
        ratios = [
            (ours.sum() - theirs.sum()).item()
            for ours, theirs in zip(
                *(rewards.log_probs(task.model(seed), case) for seed in (1, 2)), strict=True
            )
        ]
    first, second = torch.tensor(ratios).split(NUMBER)
    better, worse = rewards.of_answers.split(NUMBER)
    margins = (first - second) * torch.where(better >= worse, 1.0, -1.0)
    want = -F.logsigmoid(BETA * margins).mean().item()
    assert logged["loss"] == pytest.approx(want, abs=6e-5)  # it rounds what it logs


def no_images(question: str, *_) -> list[dict]:
    """A prompt with the place of an image, which is not given."""
    parts = [{"type": "image"}, {"type": "text", "text": question}]
    return [{"role": "user", "content": parts}]


@pytest.mark.parametrize("name", ["OnlineDPO", "SDFT", "SDPO"])
def test_images_that_trl_drops_are_missed_where_prompts_have_their_places(task, name, tmp_path):
    """These trainers pass on no ``images``, and say nothing: they train on texts alone."""
    case = Case(task, KINDS[0])
    snake = {"OnlineDPO": "online_dpo"}.get(name, name.lower())
    options: dict = {"module": f"trl.experimental.{snake}"}
    options["max_new_tokens" if name == "OnlineDPO" else "max_completion_length"] = NEW
    if name != "OnlineDPO":
        options["num_generations"] = 2
    columns = {"number": case.number, "privileged_context": lambda *pair: pair[2]}
    for prompt, runs in ((case.prompt, 0), (no_images, None)):
        model, seen = task.model(1), []
        model.transformer.vision.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        rewards = {"reward_funcs": lambda completions, **_: [*map(float, range(len(completions)))]}
        kwargs = {"trainer_kwargs": {} if name == "SDFT" else rewards}
        data = case.data(prompt=prompt, **columns)
        train = partial(first_step, name, model, case, data, tmp_path, **options, **kwargs)
        if runs is None:
            with pytest.raises(ValueError, match="images were passed|part with 0 images"):
                train()
        else:
            train()
            assert len(seen) == runs


def divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return each token's generalized Jensen-Shannon divergence, from logits."""
    p, q = teacher.softmax(-1), student.softmax(-1)
    mean = beta * p + (1 - beta) * q
    return (beta * p * (p / mean).log() + (1 - beta) * q * (q / mean).log()).sum(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_distillation_trains_with_the_divergence_of_generated_answers(task, kind, tmp_path):
    """Sampling among one token is greedy, so that the student's answers are known."""
    if IS_OLD and "processor" in kind:
        pytest.skip(
            "before transformers 5 TRL looks for the inner model of a processor's in .model"
        )
    case, student, teacher = Case(task, kind), task.model(1), task.model(2)
    options = {"top_k": 1, "max_completion_length": NEW, "beta": 0.7, "temperature": 0.8}
    options["trainer_kwargs"] = {"teacher_model": teacher}
    data = case.data(prompt=case.prompt)
    logged = first_step("Distillation", student, case, data, tmp_path, **options)
    student, teacher, divergences = task.model(1), task.model(2), []
    for question, image, *_ in case.pairs:
        row = task.asked(question, image)
        ids = student.generate(**row, max_new_tokens=NEW, do_sample=False)
        first = row["input_ids"].shape[1]
        row, first = task.with_ids(question, image, ids[0, first:].tolist())
        with torch.no_grad():
            logits = [one(**row).logits[0, first - 1 : -1] / 0.8 for one in (student, teacher)]
        divergences.append(divergence(*logits, 0.7))
    assert logged["loss"] == pytest.approx(torch.cat(divergences).mean().item(), **CLOSE)


@pytest.mark.parametrize("name", ["CPO", "ORPO", "TPO"])
def test_preference_methods_for_text_train_with_the_loss_of_their_formula(task, name, tmp_path):
    """They take a tokenizer only, and no images."""
    case, model = Case(task, KINDS[2]), task.model(1)
    columns = {"prompt": case.prompt, "chosen": case.right, "rejected": case.wrong}
    if name == "TPO":  # it asks for ids of conversations one by one: texts, as for rewards
        chat = task.processor.tokenizer.apply_chat_template
        columns = {
            "prompt": lambda *pair: chat(
                case.prompt(*pair),
                tokenize=False,
                add_special_tokens=False,
                add_generation_prompt=True,
            ),
            "chosen": lambda *pair: f"\n{pair[2]}{END}",
            "rejected": lambda *pair: f"\n{pair[3]}{END}",
            "reference": lambda *pair: f"\n{pair[2]}{END}",
        }
    options = {"module": f"trl.experimental.{name.lower()}", "max_length": None, "beta": BETA}
    options |= {} if name == "ORPO" else {"label_smoothing": SMOOTH}
    logged = first_step(name, model, case, case.data(**columns), tmp_path, **options)
    # All of them end an answer.
    case.pairs = [(*pair[:2], pair[2] + END, pair[3] + END) for pair in case.pairs]
    model = task.model(1)
    with torch.no_grad():
        right, wrong = case.log_probs(model, 2), case.log_probs(model, 3)
        if name == "ORPO":
            odds = [
                torch.stack([one.mean() - torch.log1p(-one.mean().exp()) for one in answers])
                for answers in (right, wrong)
            ]
            rows = [task.answered(*pair[:3])[0] for pair in case.pairs]
            supervised = torch.cat([task.of_new(model, row, 1) for row in rows]).mean()
            want = -supervised - BETA * F.logsigmoid(odds[0] - odds[1]).mean()
        else:
            sums = [torch.stack([one.sum() for one in answers]) for answers in (right, wrong)]
            margin = BETA * (sums[0] - sums[1])
            preferred = (1 - SMOOTH) * F.logsigmoid(margin) + SMOOTH * F.logsigmoid(-margin)
            want = -preferred.mean() - torch.cat(right).mean()
    assert logged["loss"] == pytest.approx(want.item(), **CLOSE)


@pytest.mark.parametrize(
    ("name", "kind"), [("GKD", KINDS[2]), ("GOLD", KINDS[2]), ("GOLD", KINDS[0])]
)
def test_distillation_trains_with_the_divergence_of_given_answers(task, kind, name, tmp_path):
    case, student, teacher = Case(task, kind), task.model(1), task.model(2)
    options = {"module": f"trl.experimental.{name.lower()}", "lmbda": 0.0, "beta": 0.5}
    options |= {"temperature": 1.0, "max_length": 512, "trainer_kwargs": {"teacher_model": teacher}}
    columns = {"messages": lambda *pair: case.prompt(*pair) + case.right(*pair)}
    if kind == KINDS[0]:
        # GOLD treats a loaded teacher as text-only, because its vision_config is a plain dict.
        folder = tmp_path / "teacher"
        for part in (teacher, task.processor):
            part.save_pretrained(folder)
        options["trainer_kwargs"]["teacher_model"] = str(folder)
        options["teacher_model_init_kwargs"] = {"dtype": "float32"}
        columns = {"prompt": case.prompt, "completion": case.right}
    logged = first_step(name, student, case, case.data(**columns), tmp_path, **options)
    student, teacher, divergences = task.model(1), task.model(2), []
    for pair in case.pairs:
        row, first = task.answered(*pair[:3])
        with torch.no_grad():
            logits = [one(**row).logits[0, first - 1 : -1] for one in (student, teacher)]
        divergences.append(divergence(*logits, 0.5))
    assert logged["loss"] == pytest.approx(torch.cat(divergences).mean().item(), **CLOSE)
