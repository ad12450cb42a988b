"""Models of ``transformers`` with small random configurations: whole training steps in one graph, equal to eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.parity import Program, batches, parity, tokens

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 23, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


def trained(model: torch.nn.Module, batch: Callable[[int], tuple], loss_of: Callable[..., Any]) -> Program:
    model.train()
    # With the default eps, Adam turns the rounding noise of gradients that are zero (key biases) into full steps.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)

    def step(*args):
        loss = loss_of(model, *args)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    # A step does not change the model's configuration: compare what trains.
    return Program(step, batch, ([*model.parameters()], [*model.buffers()], optimizer))


def ids(index: int) -> tuple[torch.Tensor, ...]:
    return tokens(23, 3, 8)(index)


def causal(model, x, y):
    return model(input_ids=x, labels=x).loss


def gpt2() -> Program:
    names = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    sizes = {names.get(name, name): size for name, size in SIZES.items() if name != "intermediate_size"}
    config = transformers.GPT2Config(**sizes, n_positions=8, bos_token_id=0, eos_token_id=0)
    return trained(transformers.GPT2LMHeadModel(config), ids, causal)


def llama_model() -> torch.nn.Module:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=1, bos_token_id=0, eos_token_id=0)
    return transformers.LlamaForCausalLM(config)


def llama() -> Program:
    return trained(llama_model(), ids, causal)


def bert_config(**options) -> Any:
    return transformers.BertConfig(**SIZES, max_position_embeddings=8, **options)


def bert() -> Program:
    """Padding of changing length, in a mask."""

    def batch(index):
        x, y = ids(index)
        mask = torch.ones_like(x)
        mask[:, 6 + index % 3 :] = 0
        return x, mask, y

    model = transformers.BertForMaskedLM(bert_config())
    return trained(model, batch, lambda model, x, mask, y: model(input_ids=x, attention_mask=mask, labels=y).loss)


def bert_classifier() -> Program:
    model = transformers.BertForSequenceClassification(bert_config(problem_type="single_label_classification"))
    return trained(model, ids, lambda model, x, y: model(input_ids=x, labels=y[:, 0] % 2).loss)


def t5() -> Program:
    config = transformers.T5Config(
        vocab_size=23, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config)
    return trained(model, ids, lambda model, x, y: model(input_ids=x, labels=y).loss)


def vit() -> Program:
    sizes = {name: SIZES[name] for name in SIZES if name != "vocab_size"}
    config = transformers.ViTConfig(
        **sizes, image_size=8, patch_size=4, num_labels=3, problem_type="single_label_classification"
    )
    model = transformers.ViTForImageClassification(config)
    return trained(model, batches((3, 3, 8, 8), classes=3), lambda model, x, y: model(pixel_values=x, labels=y).loss)


@pytest.mark.parametrize("make", [gpt2, llama, bert, bert_classifier, t5, vit], ids=lambda make: make.__name__)
@pytest.mark.every(3)
def test_model(make):
    parity(make, steps=4)


@pytest.mark.parametrize(
    "make", [bert_classifier, pytest.param(llama, marks=pytest.mark.slow)], ids=lambda make: make.__name__
)
@pytest.mark.slow
def test_compiled_model(make, monkeypatch):
    """Regression: BERT's masks were read before they were drawn, and gave NaN; the eager backend does not reorder."""
    for name, size in {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 96}.items():
        monkeypatch.setitem(SIZES, name, size)
    parity(make, steps=3, backend="inductor", rng="eager")


def op_by_op(module, inputs):
    """A user-defined backend, which is compared with a tolerance."""
    return module.forward


@pytest.mark.slow
def test_mask_of_ones():
    """Eager skips a mask of ones and uses another kernel: equal up to rounding."""

    def batch(index):
        x, _ = ids(index)
        mask = torch.ones_like(x)
        mask[:, 6:] = index % 2
        return x, mask

    def make() -> Program:
        return trained(
            llama_model(), batch, lambda model, x, mask: model(input_ids=x, attention_mask=mask, labels=x).loss
        )

    parity(make, steps=4, backend=op_by_op)


@pytest.mark.slow
def test_gradient_checkpointing():
    def make() -> Program:
        model = llama_model()
        model.config.use_cache = False
        model.gradient_checkpointing_enable()
        return trained(model, ids, causal)

    parity(make, steps=4)


def test_model_output_leaves_the_step():
    """A ``ModelOutput`` is used as an object, as a dict and as a tuple, and returned whole."""

    def make() -> Program:
        program, model = llama(), llama_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            out = model(input_ids=x, labels=y, output_hidden_states=True, use_cache=False)
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss, logits = out[:2]
            assert loss is out.loss and logits is out["logits"] and "attentions" not in out
            return type(out)(loss=loss.detach(), logits=logits.detach()), len(out.hidden_states), list(out.keys())

        program.step, program.watch = step, ([*model.parameters()], optimizer)
        # The library registers hooks in its first call that asks for hidden states; a step that does is not captured.
        step(*program.batch(0))
        return program

    parity(make, steps=4)
