"""Rows for evaluation: their loss in training.json, the best weights, an early end."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.testing import assert_close

from glm4v_patched.data.collate import ConversationCollator
from glm4v_patched.finetune import evaluation, trainer, worker
from glm4v_patched.finetune.checkpoints import (
    ResumeFingerprint,
    data_changes,
    write_checkpoint_manifest,
)
from glm4v_patched.finetune.ending import describe_end
from glm4v_patched.finetune.job import resolve_recipe
from glm4v_patched.finetune.plan import Plan, check_data, digest_rows, make_plan
from glm4v_patched.finetune.recipe.model import resolve_base
from glm4v_patched.finetune.recipe.sections import Recipe
from glm4v_patched.finetune.trainer import RecipeTrainer
from glm4v_patched.inference.answer_worker import Answerer
from glm4v_patched.inference.questions import Generation
from glm4v_patched.models.loading import load_with_processor
from glm4v_patched.models.placement import Placement
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from tests.helpers.recipes import train_here

TOKENS = 4  # of an answer, on which an evaluation spends most of its time


@pytest.fixture(scope="module")
def base_recipe(base_recipe, tmp_path_factory) -> Recipe:
    """Three epochs, a quarter of the rows held out."""
    changes = {
        "trainer.max_steps": None,
        "trainer.num_train_epochs": 3.0,
        "trainer.per_device_train_batch_size": 4,
        "trainer.logging_steps": 1,
        "lora.dropout": 0.3,
        "data.eval": 0.25,
        "data.eval_answers": 8,
        "data.eval_max_new_tokens": TOKENS,
        "out": str(tmp_path_factory.mktemp("evaluated") / "out"),
    }
    return base_recipe.override(changes)


@pytest.fixture(scope="module")
def report(base_recipe) -> dict:
    return train_here(base_recipe)


assert_equal = partial(assert_close, rtol=0, atol=0)


def adapters(folder: str | Path) -> dict[str, torch.Tensor]:
    return load_file(Path(folder, "adapter_model.safetensors"))


def test_every_epoch_is_evaluated_on_all_rows_and_tokens(base_recipe, report):
    steps = [entry["step"] for entry in report["evaluations"]]
    assert len(steps) == 3 and steps[-1] == report["history"][-1]["step"]
    rows = list(check_data(resolve_recipe(base_recipe)).eval.conversations())
    batch = ConversationCollator(ChatGLMProcessor.from_pretrained(base_recipe.model))(rows)
    tokens = (batch["labels"][:, 1:] != -100).sum().item()
    assert {entry["eval_tokens"] for entry in report["evaluations"]} == {tokens}
    base = GLM4VForCausalLM.from_pretrained(base_recipe.model, dtype=torch.float32)
    with torch.no_grad():
        loss = PeftModel.from_pretrained(base, base_recipe.out).eval()(**batch).loss.item()
    assert report["evaluations"][-1]["eval_loss"] == pytest.approx(loss, rel=1e-4)


@pytest.fixture
def sample(base_recipe):
    """The rows that are answered, of a model with so many positions."""
    processor = ChatGLMProcessor.from_pretrained(base_recipe.model)
    sheet = Path(base_recipe.out, "answers.png")
    return partial(
        evaluation.EvalGenerations,
        check_data(resolve_recipe(base_recipe)).eval,
        processor,
        sheet,
        8,
        TOKENS,
        2,
    )


def test_rows_whose_answer_just_fits_are_asked_and_those_without_room_passed_over(
    base_recipe, sample
):
    lengths = sorted(map(int, check_data(resolve_recipe(base_recipe)).eval.column("position_ids")))
    for free_positions in (lengths[-1], lengths[0], 0):
        fitting = sum(length <= free_positions for length in lengths)
        assert len(sample(free_positions + TOKENS).questions) == min(fitting, 8)


def test_the_rows_that_are_answered_are_spread_over_all_that_fit():
    """Neighbors in a file are often alike."""
    checked: Any = SimpleNamespace(
        column=lambda _: np.array([20, 5, 5, 5, 20, 5, 5, 5]),
        conversations=lambda: [[{"role": "user", "content": "q"}]] * 8,
        sample_labels=range(8),
    )
    sample = evaluation.EvalGenerations(checked, None, Path(), 4, TOKENS, 2, max_positions=10)
    assert sample.row_labels == [1, 2, 5, 6]


def test_some_rows_are_answered_as_the_saved_model_answers_them_and_its_settings_stay(
    base_recipe, report, sample, monkeypatch
):
    generations, answers = sample(1024), []
    monkeypatch.setattr(evaluation, "draw_sheet", lambda _, texts, *__: answers.extend(texts))
    assert Path(base_recipe.out, "answers.png").is_file()
    saved = resolve_base(base_recipe.override({"model": base_recipe.out}))
    model = load_with_processor(saved, "cpu")
    usual = model.model.generation_config
    matches = generations.answer(model.model, is_main_process=True)
    assert model.model.generation_config is usual
    alone = Answerer(model, Generation(max_new_tokens=TOKENS))
    # In batches of as many: of a model that hardly learned, rounding may decide a token.
    prompts = [question.prompt for question in generations.questions]
    batches = [prompts[:4], prompts[4:]]
    assert answers == [answer.text for some in batches for answer in alone.answer(some)]
    assert matches == report["evaluations"][-1]["eval_exact_match"]


def test_evaluation_changes_nothing_of_the_training(mine, report):
    """Not even LoRA's dropout: no random number is drawn."""
    other = train_here(mine.override({"trainer.eval_strategy": "steps", "trainer.eval_steps": 3}))
    assert other["history"] == report["history"]
    last = report["history"][-1]["step"]
    assert [e["step"] for e in other["evaluations"]] == [*range(3, last, 3), last]


