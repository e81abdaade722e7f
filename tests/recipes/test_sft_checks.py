"""Mistakes are found before the first step, and each error says what, where and what to do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import full_sft
import pytest
import qlora_sft
import sft_callbacks
import sft_checks
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from recipe_tiny import build_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from flashoptim_hf.errors import ConfigurationError


@pytest.fixture
def model(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model)


# ---------------------------------------------------------------------- options


def parse(recipe: Any, *words: str) -> Any:
    given = ["--model_name_or_path", "m", "--dataset", "d.jsonl", "--output_dir", "o", "--use_cpu", "true", *words]
    return recipe.make_parser().parse_args_and_config(given)


@pytest.mark.parametrize("recipe", [qlora_sft, full_sft])
def test_a_typo_names_the_nearest_key(recipe: Any, tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("learning_rat: 0.5\ndataset_formt: text\nzzzz: 1\n")
    with pytest.raises(ConfigurationError) as caught:
        parse(recipe, "--config", str(file))
    for part in ("learning_rat,", "did you mean learning_rate?", "did you mean dataset_format?", "zzzz,", "--help"):
        assert part in str(caught.value)
    with pytest.raises(ConfigurationError, match=r"flag --learning_rat, .*did you mean --learning_rate\?"):
        parse(recipe, "--learning_rat", "0.5")
    with pytest.raises(ConfigurationError, match="did you mean --max_steps"):
        parse(recipe, "--max_stepz=3")


def test_contradictory_precision_names_both() -> None:
    _, args, model_args = parse(qlora_sft, "--dtype", "float16")
    with pytest.raises(ConfigurationError, match=r"dtype=float16 .* contradicts bf16=true"):
        sft_checks.precision(args, model_args)
    for words in ((), ("--dtype", "float32"), ("--dtype", "float16", "--fp16", "true", "--bf16", "false")):
        _, args, model_args = parse(qlora_sft, *words)
        sft_checks.precision(args, model_args)


@pytest.mark.parametrize("option", ["early_stopping_patience", "sample_every_evals"])
@pytest.mark.parametrize(("strategy", "data"), [("no", [1]), ("steps", None)])
def test_what_needs_evaluations_says_so(option: str, strategy: str, data: Any) -> None:
    config = SimpleNamespace(**{"early_stopping_patience": 0, "sample_every_evals": 0, "sample_tokens": 4, option: 2})
    trainer: Any = SimpleNamespace(args=SimpleNamespace(eval_strategy=strategy), eval_dataset=data)
    with pytest.raises(ConfigurationError, match=f"{option}=2 needs evaluations.*eval_steps"):
        sft_callbacks.attach(trainer, config, [1])


# ---------------------------------------------------------------------- model and tokenizer


def test_another_models_tokenizer_is_refused(model: Any) -> None:
    tokenizer = build_tokenizer()
    sft_checks.tokenizer_fits(model, tokenizer, "m")
    tokenizer.add_tokens([f"<new{i}>" for i in range(4)])  # 265 of 264 rows
    with pytest.raises(
        ConfigurationError, match=r"tokenizer of m has ids up to 264 \('<new3>'\).* 264 rows.*resize_token_embeddings\(265\)"
    ):
        sft_checks.tokenizer_fits(model, tokenizer, "m")
    model.resize_token_embeddings(265)  # not a multiple of anything, and what the message says
    sft_checks.tokenizer_fits(model, tokenizer, "m")


def test_an_adapter_in_inference_mode_is_named(model: Any, tmp_path: Path) -> None:
    get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"), adapter_name="mine").save_pretrained(tmp_path)
    base = LlamaForCausalLM(model.config)
    loaded = PeftModel.from_pretrained(base, tmp_path / "mine", adapter_name="mine")
    with pytest.raises(ConfigurationError, match=r"zero trainable parameters.*adapter 'mine' is in inference mode.*is_trainable=True"):
        sft_checks.trainable(loaded)
    sft_checks.trainable(PeftModel.from_pretrained(LlamaForCausalLM(model.config), tmp_path / "mine", is_trainable=True))
    with pytest.raises(ConfigurationError, match=r"zero trainable parameters.*requires_grad"):
        sft_checks.trainable(torch.nn.Linear(2, 2).requires_grad_(False))


def test_checkpointing_that_passes_no_gradient_on_is_refused(model: Any) -> None:
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    reentrant: Any = SimpleNamespace(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})
    other: Any = SimpleNamespace(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})
    adapted.train()
    adapted.base_model.model.gradient_checkpointing_enable({"use_reentrant": True})
    ids = torch.arange(5, 15)[None]

    def reached() -> int:
        adapted.zero_grad()
        loss = adapted(input_ids=ids, labels=ids).loss
        if not loss.requires_grad:
            return 0
        loss.backward()
        return sum(weight.grad is not None for weight in adapted.parameters())

    adapted.get_input_embeddings()._forward_hooks.clear()  # what PEFT or transformers may have put there already
    sft_checks.checkpointing(adapted, other)
    with pytest.raises(ConfigurationError, match=r"use_reentrant=true passes no gradient on.*enable_input_require_grads"):
        sft_checks.checkpointing(adapted, reentrant)
    assert reached() == 0  # what would have happened
    adapted.enable_input_require_grads()
    sft_checks.checkpointing(adapted, reentrant)
    assert reached() == 28


@pytest.mark.parametrize("modules", [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]])
def test_tied_weights_that_are_trained_whole_stay_tied(modules: list[str]) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=True
    )
    base = LlamaForCausalLM(config)
    adapter = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=modules)
    assert sft_checks.tie_saved_modules(adapter, base)
    model = get_peft_model(base, adapter)
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    assert sum(weight.shape == (37, 16) for weight in trainable) == 1  # one matrix, one state
    optimizer = torch.optim.SGD(trainable, lr=0.5)
    ids = torch.arange(20)[None]
    for _ in range(3):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        before = model(input_ids=ids).logits
        merged = model.merge_and_unload()
        after = merged(input_ids=ids).logits
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


def test_untied_models_and_plain_adapters_are_left_alone(model: Any) -> None:
    plain = LoraConfig(r=2, target_modules=["q_proj"])
    assert not sft_checks.tie_saved_modules(plain, model)
    untied = SimpleNamespace(config=LlamaConfig(tie_word_embeddings=False))
    assert not sft_checks.tie_saved_modules(LoraConfig(modules_to_save=["lm_head"]), untied)  # type: ignore[arg-type]
