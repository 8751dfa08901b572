"""Rows for evaluation: their loss in training.json, the best weights, an early end."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from glm4v_patched.data.collate import ConversationCollator
from glm4v_patched.finetune import evaluation, trainer
from glm4v_patched.finetune.plan import CHECKED_DATA, check_data, rows_of
from glm4v_patched.finetune.recipe import Recipe
from glm4v_patched.finetune.recipe_model import base_of
from glm4v_patched.inference.answer_worker import Answerer
from glm4v_patched.inference.questions import Generation
from glm4v_patched.models.loading import load
from glm4v_patched.remote.modeling_chatglm import GLM4VForCausalLM
from glm4v_patched.remote.processing_chatglm import ChatGLMProcessor
from tests.helpers.recipes import drawn_recipe, train_here


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Recipe:
    """Three epochs, a quarter of the rows held out."""
    changes = {
        "trainer.max_steps": None,
        "trainer.num_train_epochs": 3.0,
        "trainer.per_device_train_batch_size": 4,
        "trainer.logging_steps": 1,
        "trained": "lora_lm",
        "lora.dropout": 0.3,
        "engine.zero_stage": 0,
        "data.eval": 0.25,
    }
    return drawn_recipe(tmp_path_factory.mktemp("evaluated"), changes)


@pytest.fixture(scope="module")
def report(drawn) -> dict:
    return train_here(drawn)


def test_every_epoch_is_evaluated_on_all_rows_and_tokens(drawn, report, tmp_path):
    steps = [entry["step"] for entry in report["evaluations"]]
    assert len(steps) == 3 and steps[-1] == report["history"][-1]["step"]
    checked = check_data(drawn)
    checked.write(tmp_path / CHECKED_DATA)
    rows = list(checked.eval.conversations())
    batch = ConversationCollator(ChatGLMProcessor.from_pretrained(drawn.model))(rows)
    tokens = (batch["labels"][:, 1:] != -100).sum().item()
    assert {entry["eval_tokens"] for entry in report["evaluations"]} == {tokens}
    from peft import PeftModel

    base = GLM4VForCausalLM.from_pretrained(drawn.model, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, drawn.out).eval()
    with torch.no_grad():
        loss = model(**batch).loss.item()
    assert report["evaluations"][-1]["eval_loss"] == pytest.approx(loss, rel=1e-4)


def test_evaluation_builds_no_logits_of_all_positions_and_no_cache(drawn, tmp_path, monkeypatch):
    found = []
    forward = GLM4VForCausalLM.forward

    def watched(self, *arguments, **options):
        outputs = forward(self, *arguments, **options)
        if not self.training and options.get("labels") is not None:
            found.append((outputs.logits, outputs.past_key_values))
        return outputs

    monkeypatch.setattr(GLM4VForCausalLM, "forward", watched)
    changes = {"out": str(tmp_path / "out"), "trainer.max_steps": 1, "data.eval_answers": 0}
    report = train_here(drawn.override(changes))
    assert "eval_exact_match" not in report["evaluations"][0]
    assert found and {*found} == {(None, None)}


def test_some_rows_are_answered_as_the_saved_model_answers_them(drawn, report, monkeypatch):
    checked = check_data(drawn)
    processor = ChatGLMProcessor.from_pretrained(drawn.model)
    answers = []
    monkeypatch.setattr(evaluation, "draw_sheet", lambda _, found, *__: answers.extend(found))
    sheet = Path(drawn.out, "answers.png")
    sample = evaluation.Sample(checked.eval, processor, 8, 64, 4, 1024, sheet)
    assert len(sample.questions) == min(8, len(checked.eval.conversations()))
    model = load(base_of(drawn.override({"model": drawn.out})), "cpu")
    matches = sample.answer(model.model, draws=True)
    alone = Answerer(model, Generation(max_new_tokens=64))
    # In batches of as many: of a model that hardly learned, rounding may decide a token.
    prompts = [question.prompt for question in sample.questions]
    batches = [prompts[:4], prompts[4:]]
    assert answers == [answer.text for some in batches for answer in alone.answer(some)]
    assert matches == report["evaluations"][-1]["eval_exact_match"]
    assert sheet.is_file()


def test_rows_without_room_for_an_answer_are_passed_over(drawn):
    checked = check_data(drawn)
    processor = ChatGLMProcessor.from_pretrained(drawn.model)
    longest = int(checked.eval.column("in_table").max())
    sample = partial(evaluation.Sample, checked.eval, processor, 8, 64, 4, sheet=Path("unused"))
    assert sample(longest + 64).questions and not sample(64).questions


def test_evaluation_changes_nothing_of_the_training(drawn, report, tmp_path):
    """Not even LoRA's dropout: no random number is drawn."""
    changes = {"out": str(tmp_path / "out"), "trainer.eval_strategy": "steps"}
    other = train_here(drawn.override(changes | {"trainer.eval_steps": 2}))
    assert other["history"] == report["history"]
    last = report["history"][-1]["step"]
    assert [e["step"] for e in other["evaluations"]] == [*range(2, last, 2), last]
    quiet = {"out": str(tmp_path / "quiet"), "trainer.eval_strategy": "no"}
    assert train_here(drawn.override(quiet))["history"] == report["history"]