@pytest.fixture
def stopped_early(mine, monkeypatch) -> Recipe:
    """Its second evaluation is the best, and the fourth the last of patience 2."""
    # Given, for whether a small model gets worse again depends on the machine's rounding.
    losses = iter([3.0, 2.0, 2.5, 2.25, 2.1, 1.0])
    monkeypatch.setattr(RecipeTrainer, "_mean_loss", lambda *_: (next(losses), 1))
    return mine.override(
        {
            "trainer.num_train_epochs": 5.0,
            "trainer.save_strategy": "epoch",
            "trainer.save_total_limit": 1,
            "trainer.load_best_model_at_end": True,
            "trainer.early_stopping_patience": 2,
        }
    )


def test_the_best_weights_are_saved_patience_ends_the_run_and_both_are_said(stopped_early):
    result = train_here(stopped_early)
    losses = {entry["step"]: entry["eval_loss"] for entry in result["evaluations"]}
    assert [*losses.values()] == [3.0, 2.0, 2.5, 2.25]
    first, best, third, last = losses
    assert result["best_step"] == best
    out = Path(stopped_early.out)
    names = {path.name for path in out.glob("checkpoint-*")}
    # None of the last step: a run that continues from it would make one step more.
    assert names == {f"checkpoint-{best}", f"checkpoint-{third}"}
    assert_equal(adapters(out), adapters(out / f"checkpoint-{best}"))
    ended, saved, measured, files, following = describe_end(
        resolve_recipe(stopped_early), True
    ).splitlines()
    assert f"early, after step {last} of {5 * first}: 2 evaluations without a better" in ended
    assert f"the adapters of step {best}, the best by eval_loss: eval_loss 2, eval_e" in saved
    for name in ("", "loss.png", "answers.png", "training.json"):
        assert str(out / name).rstrip("/") in files
    assert following.endswith(f"chat {out} --device cpu")


def test_a_loss_that_is_nan_is_never_the_best_and_no_answer_is_right_then(
    stopped_early, monkeypatch
):
    nan = float("nan")
    eval_losses = iter([nan, 3.0, nan, 2.0, nan, nan, 1.0])
    monkeypatch.setattr(RecipeTrainer, "_mean_loss", lambda *_: (next(eval_losses), 1))
    monkeypatch.setattr(evaluation.EvalGenerations, "answer", lambda *_, **__: 1.0)
    result = train_here(stopped_early.override({"trainer.num_train_epochs": 7.0}))
    losses = [entry["eval_loss"] for entry in result["evaluations"]]
    assert [*map(str, losses)] == ["nan", "3.0", "nan", "2.0", "nan", "nan"]
    matches = [entry["eval_exact_match"] for entry in result["evaluations"]]
    assert matches == [0, 1, 0, 1, 0, 0]
    assert result["best_step"] == result["evaluations"][3]["step"]
    assert "2 evaluations without a better" in describe_end(resolve_recipe(stopped_early), True)


def test_a_loss_that_is_nan_is_not_the_best_by_another_metric(stopped_early, monkeypatch):
    losses = iter([float("nan"), 3.0, 2.0])
    monkeypatch.setattr(RecipeTrainer, "_mean_loss", lambda *_: (next(losses), 1))
    monkeypatch.setattr(evaluation.EvalGenerations, "answer", lambda *_, **__: 0.0)
    by_match = {"trainer.metric_for_best_model": "eval_exact_match"}
    result = train_here(stopped_early.override(by_match | {"trainer.num_train_epochs": 3.0}))
    assert [entry["eval_exact_match"] for entry in result["evaluations"]] == [0, 0, 0]
    assert result["best_step"] == result["evaluations"][1]["step"]


