"""The making of the embedded model: tokenizer, corpus, training loop, and export with
evaluation."""