def test_the_best_weights_are_saved_and_patience_ends_the_run(drawn, tmp_path, monkeypatch):
    # Given, for whether a small model gets worse again depends on the machine's rounding.
    given = iter([3.0, 2.0, 2.5, 2.25, 1.0])
    monkeypatch.setattr(trainer, "mean_loss", lambda *_: (next(given), 1))
    asked = drawn.override(
        {
            "out": str(tmp_path / "out"),
            "trainer.num_train_epochs": 5.0,
            "trainer.save_strategy": "epoch",
            "trainer.save_total_limit": 1,
            "trainer.load_best_model_at_end": True,
            "trainer.early_stopping_patience": 2,
        }
    )
    found = train_here(asked)
    losses = {entry["step"]: entry["eval_loss"] for entry in found["evaluations"]}
    assert [*losses.values()] == [3.0, 2.0, 2.5, 2.25]
    _, best, _, last = losses
    assert found["best_step"] == best
    kept = {path.name for path in Path(asked.out).glob("checkpoint-*")}
    assert kept == {f"checkpoint-{best}", f"checkpoint-{last}"}
    saved = load_file(Path(asked.out, "adapter_model.safetensors"))
    for step, is_saved in ((best, True), (last, False)):
        there = load_file(Path(asked.out, f"checkpoint-{step}", "adapter_model.safetensors"))
        assert all(torch.equal(weight, there[name]) for name, weight in saved.items()) == is_saved


def test_where_the_last_step_is_best_its_weights_stay(drawn, tmp_path):
    asked = drawn.override(
        {
            "out": str(tmp_path / "out"),
            "trainer.num_train_epochs": 2.0,
            "trainer.save_strategy": "epoch",
            "trainer.load_best_model_at_end": True,
        }
    )
    found = train_here(asked)
    losses = [entry["eval_loss"] for entry in found["evaluations"]]
    assert losses[1] < losses[0] and found["best_step"] == found["history"][-1]["step"]
    [checkpoint] = Path(asked.out).glob("checkpoint-*")
    saved = load_file(Path(asked.out, "adapter_model.safetensors"))
    there = load_file(checkpoint / "adapter_model.safetensors")
    assert any(not torch.equal(weight, there[name]) for name, weight in saved.items())


def test_the_best_step_of_all_leaves_no_checkpoint_to_train_a_step_too_many_from(drawn, tmp_path):
    asked = {
        "out": str(tmp_path / "out"),
        "trainer.num_train_epochs": 2.0,
        "trainer.save_strategy": "best",
        "trainer.load_best_model_at_end": True,
    }
    found = train_here(drawn.override(asked))
    first, last = [entry["step"] for entry in found["evaluations"]]
    assert found["best_step"] == last == found["history"][-1]["step"]
    [checkpoint] = tmp_path.glob("out/checkpoint-*")
    assert checkpoint.name == f"checkpoint-{first}"
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert (state["best_global_step"], state["best_model_checkpoint"]) == (first, str(checkpoint))


def test_rows_that_decide_what_is_best_belong_to_a_run(drawn):
    checked = check_data(drawn)
    others = check_data(drawn.override({"data.eval": drawn.data.train}))
    others = replace(checked, eval=others.eval)
    best = drawn.override({"trainer.save_strategy": "best"})
    for asked, changes in ((drawn, 0), (best, 1)):
        assert len(rows_of(asked, checked).changes_to(rows_of(asked, others))) == changes


@pytest.mark.parametrize(
    ("rows", "batch", "processes"), [(7, 2, 3), (1, 4, 2), (8, 2, 2), (5, 1, 4)]
)
def test_all_processes_have_as_many_batches_and_each_row_counts_once(
    monkeypatch, rows, batch, processes
):
    monkeypatch.setattr(evaluation.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(evaluation.dist, "get_world_size", lambda: processes)
    counted, lengths = [], set()
    for rank in range(processes):
        monkeypatch.setattr(evaluation.dist, "get_rank", lambda rank=rank: rank)
        batches, weights = evaluation._share(rows, batch)
        lengths.add(len(batches))
        counted += [n for one, w in zip(batches, weights, strict=True) for n in one if w]
        assert all(batches)
    assert sorted(counted) == list(range(rows)) and len(lengths) == 1