@pytest.mark.parametrize("strategy", ["epoch", "best"])
def test_where_the_last_step_is_best_its_weights_stay_and_no_checkpoint_of_it(
    mine, monkeypatch, strategy
):
    """From which a step too many would be trained."""
    losses = iter([2.0, 1.0])
    monkeypatch.setattr(RecipeTrainer, "_mean_loss", lambda *_: (next(losses), 1))
    changes = {"trainer.num_train_epochs": 2.0, "trainer.save_strategy": strategy}
    changes["data.eval_answers"] = 0
    result = train_here(mine.override(changes | {"trainer.load_best_model_at_end": True}))
    first, last = [entry["step"] for entry in result["evaluations"]]
    assert result["best_step"] == last == result["history"][-1]["step"]
    [checkpoint] = Path(mine.out).glob("checkpoint-*")
    assert checkpoint.name == f"checkpoint-{first}"
    with pytest.raises(AssertionError):
        assert_equal(adapters(mine.out), adapters(checkpoint))
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert (state["best_global_step"], state["best_model_checkpoint"]) == (first, str(checkpoint))


def test_rows_that_decide_what_is_best_belong_to_a_run(base_recipe, tmp_path):
    other = base_recipe.override({"data.eval": base_recipe.data.train})
    checked = check_data(resolve_recipe(base_recipe))
    others = replace(checked, eval=check_data(resolve_recipe(other)).eval)
    for decides in (False, True):
        fingerprint = ResumeFingerprint({}, {}, digest_rows(checked, decides))
        write_checkpoint_manifest(tmp_path, fingerprint)
        now = digest_rows(others, decides)
        assert len(data_changes(tmp_path, now, accept=True)) == decides


@pytest.mark.parametrize(
    ("name", "value", "decides"),
    [
        ("load_best_model_at_end", True, True),
        ("save_strategy", "best", True),
        ("patience", 1, True),
        ("save_strategy", "steps", False),
    ],
)
def test_rows_for_evaluation_count_with_each_field_by_which_they_decide(
    base_recipe, name, value, decides
):
    values = {"load_best_model_at_end": False, "save_strategy": "no", "patience": None}
    values |= {name: value}
    plan = SimpleNamespace(
        arguments=values,
        loop=SimpleNamespace(patience=values["patience"]),
        settings={},
        file_digests={},
    )
    rows = Plan.fingerprint(cast(Any, plan), check_data(resolve_recipe(base_recipe))).rows
    assert (rows.evaluated is not None) is decides


def test_an_image_that_changed_before_it_is_evaluated_is_refused(base_recipe, tmp_path):
    data = shutil.copytree(Path(base_recipe.data.train).parent, tmp_path / "drawn")
    job = resolve_recipe(base_recipe.override({"data.train": str(data / "train.jsonl")}))
    checked, processor = check_data(job), ChatGLMProcessor.from_pretrained(base_recipe.model)
    rows = worker._eval_data(make_plan(job, Placement(1, on_cpu=True), checked), checked, processor)
    [conversation, *_] = rows["eval_dataset"]
    Path(conversation[0]["image"]).write_bytes(b"changed")
    with pytest.raises(ValueError, match="has changed since the training began"):
        rows["eval_collator"]([conversation])


@pytest.mark.parametrize(("rows", "batch", "processes"), [(7, 2, 3), (1, 4, 2), (8, 2, 2)])
def test_all_processes_have_as_many_batches_and_each_row_counts_once(
    monkeypatch, rows, batch, processes
):
    monkeypatch.setattr(evaluation.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(evaluation.dist, "get_world_size", lambda: processes)
    counted, lengths = [], set()
    for rank in range(processes):
        monkeypatch.setattr(evaluation.dist, "get_rank", lambda rank=rank: rank)
        batches, weights = evaluation.shard_batches(rows, batch)
        lengths.add(len(batches))
        counted += [n for one, w in zip(batches, weights, strict=True) for n in one if w]
        assert all(batches)
    assert sorted(counted) == list(range(rows)) and len(lengths) == 1


def test_a_batch_of_weight_0_counts_neither_in_the_mean_loss_nor_in_its_tokens(monkeypatch):
    labels = torch.tensor([[-100, 1, 2, 3]])
    monkeypatch.setattr(trainer, "shard_batches", lambda *_: ([[0], [1], [0]], [1, 1, 0]))
    arguments = SimpleNamespace(per_device_eval_batch_size=1, dataloader_num_workers=0)
    arguments.device = torch.device("cpu")
    of_trainer = SimpleNamespace(
        args=arguments,
        eval_collator=None,
        model_wrapped=torch.nn.Identity(),
        is_world_process_zero=lambda: False,
        _make_loader=lambda *_, batch_sampler: [
            {"labels": labels, "row": n} for [n] in batch_sampler
        ],
        _sum_of_losses=lambda batch: torch.tensor(3.0 + 6 * batch["row"]),
    )
    assert RecipeTrainer._mean_loss(cast(Any, of_trainer), [0, 1]) == (12 / 6, 6)
