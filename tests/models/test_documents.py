"""Documents in a sample: each against itself alone, run by transformers' GPT2LMHeadModel."""

from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2LMHeadModel

from mlm.convert.huggingface.gpt2 import MAPPING
from mlm.models import documents as module
from mlm.models.documents import Boundaries, Spans, document_bias, document_positions
from mlm.models.gpt2.model import GPT2
from mlm.parallel.compute_state import prepare_to_compile
from mlm.parallel.config import IGNORE_INDEX
from mlm.parallel.cross_entropy import full_logits
from mlm.parallel.dropout import DropoutStream
from mlm.parallel.mesh import Axis
from mlm.parallel.random import init_parameters
from mlm.parallel.sharding import load_full, parameter_shards
from tests.megatron_core import megatron_core
from tests.models.reference import random_gpt2
from tests.models.tiny import tiny

VOCAB, SEQ, EOD = 61, 16, 7
MODEL = tiny(hidden_size=32, max_positions=SEQ, vocab_size=VOCAB, vocab_multiple=8)
LENGTHS = (
    (16,),  # one document, which continues after the sample
    (1, 5, 1, 1, 3, 5),  # begins with an end; ends in a row; the last token is an end
    (4, 4, 7, 1),  # of equal lengths; the last document begins with the sample's last token
    (1,) * 16,
)
CLOSED = (False, True, False, True)
"""True if a sample's last document ends with it."""
ONE = Axis("tp")


