"""The loss of a sample takes as many tokens at a time as there is room for their logits."""

import jax
import numpy as np
import pytest

from kvq_models.calibration import activations
from tests.kvq_models.checkpoints import SIZES, random_llama, random_tokens, tiny_config


def test_a_large_vocabulary_takes_fewer_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch):
    llama = random_llama(tiny_config(num_hidden_layers=1))
    hidden = jax.random.normal(jax.random.key(0), (1, 40, SIZES["hidden_size"]))
    labels, compiled, sizes = random_tokens((1, 40)), activations._loss, list[int]()

    def counted(llama, hidden, labels):
        sizes.append(labels.shape[1])
        return compiled(llama, hidden, labels)

    monkeypatch.setattr(activations, "_loss", counted)
    loss, gradient = activations.gradient_of_the_loss(llama, hidden, labels)
    monkeypatch.setattr(activations, "LOSS_LOGITS", 16 * SIZES["vocab_size"] + 1)
    in_parts, gradient_in_parts = activations.gradient_of_the_loss(llama, hidden, labels)
    assert sizes == [40, 16, 16, 8]
    np.testing.assert_allclose(in_parts, loss, rtol=1e-6)
    np.testing.assert_allclose(gradient_in_parts, gradient, rtol=1e-5, atol=1e-6)
    assert np.abs(gradient - gradient[:, ::-1]).max() > 1e-2