@cache
def batch() -> tuple[Tensor, Tensor]:
    """Tokens and labels [4, S] with documents of LENGTHS; the labels behind ends are other tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(EOD + 1, VOCAB, (2, len(LENGTHS), SEQ), generator=generator)
    for row, (lengths, closed) in enumerate(zip(LENGTHS, CLOSED, strict=True)):
        ends = torch.tensor(lengths).cumsum(0) - 1
        tokens[row, ends if closed else ends[:-1]] = EOD
    return tokens, labels


@cache
def reference() -> GPT2LMHeadModel:
    """transformers' model of random weights (biases and norms too), in float64."""
    sizes = {"vocab_size": VOCAB, "n_positions": SEQ, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return random_gpt2(**sizes).double()


@cache
def expected(reset_positions: bool, reset_attention: bool, mask_eod_loss: bool) -> dict[str, Any]:
    """Logits, summed loss and gradients where each document (or sample) has a run of its own."""
    model, (tokens, labels) = reference(), batch()
    model.zero_grad()
    logits = torch.empty(*tokens.shape, VOCAB, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for row, lengths in enumerate(LENGTHS):
        positions = torch.cat([torch.arange(n) for n in lengths]) if reset_positions else torch.arange(SEQ)
        begin = 0
        for length in lengths if reset_attention else (SEQ,):
            run = slice(begin, begin + length)
            out = model(tokens[row : row + 1, run], position_ids=positions[None, run]).logits[0]
            wanted = labels[row, run].clone()  # of the sample: a document does not know what follows it
            if mask_eod_loss:
                wanted[tokens[row, run] == EOD] = IGNORE_INDEX
            total = total + F.cross_entropy(out, wanted, reduction="sum", ignore_index=IGNORE_INDEX)
            logits[row, run] = out.detach()
            begin += length
    total.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {
        "boundaries": Boundaries(EOD, reset_positions, reset_attention, mask_eod_loss),
        "weights": MAPPING.to_parameters(model.state_dict(), MODEL),
        "grads": MAPPING.to_parameters(grads, MODEL),
        "logits": logits,
        "loss": total.detach(),
    }


SWITCHES = [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]


@pytest.mark.parametrize(("positions", "attention", "mask"), SWITCHES, ids=str)
def test_a_packed_sample_is_its_documents_alone(positions: bool, attention: bool, mask: bool) -> None:
    """Logits, loss and all gradients in float64, where only the order of sums differs."""
    check_against_transformers(expected(positions, attention, mask))


def check_against_transformers(want: dict[str, Any]) -> None:
    fp64 = torch.float64
    model = GPT2(MODEL, tp=ONE, dtype=fp64).double()
    load_full(model, want["weights"], ONE)
    (tokens, labels), boundaries = batch(), want["boundaries"]
    documents = boundaries.documents(tokens, fp64)
    close: dict[str, Any] = {"rtol": 0.0, "atol": 1e-10}
    with torch.no_grad():
        hidden = model.hidden_states(tokens, None, None, documents)  # [S, B, H]
        logits = full_logits(hidden.transpose(0, 1).flatten(0, 1), model.token)
    torch.testing.assert_close(logits.view(want["logits"].shape), want["logits"], **close)

    labels = boundaries.scored(tokens, labels)
    one = torch.ones((), dtype=fp64)
    torch.testing.assert_close(model.losses(tokens, labels, None, documents).sum(), want["loss"], **close)
    loss = model(tokens, labels, one, None, None, documents)
    loss.backward()
    torch.testing.assert_close(loss.detach(), want["loss"], **close)
    for shard in parameter_shards(model, ONE):
        grad = shard.without_padding(shard.parameter.grad)
        torch.testing.assert_close(grad, want["grads"][shard.name], msg=shard.name, **close)


def test_every_switch_changes_the_loss() -> None:
    """Guards the tests above: two equal references would compare too little."""
    losses = [expected(*switches)["loss"].item() for switches in (*SWITCHES, (False, False, False))]
    assert len({round(loss, 6) for loss in losses}) == 5


def test_the_mask_for_one_kernel_gives_what_document_by_document_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mask that a GPU is given, here on the CPU."""
    monkeypatch.setattr(module, "document_spans", lambda ends, dtype: Spans((), document_bias(ends, dtype)))
    check_against_transformers(expected(True, True, False))


@pytest.mark.slow
def test_the_switches_do_what_megatrons_do() -> None:
    """Positions, mask and scored tokens of random samples, by megatron-core's own function."""
    dataset = megatron_core("datasets.gpt_dataset")
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        tokens, labels = torch.randint(0, 4, (2, 1, 24), generator=generator)  # every fourth an end
        mask, loss_mask, positions = dataset._get_ltor_masks_and_position_ids(
            tokens[0], 3, True, True, True, True
        )
        ours = Boundaries(3, True, True, True)
        assert torch.equal(document_positions(tokens == 3)[0], positions)
        assert torch.equal(document_bias(tokens == 3, torch.float32)[0] != 0, mask)
        assert torch.equal(ours.scored(tokens, labels)[0] != IGNORE_INDEX, loss_mask.bool())


def dropout_model(recompute: str = "none") -> tuple[GPT2, DropoutStream]:
    config = replace(MODEL, hidden_dropout=0.2, attention_dropout=0.2)
    model = GPT2(config, tp=ONE, recompute=recompute)
    init_parameters(model, 1, ONE)
    return model, DropoutStream.of_micro_batch(1, 0, 1, torch.device("cpu"))


@pytest.mark.parametrize("how", ["none", "full"])
def test_no_document_sees_another_under_dropout(how: str) -> None:
    """Other tokens in one document change hidden states in it alone, forward, and gradients, backward."""
    model, stream = dropout_model(how)
    tokens = batch()[0][1:2]
    other = tokens.clone()
    other[0, 1] = (other[0, 1] + 1) % VOCAB  # in the document of tokens 1 to 5
    documents = Boundaries(EOD, True, True).documents(tokens, torch.float32)
    x, y = (model.hidden_states(t, stream, None, documents)[:, 0] for t in (tokens, other))  # [S, H]
    changed = (x != y).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [1, 2, 3, 4, 5]

    embedded = model.embed(tokens, stream, documents.positions).detach().requires_grad_()
    model.hidden_states(tokens, stream, embedded, documents)[
        3, 0, 0
    ].backward()  # of one number: norms take sums away
    assert embedded.grad[:, 0].any(dim=1).nonzero().flatten().tolist() == [1, 2, 3]


def gradients_of(model: GPT2, shift: int) -> list[Tensor]:
    tokens, labels = batch()
    tokens = tokens.roll(shift, dims=1)
    model.zero_grad()
    documents = Boundaries(EOD, True, True).documents(tokens, torch.float32)
    model(tokens, labels, torch.tensor(1.0), None, None, documents).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_compiled_layers_give_the_same_and_are_compiled_once() -> None:
    """Documents of other lengths make no new graph; equal but for float32 rounding."""
    model, _ = dropout_model()
    eager = [gradients_of(model, shift) for shift in range(3)]
    torch._dynamo.reset()
    prepare_to_compile()
    for layer in model.layers.values():
        layer.compile(backend="eager")
    first = gradients_of(model, 0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = [first, *(gradients_of(model, shift) for shift in (1, 2))]
    for a, b in zip(chain(*eager), chain(*compiled), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
